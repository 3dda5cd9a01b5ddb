"""Memory that is kept from call to call on a CPU: workspaces, and what holds saved values and gradients.

PyTorch's CUDA allocator keeps what it had. Its CPU allocator gives large blocks back to the system, which clears them
page by page when they are taken again: in a training step that takes a third of the time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from torch_max_backend.runtime.memory.shared_storage import register
from torch_max_backend.torch_compat import storage_users

LEAST = 2**20
"""Bytes of a value whose memory is kept; small blocks do not go back to the system."""
_IDLE_CALLS = 64
"""After so many calls of graphs that did not take it, as in an evaluation, memory is given back."""


class _Block:
    """One piece of memory, in which lies at most one value."""

    def __init__(self, size: int) -> None:
        self.taken = 0
        """In which call it was taken last."""
        self.storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        self._idle, self._facts = storage_users(self.storage), (self.storage.data_ptr(), size)
        register(self.storage.data_ptr(), self)

    @property
    def borrowers(self) -> int:
        """How many tensors over the memory there are."""
        return storage_users(self.storage) - self._idle

    @property
    def serves(self) -> bool:
        """Whether nobody has resized the storage, or moved it to memory that processes share."""
        return (self.storage.data_ptr(), self.storage.nbytes()) == self._facts


class KeptMemory:
    """Memory for values that live until the next step. All of it is never more than what was in use at once before.

    A block is free when nothing refers to it: no tensor, no view of one, no array of NumPy's.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}
        self._most = self._calls = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes of all blocks."""
        return _bytes_of(self._blocks)

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense tensor of at least ``LEAST`` bytes; its elements are whatever was there before."""
        with self._lock:
            block = self._taken(math.prod(shape) * dtype.itemsize)
            block.taken = self._calls
            # A tensor of its own: what was written to the last one is no news to this one's version.
            return torch.empty(0, dtype=dtype).set_(block.storage, 0, tuple(shape), tuple(strides))

    def _taken(self, size: int) -> _Block:
        """A free block of ``size`` bytes, or a new one in the place of free ones of other sizes."""
        # ``forget`` may put another in its place meanwhile.
        blocks = self._blocks
        for block in blocks.get(size, ()):
            if block.borrowers == 0 and block.serves:
                return block
        free, held = _free(blocks), _bytes_of(blocks)
        self._most = max(self._most, held - sum(each for each, _ in free) + size)
        while free and held + size > self._most:
            held -= _dropped(blocks, *free.pop())
        try:
            block = _Block(size)
        except RuntimeError:
            # The system has no memory left.
            while free:
                _dropped(blocks, *free.pop())
            block = _Block(size)
        blocks.setdefault(size, []).append(block)
        return block

    def called(self) -> None:
        """A graph is called, whichever."""
        self._calls += 1
        if self._calls % _IDLE_CALLS == 0:
            with self._lock:
                blocks = self._blocks
                for size, number in reversed(_free(blocks)):
                    if blocks[size][number].taken < self._calls - _IDLE_CALLS:
                        _dropped(blocks, size, number)
                self._most = _bytes_of(blocks)

    def forget(self) -> None:
        """Gives back what is free, and the rest as soon as nothing refers to it.

        It takes no lock: the garbage collector may call it at any time, when a graph is dropped.
        """
        self._blocks, self._most = {}, 0


def _free(blocks: Mapping[int, Sequence[_Block]]) -> list[tuple[int, int]]:
    """Sizes of the free blocks and their numbers among those of their size, in order."""
    return sorted(
        (size, number)
        for size, members in blocks.items()
        for number, block in enumerate(members)
        if block.borrowers == 0
    )


def _bytes_of(blocks: Mapping[int, Sequence[_Block]]) -> int:
    return sum(size * len(members) for size, members in blocks.items())


def _dropped(blocks: dict[int, list[_Block]], size: int, number: int) -> int:
    """Drops a block; its bytes."""
    del blocks[size][number]
    if not blocks[size]:
        del blocks[size]
    return size


KEPT = KeptMemory()
"""The memory of what this process's graphs save on a CPU, and of their gradients."""

_workspaces: list[torch.Tensor] = []
_workspaces_lock = threading.Lock()


@contextlib.contextmanager
def lent_workspace(size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Bytes for one call; on a CPU the last call's."""
    if device.type != "cpu":
        yield torch.empty(size, dtype=torch.uint8, device=device)
        return
    KEPT.called()
    with _workspaces_lock:
        workspace = _workspaces.pop() if _workspaces else torch.empty(0, dtype=torch.uint8)
    if workspace.numel() < size:
        # First the smaller one is freed.
        del workspace
        workspace = torch.empty(size, dtype=torch.uint8)
    try:
        yield workspace
    finally:
        with _workspaces_lock:
            _workspaces.append(workspace)


def drop_kept() -> None:
    """Gives back all that is kept for the next calls."""
    KEPT.forget()
    with _workspaces_lock:
        _workspaces.clear()
