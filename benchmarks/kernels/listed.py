"""Graphs of known sizes as launch lists, fused as a compiled model's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from max.graph import Graph, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import MAX_TO_TORCH, device_ref
from torch_max_backend.fusion.rewrite import fuse
from torch_max_backend.ir.layout import contiguous_order
from torch_max_backend.launch_list import LaunchList, launch_list
from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.mojo_ops.functions import require_entry
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine import session
from torch_max_backend.runtime.launching.runner import ListRunner, RunnerSpec
from torch_max_backend.runtime.tensors.interface import InputSpec, OutputSpec
from torch_max_backend.runtime.tensors.leaving import Leaving
from torch_max_backend.typed_graph.read import read


class ListedGraph:
    """One graph.

    Args:
        types: what it reads, of known sizes; contiguous.
        build: makes the results of the values that it reads.
        device: that it computes on.
    """

    @beartype
    @in_mlir_context
    def __init__(
        self,
        types: Sequence[TensorType],
        build: Callable[[list[TensorValue]], Sequence[TensorValue]],
        device: torch.device,
    ) -> None:
        self._device, place = device, device_ref(device)
        library = session.library_to_build_with()
        with Graph("listed", input_types=types, kernel_library=library) as graph:
            results = list(build([value.tensor for value in graph.inputs]))
            self._entering = [_fact(kind) for kind in types]
            self._leaving = [_fact(result.type) for result in results]
            read_back = read(graph, results)
        fuse(read_back, place)
        self._listing: LaunchList = launch_list(read_back, place)
        self._walk = require_entry("runner", "walk", place, ())

    @beartype
    def load(self) -> Callable[..., list[torch.Tensor]]:
        """A function from the tensors that the graph reads to its results; the libraries are built and loaded."""
        libraries.load(self._device)
        inputs = [
            InputSpec(number, dtype, contiguous_order(len(shape)), self._device, shape)
            for number, (dtype, shape) in enumerate(self._entering)
        ]
        outputs = [
            OutputSpec(number, contiguous_order(len(shape)), dtype, shape)
            for number, (dtype, shape) in enumerate(self._leaving)
        ]
        runner = ListRunner(RunnerSpec(self._listing, inputs, Leaving(outputs, []), self._device, self._walk))
        return lambda *tensors: runner.run(tensors)


def _fact(kind: TensorType) -> tuple[torch.dtype, tuple[int, ...]]:
    return MAX_TO_TORCH[kind.dtype], tuple(map(int, kind.shape))
