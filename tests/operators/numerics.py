"""Numbers of PyTorch's operator database: its samples run in MAX, beside eager and float64.

Many samples, each a graph of its own, are one compilation unit: nothing is compiled but the libraries that the machine
lacks.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_flatten

from tests import harness
from tests.operators.database import OpInfo, SampleInput, bound, differentiated, entries, passes, samples
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.compiler import compile_graph
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.options import Options

#: Samples of each entry, dtype and pass.
SAMPLES = 1
#: Few units compile soon; their graphs take memory until they have run.
ENTRIES_IN_A_UNIT = 120
#: How many the suite runs by default at most: what one asks of libraries is half a CPU-second each.
CHOSEN_SAMPLES = 100
#: The samples that the suite runs by default, by their ids: written with docs/internals/conformance.md.
CHOSEN = Path(__file__).with_name("sample.txt")
#: Entries whose results are what memory happens to hold.
UNDEFINED = ("empty", "new_empty")
#: Differences from eager and float64 that stay, by the beginning of the sample's id, and why. A listed sample that
#: agrees fails its test.
EXCEPTIONS: dict[str, str] = {
    f"{entry}-bfloat16": "PyTorch leaves the order of equal elements open here, and the kernel keeps it"
    for entry in ("argsort-forward", "msort-gradient", "sort-forward", "sort-gradient")
}
#: As above, on a GPU alone.
EXCEPTIONS_ON_A_GPU = {
    f"topk-{what}-bfloat16": "on a GPU: PyTorch leaves the order of equal elements open, and so the indices"
    for what in ("forward", "gradient")
} | {
    f"nn.functional.multi_head_attention_forward-gradient-{dtype}-0": "on a GPU: PyTorch takes the sample in its own "
    "dtype alone, so eager's result is the truth, and gradients up to 584 of a saturated softmax round otherwise"
    for dtype in ("float32", "bfloat16")
}
#: What the database itself sets within those of its functions that draw; a graph does not hold that.
_SEED_OF_DRAWS = 42
#: Nothing that is computed from operands near 1 means anything below.
_NOTHING = 1e-18


@dataclass(frozen=True)
class Posed:
    """One sample of the database.

    Attributes:
        entry: OpInfo's name.
        dtype: of the sample.
        gradient: whether gradients are computed too.
        number: of the sample, among those that are posed.
        device: that it runs on.
    """

    entry: str
    dtype: torch.dtype
    gradient: bool
    number: int = 0
    device: str = "cpu"

    @property
    def id(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.entry}-{'gradient' if self.gradient else 'forward'}-{dtype}-{self.number}"


@dataclass
class Graph:
    """A sample as a graph.

    Attributes:
        function: of ``inputs``; what was traced.
        inputs: the sample's tensors, and incoming gradients behind them.
        compiled: the graph, None where it is not lowered whole.
        why: it is not.
    """

    function: Callable[..., Any]
    inputs: list[torch.Tensor]
    compiled: CompiledGraph | None
    why: str = ""

    @property
    def ops(self) -> frozenset[str]:
        """The operators that run in MAX."""
        executables = [] if self.compiled is None else self.compiled.executables
        return frozenset(op for each in executables for op in each.built.ops)


def seed(posed: Posed) -> None:
    """Every sample draws numbers of its own, whatever was posed before it."""
    torch.manual_seed(zlib.crc32(f"{posed.entry} {posed.gradient}".encode()) + harness.SEED)


def pose(info: OpInfo, posed: Posed, most: int, unit: CompilationUnit) -> Graph | None:
    """The sample as a graph in ``unit``, None where there are not so many samples.

    Args:
        info: the entry.
        posed: which of its samples.
        most: how many there are at most, spread over all of them.
        unit: gets the graph.
    """
    seed(posed)
    found = samples(info, posed.dtype, posed.gradient, most, posed.device)
    if posed.number >= len(found):
        return None
    function, inputs = _prepared(info, found[posed.number], posed)
    try:
        seed(posed)
        with enable_python_dispatcher(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = harness.trace(function, inputs)
            compiled = compile_graph(graph, unit, Options(fallback="error"), f"sample_{len(unit.graphs)}")
    except Exception as error:
        return Graph(function, inputs, None, f"{type(error).__name__}: {error}")
    return Graph(function, inputs, compiled)


def _prepared(info: OpInfo, sample: SampleInput, posed: Posed) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    function, inputs = bound(info, sample)
    if not posed.gradient:
        return function, inputs
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    wanted = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
    seed(posed)
    results = [
        leaf
        for leaf in harness.flatten(function(*(x.requires_grad_(w) for x, w in zip(inputs, wanted, strict=True))))
        if leaf.requires_grad
    ]
    inputs = [x.detach() for x in inputs]
    return differentiated(function, wanted), [*inputs, *(harness.pattern(result.detach()) for result in results)]


def check(graph: Graph, posed: Posed) -> None:
    """Runs a compiled graph beside eager PyTorch.

    Args:
        graph: whose unit is compiled.
        posed: what it computes.

    Raises:
        AssertionError: the results differ.
    """
    assert graph.compiled is not None
    torch.manual_seed(_SEED_OF_DRAWS)
    eager = harness.flatten(graph.function(*(x.clone() for x in graph.inputs)))
    torch.manual_seed(_SEED_OF_DRAWS)
    got = list(graph.compiled([x.clone() for x in graph.inputs]))
    # float64 would draw other numbers.
    truth = eager if graph.compiled.host_ops else _truth(graph, eager)
    assert len(got) == len(eager)
    length = max((x.numel() for x in graph.inputs), default=1)
    case = harness.Case(posed.id, graph.function, lambda _: graph.inputs, length=max(1, min(length, 64)))
    for mine, near, true in zip(got, eager, truth, strict=True):
        if not all(x.is_floating_point() and bool((x.abs() < _NOTHING).all()) for x in (mine, near, true)):
            harness.assert_close(mine, near, true, case)


def _truth(graph: Graph, eager: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results in float64, eager's own where PyTorch takes only one dtype."""
    try:
        wide = [x.double() if x.is_floating_point() else x.clone() for x in graph.inputs]
        truth = harness.flatten(graph.function(*wide))
    except (RuntimeError, TypeError, ValueError):
        return list(eager)
    return truth if [x.shape for x in truth] == [x.shape for x in eager] else list(eager)


def every(names: Iterable[str], device: str = "cpu") -> list[Posed]:
    """All samples of these entries, as far as they have so many."""
    found = entries()
    return [
        Posed(name, dtype, gradient, number, device)
        for name in names
        if not name.startswith(UNDEFINED)
        for dtype, gradient in passes(found[name], device)
        for number in range(SAMPLES)
    ]


def exception(posed: Posed) -> str | None:
    """Why the sample differs, where that is known."""
    known = EXCEPTIONS if posed.device == "cpu" else {**EXCEPTIONS, **EXCEPTIONS_ON_A_GPU}
    return next((why for start, why in known.items() if posed.id.startswith(start)), None)


def together(chosen: Iterable[Posed]) -> dict[Posed, Graph]:
    """The samples that there are, compiled as one unit, those that are refused among them."""
    found = entries()
    unit = CompilationUnit("operator numbers")
    graphs = {posed: pose(found[posed.entry], posed, SAMPLES, unit) for posed in chosen}
    unit.compile()
    return {posed: graph for posed, graph in graphs.items() if graph is not None}


@dataclass
class Numbers:
    """What became of samples that ran.

    Attributes:
        agree: how many do with eager and float64.
        differ: those that do not, with what was said.
        refused: how many are not lowered whole.
    """

    agree: int = 0
    differ: dict[Posed, str] = field(default_factory=dict)
    refused: int = 0


def measure(graphs: Mapping[Posed, Graph], numbers: Numbers) -> None:
    """Checks compiled graphs and counts them."""
    for posed, graph in graphs.items():
        if graph.compiled is None:
            numbers.refused += 1
            continue
        try:
            check(graph, posed)
            numbers.agree += 1
        except Exception as error:  # Whatever a call raises, its sample has no numbers.
            numbers.differ[posed] = f"{type(error).__name__}: {error}".strip().splitlines()[0]


def cover(graphs: Mapping[Posed, Graph]) -> list[Posed]:
    """So many samples that hold as many operators as they can: each the one with the most new operators, and the fewest
    beside them. Of equal ones the dtype alternates."""
    left = {op for graph in graphs.values() for op in graph.ops}
    chosen: list[Posed] = []
    whole = {posed: graph for posed, graph in graphs.items() if graph.compiled and exception(posed) is None}
    while left and len(chosen) < CHOSEN_SAMPLES:
        best = max(
            whole,
            key=lambda posed: (
                len(left & whole[posed].ops),
                -len(whole[posed].ops),
                (posed.dtype is torch.bfloat16) == bool(len(chosen) % 2),
            ),
        )
        if not left & whole[best].ops:
            break
        chosen.append(best)
        left -= whole[best].ops
    return chosen


def survey() -> tuple[Numbers, list[Posed]]:
    """All samples, run in lots, and those that cover the operators."""
    numbers = Numbers()
    kept: dict[Posed, Graph] = {}
    names = list(entries())
    for start in track(range(0, len(names), ENTRIES_IN_A_UNIT), console=Console(stderr=True)):
        graphs = together(every(names[start : start + ENTRIES_IN_A_UNIT]))
        measure(graphs, numbers)
        kept |= graphs
    return numbers, cover(kept)
