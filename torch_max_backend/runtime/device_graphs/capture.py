"""When a launch list is replayed as a device graph instead of queueing its kernels one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_max_backend.runtime.memory.shared_storage import shared_storage_at
from torch_max_backend.runtime.tensors.leaving import taker

log = logging.getLogger("torch_max_backend")

#: The attempt to capture one graph that is refused, and after which it runs plainly: its arguments keep moving.
_CAPTURES = 8

COPIED_FOR_LAUNCH = 4 * 2**20
"""Bytes: to copy as many takes a GPU as long as the host takes for one launch, which a replay saves."""

#: Calls in a row that found the results of the last replay in use.
_BUSY = 3


Made = TypeVar("Made", covariant=True)
"""The outputs of a call."""


class Recording(Protocol[Made]):
    """A graph that can be recorded over fixed places in memory; one recording at a time."""

    def plain(self, tensors: Sequence[torch.Tensor]) -> Made:
        """The results, in memory of their own."""
        ...

    def copies_for_long(self, arguments: int) -> bool:
        """Whether a replay, with so many bytes of arguments, would copy for longer than the host needs for the
        launches."""
        ...

    def place(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """A place for an argument, by its number."""
        ...

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies each source into its target."""
        ...

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records the graph over these arguments."""
        ...

    def replay(self) -> Made:
        """The results, in the recording's memory: they are lent as long as a tensor over them exists."""
        ...

    def in_use(self) -> bool:
        """Whether a tensor over the recording's results exists."""
        ...

    def release(self) -> None:
        """Gives the recording's memory back."""
        ...


class Capture:
    """One graph's captured launches.

    A captured graph reads and writes the places that it was captured with. Arguments that stay in one memory, as
    parameters do, are read there, and so are other recordings' results; others are copied to a place of their own
    first, although an allocator may deal the same address out again. An argument that has moved makes the call run
    plainly, and after a few such calls in a row the graph is captured anew.

    Results lie in the same place each time. They are lent: as long as a tensor over them exists, calls run plainly and
    get memory of their own, so no tensor changes under its user.

    Args:
        name: of the graph, for the log.
        patience: the call that captures. Graphs that take another graph's results wait until that one is captured, and
            its results have come to rest.
        moving: numbers of arguments that are others in each call, wherever they lie.

    Attributes:
        replays: calls that were replayed.
        copied: numbers of the arguments that a replay copies.
    """

    def __init__(self, name: str, patience: int, moving: Collection[int] = ()) -> None:
        self.replays = 0
        self.copied: list[int] = []
        self._name, self._patience, self._moving = name, patience, frozenset(moving)
        self._left = _CAPTURES
        self._missed = self._busy = 0
        self._last: Sequence[tuple[int, StorageWeakRef]] = ()
        self._recorded = False
        self._places: list[torch.Tensor] = []
        self._take_copied: Callable[[Sequence[Any]], Sequence[Any]] = list
        self._take_fixed: Callable[[Sequence[Any]], Sequence[Any]] = list
        self._fixed: Sequence[int] = ()

    @property
    def may_record(self) -> bool:
        """Whether the graph may yet be captured."""
        return self._left > 0

    def run(self, graph: Recording[Made], tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Made:
        """The results for ``tensors``, which lie at ``addresses``."""
        if not self._left:
            return graph.plain(tensors)
        if self._recorded and graph.in_use():
            self._busy += 1
            if self._busy >= _BUSY:
                # Somebody keeps them for good, as gradients that are set to zero in place: they get this memory.
                self._release(graph)
            return graph.plain(tensors)
        self._busy = 0
        if not self._recorded or self._take_fixed(addresses) != self._fixed:
            self._missed += 1
            if (
                self._missed < self._patience
                or len(self._last) != len(addresses)
                or not self._captured(graph, tensors, addresses)
            ):
                storages = (StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
                self._last = list(zip(addresses, storages, strict=True))
                return graph.plain(tensors)
        self._missed = 0
        if self._places:
            graph.copy(self._places, self._take_copied(tensors))
        self.replays += 1
        return graph.replay()

    def _captured(self, graph: Recording[Any], tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Captures the graph; False if that is not possible."""
        self._release(graph)
        self._left -= 1
        if not self._left:
            log.info("%s is no longer captured: its arguments keep moving", self._name)
            return False
        before = zip(tensors, addresses, self._last, strict=True)
        copied = [
            number for number, (tensor, address, last) in enumerate(before)
            if number in self._moving or _moves(tensor, address, *last)
        ]  # fmt: skip
        self._last = ()
        if graph.copies_for_long(sum(tensors[number].nbytes for number in copied)):
            self._left = 0
            log.info("%s is not captured: to copy what moves would take longer than to launch", self._name)
            return False
        read = list(tensors)
        for number in copied:
            read[number] = graph.place(number, tensors[number])
        try:
            graph.record(read)
        except Exception as error:
            self._left = 0
            log.warning("%s cannot be captured and runs plainly: %s", self._name, error)
            return False
        self._recorded, self.copied, self._places = True, copied, [read[number] for number in copied]
        self._take_copied = taker(copied)
        self._take_fixed = taker(sorted(set(range(len(addresses))) - set(copied)))
        self._fixed = self._take_fixed(addresses)
        log.info("captured %s: %d of %d arguments are copied", self._name, len(copied), len(read))
        return True

    def _release(self, graph: Recording[Any]) -> None:
        if self._recorded:
            graph.release()
        self._recorded, self.copied, self._places, self._fixed = False, [], [], ()
        self._busy = self._missed = 0


def _moves(tensor: torch.Tensor, address: int, old: int, memory: StorageWeakRef) -> bool:
    """Whether an argument that was at address ``old`` of ``memory`` may lie elsewhere in each call."""
    storage = tensor.untyped_storage()
    if shared_storage_at(storage.data_ptr()) is not None:
        return False
    return address != old or memory.expired() or StorageWeakRef(storage) != memory


def refusal(devices: Collection[str], *, listed: bool, recordable: bool) -> str | None:
    """Why a graph is not captured; None if it may be.

    Args:
        devices: of its arguments, what it draws among them.
        listed: it is a launch list.
        recordable: what it draws can be recorded.
    """
    if not listed:
        return "MAX compiles it"
    if "cpu" in devices:
        return "it computes on the CPU, or an argument lies there"
    if not recordable:
        return "it draws what cannot be recorded"
    return None if devices else "it has no arguments"
