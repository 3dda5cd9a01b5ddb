"""Which library functions a compiled graph launches."""

from __future__ import annotations

from collections.abc import Iterable

from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.mojo_ops.functions import Function, required


def launched_functions(graphs: Iterable[CompiledGraph]) -> list[Function]:
    """The function of each launch, in the order of the launches.

    ``required()`` alone names the functions of the whole process: other tests' too.
    """
    by_symbol = {function.symbol: function for function in required()}
    listings = [executable.listing for graph in graphs for executable in graph.executables]
    return [by_symbol[launch.function] for listing in listings if listing is not None for launch in listing.launches]
