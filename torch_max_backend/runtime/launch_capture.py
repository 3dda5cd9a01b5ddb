"""A launch list whose kernels are replayed as one device graph, see ``runtime.capture``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_max_backend.launches import LaunchList
from torch_max_backend.launches.memory import TORCH_ALIGNMENT, rounded_up
from torch_max_backend.runtime.capture import Capture, Loan, Memory
from torch_max_backend.runtime.handover import Inputs
from torch_max_backend.runtime.launches import Launches
from torch_max_backend.runtime.leaving import Leaving
from torch_max_backend.runtime.streams import StreamOrder, stream_order
from torch_max_backend.torch_compat import copy_all, storage_users


class Argument:
    """One tensor argument; ``tensor`` is there during a call, and for good where the memory is the graph's own."""

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        self.address = address
        self.tensor: torch.Tensor | None = tensor


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _tensors(arguments: Sequence[Argument]) -> list[torch.Tensor]:
    return [each.tensor for each in arguments if each.tensor is not None]


class SharedStorage:
    """Tensors in one piece of memory, of which can be told whether anybody else has a tensor over it.

    Args:
        facts: shape, strides and dtype of each tensor; None for one that is not wanted.
        device: of the memory.

    Attributes:
        tensors: one for each of ``facts``.
    """

    def __init__(
        self, facts: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype] | None], device: torch.device
    ) -> None:
        offsets = [0]
        for fact in facts:
            size = 0 if fact is None else math.prod(fact[0]) * fact[2].itemsize
            offsets.append(offsets[-1] + rounded_up(size, TORCH_ALIGNMENT))
        self._storage = torch.empty(offsets[-1], dtype=torch.uint8, device=device).untyped_storage()
        self.tensors: list[Any] = [
            # Each has a version of its own: what users write to one is no news to the others.
            None if fact is None
            else torch.empty(0, dtype=fact[2], device=device).set_(
                self._storage, offset // fact[2].itemsize, fact[0], fact[1]
            )
            for fact, offset in zip(facts, offsets, strict=False)
        ]  # fmt: skip
        self._idle = storage_users(self._storage)

    def in_use(self) -> bool:
        """Whether there is a tensor over the memory that is not one of ``tensors``."""
        return storage_users(self._storage) > self._idle


class TensorMemory(Memory):
    """PyTorch's tensors, in the order of MAX's queue."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self.shared: SharedStorage | None = None
        """The captured results' memory."""

    def same(self, first: Argument, second: Argument) -> bool:
        """Whether both lie in one place."""
        return first.address == second.address

    def place(self, like: Argument) -> Argument:
        """A place for such an argument."""
        tensor = like.tensor
        assert tensor is not None
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return Argument(own, own.data_ptr())

    def copy(self, targets: Sequence[Argument], sources: Sequence[Argument]) -> None:
        """Copies each source into its target."""
        if targets:
            with torch.no_grad(), self._order.lane():
                copy_all(_tensors(targets), _tensors(sources))

    def in_use(self, results: Sequence[Any], loan: weakref.ref[Loan]) -> bool:
        """Whether a tensor over the captured results' memory exists, or is about to be created."""
        return super().in_use(results, loan) or (self.shared is not None and self.shared.in_use())


@dataclass(frozen=True)
class _Recorded:
    """A device graph, the scratch memory that it keeps, and whether it writes over the arguments that it updates."""

    graph: torch.cuda.CUDAGraph
    workspace: torch.Tensor
    in_place: bool


class LaunchModel:
    """A launch list with the methods of a MAX model that ``Capture`` calls.

    Args:
        launches: the list.
        order: of its device.
        memory: of the captured results.
        updates: the arguments that results may be written over, by the results' numbers.

    Attributes:
        updated: those that may be in this call, and their tensors.
        in_place: whether they were.
    """

    def __init__(
        self, launches: Launches, order: StreamOrder, memory: TensorMemory, updates: Mapping[int, int]
    ) -> None:
        self._launches, self._order, self._memory, self._updates = launches, order, memory, updates
        self._graphs: dict[int, _Recorded] = {}
        self.updated: Mapping[int, torch.Tensor] = {}
        self.in_place = False

    def _execute_device_tensors(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        results = self._launches.fresh(self.updated)
        with self._order.turn():
            self._launches.walk(_addresses(_tensors(arguments)), results, self._launches.workspace())
        self.in_place = bool(self.updated)
        return results

    def capture(self, key: int, *arguments: Argument) -> list[Any]:
        """Records the launches over ``arguments``; the results' memory is written to by each replay. A result that is
        written over an argument is None."""
        tensors = _tensors(arguments)
        # An argument that is copied to a place of its own is not updated by what is written there.
        in_place = bool(self.updated) and all(
            tensors[self._updates[result]].data_ptr() == tensor.data_ptr() for result, tensor in self.updated.items()
        )
        taken = self.updated if in_place else {}
        facts = [None if number in taken else fact for number, fact in enumerate(self._launches.facts)]
        # Nothing may run while launches are recorded. Plain calls' results, in many pieces, are not needed any more: a
        # storage of one piece would lie beside them.
        self._order.give_back()
        shared, workspace = SharedStorage(facts, self._launches.device), self._launches.workspace()
        results = [taken.get(number, tensor) for number, tensor in enumerate(shared.tensors)]
        self._graphs[key] = _Recorded(self._record(tensors, results, workspace), workspace, in_place)
        self._memory.shared = shared
        return shared.tensors

    def _record(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], workspace: torch.Tensor
    ) -> torch.cuda.CUDAGraph:
        """The launches over this memory as a device graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._order.queue):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launches.walk(_addresses(tensors), results, workspace)
            finally:
                graph.capture_end()
        return graph

    def _await_device_graphs(self) -> None:
        """Nothing is recorded in the background."""

    def replay(self, key: int, *arguments: Argument) -> None:
        """Queues the recorded launches."""
        recorded = self._graphs[key]
        with self._order.lane():
            recorded.graph.replay()
        self.in_place = recorded.in_place

    def release_captured_graph(self, key: int) -> None:
        """Gives the graph's memory back."""
        self._order.synchronize()
        del self._graphs[key]
        self._memory.shared = None


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
        memory: TensorMemory,
        own: frozenset[int],
    ) -> None:
        super().__init__(listing, inputs, leaving, device, walk)
        self._capture, self._own = capture, own
        self._order = stream_order(device)
        self._model = LaunchModel(self, self._order, memory, listing.updates)

    def _launched(
        self, entering: Sequence[torch.Tensor], addresses: Sequence[int], updated: Mapping[int, torch.Tensor]
    ) -> tuple[list[Any], bool]:
        arguments = list(map(Argument, entering, addresses))
        if not updated:
            for number in self._listing.updates.values():
                # Another place: what was recorded to be updated there must not be in this call.
                arguments[number].address = ~arguments[number].address
        with self._order.lock:
            self._model.updated = updated
            try:
                results, loan = self._capture.run(self._model, arguments)
            finally:
                # What is remembered of a call are places: its tensors belong to the caller.
                self._model.updated = {}
                for argument in arguments:
                    argument.tensor = None
            in_place = self._model.in_place
        if loan is None:
            return list(results), in_place
        written = updated if in_place else {}
        # Until here the loan keeps the results from the next replay; from here on these tensors do.
        return [
            written[number] if number in written else each.clone() if number in self._own else each.detach()
            for number, each in enumerate(results)
        ], in_place
