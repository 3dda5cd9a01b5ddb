"""A launch list whose kernels are replayed as a device graph, see ``runtime.device_graphs.capture``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torch_max_backend.launch_list import Kind
from torch_max_backend.launch_list.memory import TORCH_ALIGNMENT, Lease, Span, lease_in, rounded_up
from torch_max_backend.runtime.device_graphs.capture import COPIED_FOR_LAUNCH, Capture
from torch_max_backend.runtime.device_graphs.common_memory import Arena, bytes_over, common_memory
from torch_max_backend.runtime.engine.streams import stream_sync
from torch_max_backend.runtime.launching.runner import Called, Drawn, ListRunner, RunnerSpec
from torch_max_backend.runtime.memory.shared_storage import SharedStorage
from torch_max_backend.torch_compat import copy_all, storage_users


@dataclass(frozen=True)
class Recorded:
    """A device graph, and the memory that it writes to.

    Attributes:
        graph: the launches, with the draws in front of them.
        workspace: the launches' scratch memory, which other recordings use, too.
        elsewhere: more of it, for what may not be written over arguments.
        results: their results, but for those that are written over arguments, and those that each replay copies.
        copied: the latter, by their numbers; other recordings write over them.
        drawn: what the draws make, in the graph's own memory.
        idle: how many users the storage of each tensor in ``drawn`` has, and the storage.
        in_place: the arguments that may be updated in place are.
    """

    graph: torch.cuda.CUDAGraph
    workspace: torch.Tensor
    elsewhere: Sequence[torch.Tensor]
    results: SharedStorage
    copied: Mapping[int, torch.Tensor]
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
    """

    def __init__(self, spec: RunnerSpec, capture: Capture, own: frozenset[int]) -> None:
        super().__init__(spec)
        self._capture, self._own = capture, own
        self._streams = stream_sync(spec.device)
        self.recorded: Recorded | None = None
        self._called = False
        # Memory that is free where copied results and arguments need it, more and more of it.
        self._leases = list(self._listing.leases)
        self._copied_results = {number: self._leased_result(number) for number in own - self._listing.updates.keys()}
        self._common = common_memory(spec.device)
        self._common.join(self)
        # What the recording that is being made works in.
        self._arena: Arena | None = None
        self._taken: list[Lease] = []
        self._copies: dict[int, torch.Tensor] = {}
        # Of the call at hand: what it may update in place, its arguments, and what it writes over.
        self._updated: Mapping[int, torch.Tensor] = {}
        self._entering: Sequence[torch.Tensor] = ()
        self._written_over: Sequence[torch.Tensor] = ()

    @property
    def wanted(self) -> int:
        """Bytes that a recording will work in, as far as that is known; 0 if there is one, or may be none."""
        waits = self._called and self.recorded is None and self._capture.may_record and not self.copies_for_long(0)
        return self._worked_in() if waits else 0

    def _worked_in(self) -> int:
        """Bytes that the launches work in, and those of results that each replay copies."""
        behind = [number for number, lease in self._copied_results.items() if lease is None]
        sizes = [self.needed, *(bytes_over(*self.facts[number]) for number in behind)]
        return sum(rounded_up(size, TORCH_ALIGNMENT) for size in sizes)

    def _leased_result(self, number: int) -> Lease | None:
        """Workspace that is free from where a result is made, None where there is none."""
        first, _ = self._listing.uses(Kind.RESULT, number)
        return self._leased(self._leases, Span(bytes_over(*self.facts[number]), first, len(self._listing.launches)))

    def _leased(self, leases: list[Lease], span: Span) -> Lease | None:
        lease = lease_in(self._listing.workspace, leases, span)
        leases += [] if lease is None else [lease]
        return lease

    def launched(
        self,
        entering: Sequence[torch.Tensor],
        addresses: Sequence[int],
        updated: Mapping[int, torch.Tensor],
        written_over: Sequence[torch.Tensor],
    ) -> Called:
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
                return self._capture.run(self, entering, addresses)
            finally:
                self._updated, self._entering, self._written_over = {}, (), ()

    def plain(self, tensors: Sequence[torch.Tensor]) -> Called:
        """A call whose results have memory of their own."""
        self._called = True
        addresses = [tensor.data_ptr() for tensor in tensors]
        return super().launched(tensors, addresses, self._updated, self._written_over)

    def lent_workspace(self) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The memory that recordings share, if it suffices: no replay runs beside a plain call."""
        large = [memory for memory in self._common.living() if memory.numel() >= self.needed]
        if not large:
            return super().lent_workspace()
        return contextlib.nullcontext(min(large, key=torch.Tensor.numel))

    def copies_for_long(self, arguments: int) -> bool:
        """Whether a replay, with so many bytes of arguments, would copy for longer than the host needs for the
        launches."""
        results = sum(bytes_over(*self.facts[number]) for number in self._copied_results)
        return arguments + results > COPIED_FOR_LAUNCH * len(self._listing.launches)

    def place(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """A place for an argument, by its number."""
        arena, fact = self._dealt(), (like.shape, like.stride(), like.dtype)
        _, last = self._listing.uses(Kind.ARGUMENT, number)
        # One that is written over is memory for later values.
        last = len(self._listing.launches) if number in self._listing.reused else last
        lease = self._leased(self._taken, Span(bytes_over(*fact), 0, last))
        return arena.tensor(*fact) if lease is None else arena.tensor_at(lease.offset, *fact)

    def _dealt(self) -> Arena:
        """Memory for the recording that is being made: the launches', where copied results and places lie, too, as far
        as it is free; then that of the others."""
        if self._arena is None:
            # Nothing may run while launches are recorded. Plain calls' results, in many pieces, are not needed any
            # more: memory in the arena would lie beside them.
            self._streams.give_back()
            self._arena = self._common.arena(self._worked_in())
            self._arena.skip(self.needed)
            self._taken = list(self._leases)
            self._copies = {
                number: self._arena.tensor(*self.facts[number]) if lease is None
                else self._arena.tensor_at(lease.offset, *self.facts[number])
                for number, lease in self._copied_results.items()
            }  # fmt: skip
        return self._arena

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies each source into its target."""
        with torch.no_grad(), self._streams.lane():
            copy_all(list(targets), list(sources))

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records draws and launches over these arguments; the results' memory is written to by each replay."""
        try:
            self.recorded = self._made(tensors, self._dealt())
        finally:
            self._arena, self._copies = None, {}

    def _made(self, tensors: Sequence[torch.Tensor], arena: Arena) -> Recorded:
        # An argument that is copied to a place of its own is not updated by what is written there.
        in_place = bool(self._updated) and all(
            tensors[self._listing.updates[result]].data_ptr() == tensor.data_ptr()
            for result, tensor in self._updated.items()
        )
        taken = {**self._copies, **(self._updated if in_place else {})}
        shared = SharedStorage([None if n in taken else fact for n, fact in enumerate(self.facts)], self.device)
        results = [taken.get(number, tensor) for number, tensor in enumerate(shared.tensors)]
        reused = list(zip(self._listing.reused, self._written_over, strict=True))
        # What is copied to a place of its own before each replay may be written over there.
        elsewhere = {
            number: memory for number, memory in reused
            if memory is not self._entering[number] and tensors[number] is self._entering[number]
        }  # fmt: skip
        written_over = [elsewhere.get(number, tensors[number]) for number, _ in reused]
        graph, drawn = self._record(tensors, results, arena.memory, written_over)
        storages = [tensor.untyped_storage() for tensor in drawn.tensors]
        idle = tuple((storage_users(storage), storage) for storage in storages)
        return Recorded(graph, arena.memory, tuple(elsewhere.values()), shared, self._copies, drawn, idle, in_place)

    def _record(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        workspace: torch.Tensor,
        written_over: Sequence[torch.Tensor],
    ) -> tuple[torch.cuda.CUDAGraph, Drawn]:
        """Draws and launches over this memory as a device graph, and what is drawn.

        A replay advances PyTorch's generator as the draws would, and draws the same numbers.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._streams.queue):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                drawn = self.draw()
                addresses = [tensor.data_ptr() for tensor in tensors]
                self.walk([*addresses, *drawn.addresses], results, workspace, written_over)
            finally:
                graph.capture_end()
        return graph, drawn

    def replay(self) -> Called:
        """Queues the recorded draws and launches."""
        recorded = self.recorded
        assert recorded is not None
        with self._streams.lane():
            recorded.graph.replay()
        written = self._updated if recorded.in_place else {}
        results = [
            written[number] if number in written
            else recorded.copied[number].clone() if number in recorded.copied
            else each.clone() if number in self._own else each.detach()
            for number, each in enumerate(recorded.results.tensors)
        ]  # fmt: skip
        drawn = replace(recorded.drawn, tensors=tuple(tensor.detach() for tensor in recorded.drawn.tensors))
        return Called(results, drawn, recorded.in_place)

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
