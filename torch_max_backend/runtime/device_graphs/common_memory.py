"""Memory that the recorded launch lists of one device work in, one list after the other."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from torch_max_backend.launch_list.memory import TORCH_ALIGNMENT, rounded_up


class Worker(Protocol):
    """A list that may be recorded."""

    @property
    def wanted(self) -> int:
        """Bytes that it will work in; 0 if it is recorded already, or may never be."""
        ...


class CommonMemory:
    """Memory whose contents are not needed between two replays.

    Replays follow each other in one queue, so all lists work in the same memory, as large as the largest needs it. A
    device graph has fixed addresses: memory never grows. The first list that is recorded therefore asks what the others
    will want. Memory goes when no recording works in it.

    Args:
        device: of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._memories: list[weakref.ref[torch.Tensor]] = []

    def join(self, worker: Worker) -> None:
        """Tells of a list that may be recorded."""
        self._workers.add(worker)

    def living(self) -> list[torch.Tensor]:
        """Memory that recordings work in."""
        return [tensor for each in self._memories if (tensor := each()) is not None]

    def arena(self, size: int) -> Arena:
        """Memory of at least so many bytes."""
        living = self.living()
        large = [tensor for tensor in living if tensor.numel() >= size]
        if large:
            return Arena(min(large, key=torch.Tensor.numel))
        size = max([size, *(worker.wanted for worker in self._workers)])
        with torch.inference_mode(False):
            # Calls inside that mode write to it, and others.
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._memories = [*map(weakref.ref, living), weakref.ref(made)]
        return Arena(made)


class Arena:
    """Memory that one recording deals out.

    Args:
        memory: bytes.

    Attributes:
        memory: the same.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._end = 0

    def skip(self, size: int) -> None:
        """Takes the next ``size`` bytes."""
        self._end = rounded_up(self._end + size, TORCH_ALIGNMENT)

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the next bytes; where these do not suffice, in memory of its own."""
        size = bytes_over(shape, strides, dtype)
        if self._end + size > self.memory.numel():
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.memory.device)
        offset = self._end
        self.skip(size)
        return self.tensor_at(offset, shape, strides, dtype)

    def tensor_at(self, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the bytes at ``offset``."""
        with torch.inference_mode(False):
            content = self.memory[offset : offset + bytes_over(shape, strides, dtype)].view(dtype)
            return content.as_strided(shape, strides)


def bytes_over(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """The number of bytes from a tensor's first byte to its last."""
    if not math.prod(shape):
        return 0
    return (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * dtype.itemsize


@functools.cache
def common_memory(device: torch.device) -> CommonMemory:
    """The memory that all recordings on ``device`` share: one object for the process."""
    return CommonMemory(device)
