"""A launch list whose kernels are replayed as one device graph, see ``runtime.capture``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from torch_max_backend.dtypes import max_dtype
from torch_max_backend.launches import LaunchList
from torch_max_backend.max_compat import make_dlpack_capsule
from torch_max_backend.runtime.capture import Capture, Loan, Memory
from torch_max_backend.runtime.handover import Inputs, dlpack_device
from torch_max_backend.runtime.launches import Launches
from torch_max_backend.runtime.leaving import Leaving
from torch_max_backend.runtime.streams import stream_order
from torch_max_backend.torch_compat import copy_all, tensor_of_capsule


class Argument:
    """One tensor argument; ``tensor`` is there during a call, and for good where the memory is the graph's own."""

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.tensor: torch.Tensor | None = tensor


def _tensors(arguments: Sequence[Argument]) -> list[torch.Tensor]:
    return [each.tensor for each in arguments if each.tensor is not None]


class TensorMemory(Memory):
    """PyTorch's tensors, in the order of MAX's queue."""

    def __init__(self, queue: torch.cuda.Stream) -> None:
        self._queue = queue

    def same(self, first: Argument, second: Argument) -> bool:
        """Whether both lie in one place."""
        return first.address == second.address

    def place(self, like: Argument) -> Argument:
        """A place for such an argument."""
        tensor = like.tensor
        assert tensor is not None
        return Argument(
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        )  # fmt: skip

    def copy(self, targets: Sequence[Argument], sources: Sequence[Argument]) -> None:
        """Copies each source into its target."""
        if targets:
            with torch.no_grad(), torch.cuda.stream(self._queue):
                copy_all(_tensors(targets), _tensors(sources))


class LaunchModel:
    """A launch list with the methods of a MAX model that ``Capture`` calls.

    Args:
        launches: the list.
        queue: MAX's.
    """

    def __init__(self, launches: Launches, queue: torch.cuda.Stream) -> None:
        self._launches, self._queue = launches, queue
        self._graphs: dict[int, tuple[Any, ...]] = {}

    def _execute_device_tensors(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        results = self._launches.fresh()
        self._launches.walk(_tensors(arguments), results, self._launches.workspace())
        return results

    def capture(self, key: int, *arguments: Argument) -> list[torch.Tensor]:
        """Records the launches over ``arguments``; the results' memory is written to by each replay."""
        results, workspace = self._launches.fresh(), self._launches.workspace()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._queue.device)
        with torch.cuda.stream(self._queue):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launches.walk(_tensors(arguments), results, workspace)
            finally:
                graph.capture_end()
        self._graphs[key] = graph, workspace
        return results

    def _await_device_graphs(self) -> None:
        """Nothing is recorded in the background."""

    def replay(self, key: int, *arguments: Argument) -> None:
        """Queues the recorded launches."""
        with torch.cuda.stream(self._queue):
            self._graphs[key][0].replay()

    def release_captured_graph(self, key: int) -> None:
        """Gives the graph's memory back."""
        torch.cuda.synchronize(self._queue.device)
        del self._graphs[key]


class CapturedLaunches(Launches):
    """A launch list that is replayed where ``capture`` finds that it can be.

    Args:
        own: numbers of results that users may keep: these are copied, not lent.

    The others are those of ``Launches``.
    """

    def __init__(
        self,
        listing: LaunchList,
        inputs: Inputs,
        leaving: Leaving,
        device: torch.device,
        walk: str,
        capture: Capture,
        own: frozenset[int],
    ) -> None:
        # Arguments are copied to fixed places, which are not what the program updates.
        super().__init__(replace(listing, updates={}), inputs, leaving, device, walk)
        self._capture, self._own = capture, own
        self._model = LaunchModel(self, stream_order(device).queue)

    def _launched(self, entering: Sequence[torch.Tensor], updated: Mapping[int, torch.Tensor]) -> list[Any]:
        arguments = [Argument(tensor) for tensor in entering]
        try:
            with self.turn():
                results, loan = self._capture.run(self._model, arguments)
        finally:
            # What is remembered of a call are places: its tensors belong to the caller.
            for argument in arguments:
                argument.tensor = None
        if loan is None:
            return list(results)
        tensors = _lent(results, loan)
        for number in self._own:
            tensors[number] = tensors[number].clone()
        return tensors


def _lent(results: Sequence[torch.Tensor], loan: Loan) -> list[Any]:
    """Tensors over the memory of ``results`` that keep ``loan``."""
    if not results:
        return []
    device, index = dlpack_device(results[0].device)
    return list(
        map(
            tensor_of_capsule,
            map(
                make_dlpack_capsule,
                repeat(loan),
                map(torch.Tensor.data_ptr, results),
                repeat(device),
                repeat(index),
                [max_dtype(each.dtype) for each in results],
                [tuple(each.shape) for each in results],
                [each.stride() for each in results],
                repeat(None),
            ),
        )
    )
