"""A launch list whose kernels are replayed as a device graph, see ``runtime.capture``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from torch_max_backend.runtime.capture import Capture, Recording
from torch_max_backend.runtime.runner import Called, Drawn, ListRunner, RunnerSpec
from torch_max_backend.runtime.shared_storage import SharedStorage
from torch_max_backend.runtime.streams import stream_sync
from torch_max_backend.torch_compat import copy_all, storage_users

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Recorded:
    """Device graphs, and the memory that they write to.

    Attributes:
        graphs: the launches, one for each part of the list, with the draws in front of them.
        workspace: the launches' scratch memory.
        elsewhere: more of it, for what may not be written over arguments.
        results: their results, but for those that are written over arguments.
        drawn: what the draws make, in the graph's own memory.
        idle: how many users the storage of each tensor in ``drawn`` has, and the storage.
        in_place: the arguments that may be updated in place are.
    """

    graphs: Sequence[torch.cuda.CUDAGraph]
    workspace: torch.Tensor
    elsewhere: Sequence[torch.Tensor]
    results: SharedStorage
    drawn: Drawn
    idle: tuple[tuple[int, torch.UntypedStorage], ...]
    in_place: bool


class CapturedRunner(ListRunner):
    """A launch list that is replayed where ``capture`` finds that it can be.

    Args:
        spec: what it is made of.
        capture: decides.
        own: numbers of results that users may keep: these are copied, not lent.

    Attributes:
        recorded: what is replayed.
        own: as given.
    """

    def __init__(self, spec: RunnerSpec, capture: Capture, own: frozenset[int]) -> None:
        super().__init__(spec)
        self._capture, self.own = capture, own
        self._streams = stream_sync(spec.device)
        self.recorded: Recorded | None = None
        # Of the call at hand: what it may update in place, its arguments, and what it writes over.
        self._updated: Mapping[int, torch.Tensor] = {}
        self._entering: Sequence[torch.Tensor] = ()
        self._written_over: Sequence[torch.Tensor] = ()

    def launched(
        self,
        entering: Sequence[torch.Tensor],
        addresses: Sequence[int],
        updated: Mapping[int, torch.Tensor],
        written_over: Sequence[torch.Tensor],
    ) -> Called:
        return self.captured(self, entering, addresses, updated, written_over)

    def captured(
        self,
        recording: Recording[_Made],
        entering: Sequence[torch.Tensor],
        addresses: Sequence[int],
        updated: Mapping[int, torch.Tensor],
        written_over: Sequence[torch.Tensor],
    ) -> _Made:
        """What a call of ``recording``, which is this runner's, makes; arguments as of ``launched``."""
        spared = [] if updated else list(self._listing.updates.values())
        reused = zip(self._listing.reused, written_over, strict=True)
        spared += [number for number, tensor in reused if tensor is not entering[number]]
        if spared:
            addresses = list(addresses)
            for number in spared:
                # Another place: what was recorded to be written there must not be in this call.
                addresses[number] = ~addresses[number]
        with self._streams.lock:
            self._updated, self._entering, self._written_over = updated, entering, written_over
            try:
                return self._capture.run(recording, entering, addresses)
            finally:
                self._updated, self._entering, self._written_over = {}, (), ()

    def plain(self, tensors: Sequence[torch.Tensor]) -> Called:
        """A call whose results have memory of their own."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return super().launched(tensors, addresses, self._updated, self._written_over)

    def place(self, like: torch.Tensor) -> torch.Tensor:
        """A place for such an argument."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies each source into its target."""
        with torch.no_grad(), self._streams.lane():
            copy_all(list(targets), list(sources))

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records draws and launches over these arguments; the results' memory is written to by each replay."""
        # An argument that is copied to a place of its own is not updated by what is written there.
        in_place = bool(self._updated) and all(
            tensors[self._listing.updates[result]].data_ptr() == tensor.data_ptr()
            for result, tensor in self._updated.items()
        )
        taken = self._updated if in_place else {}
        facts = [None if number in taken else fact for number, fact in enumerate(self.facts)]
        # Nothing may run while launches are recorded. Plain calls' results, in many pieces, are not needed any more: a
        # storage of one piece would lie beside them.
        self._streams.give_back()
        shared, workspace = SharedStorage(facts, self.device), self.workspace()
        results = [taken.get(number, tensor) for number, tensor in enumerate(shared.tensors)]
        reused = list(zip(self._listing.reused, self._written_over, strict=True))
        # What is copied to a place of its own before each replay may be written over there.
        elsewhere = {
            number: memory for number, memory in reused
            if memory is not self._entering[number] and tensors[number] is self._entering[number]
        }  # fmt: skip
        written_over = [elsewhere.get(number, tensors[number]) for number, _ in reused]
        graphs, drawn = self._record(tensors, results, workspace, written_over)
        storages = [tensor.untyped_storage() for tensor in drawn.tensors]
        idle = tuple((storage_users(storage), storage) for storage in storages)
        self.recorded = Recorded(graphs, workspace, tuple(elsewhere.values()), shared, drawn, idle, in_place)

    def _record(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        workspace: torch.Tensor,
        written_over: Sequence[torch.Tensor],
    ) -> tuple[list[torch.cuda.CUDAGraph], Drawn]:
        """Draws and launches over this memory as device graphs, and what is drawn.

        A replay advances PyTorch's generator as the draws would, and draws the same numbers.
        """
        graphs: list[torch.cuda.CUDAGraph] = []
        drawn, addresses = Drawn(), [tensor.data_ptr() for tensor in tensors]
        for part in range(self.parts):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._streams.queue):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    if part == 0:
                        drawn = self.draw()
                        addresses += drawn.addresses
                    self.walk_part(part, self.bases(addresses, results, written_over, workspace), workspace)
                finally:
                    graph.capture_end()
            graphs.append(graph)
        return graphs, drawn

    def replay(self) -> Called:
        """Queues the recorded draws and launches."""
        recorded = self.recorded
        assert recorded is not None
        with self._streams.lane():
            for graph in recorded.graphs:
                graph.replay()
        return Called(self.replayed(recorded), self.drawn_again(recorded), recorded.in_place)

    def replay_part(self, recorded: Recorded, part: int) -> None:
        """Queues the launches of one part."""
        with self._streams.lane():
            recorded.graphs[part].replay()

    def replayed(self, recorded: Recorded) -> list[torch.Tensor]:
        """The results of a replay: lent, but for those that users may keep."""
        written = self._updated if recorded.in_place else {}
        return [
            written[number] if number in written else each.clone() if number in self.own else each.detach()
            for number, each in enumerate(recorded.results.tensors)
        ]

    @staticmethod
    def drawn_again(recorded: Recorded) -> Drawn:
        """What a replay draws."""
        return replace(recorded.drawn, tensors=tuple(tensor.detach() for tensor in recorded.drawn.tensors))

    def in_use(self) -> bool:
        """Whether a tensor over the recorded results' memory exists."""
        recorded = self.recorded
        return recorded is not None and (
            recorded.results.in_use() or any(storage_users(storage) > idle for idle, storage in recorded.idle)
        )

    def release(self) -> None:
        """Gives the recording's memory back."""
        self._streams.synchronize()
        self.recorded = None
