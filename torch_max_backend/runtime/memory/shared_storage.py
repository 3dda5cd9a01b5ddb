"""Several tensors in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from torch_max_backend.launch_list.memory import TORCH_ALIGNMENT, rounded_up
from torch_max_backend.torch_compat import storage_users


class Lent(Protocol):
    """Memory that its owner lends to tensors."""

    @property
    def borrowers(self) -> int:
        """How many tensors over the memory there are that are not the owner's."""


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
        register(self._storage.data_ptr(), self)

    def in_use(self) -> bool:
        """Whether there is a tensor over the memory that is not one of ``tensors``."""
        return self.borrowers > 0

    @property
    def borrowers(self) -> int:
        """How many tensors over the memory there are that are not among ``tensors``."""
        return storage_users(self._storage) - self._idle


_storages: WeakValueDictionary[int, Lent] = WeakValueDictionary()


def register(address: int, owner: Lent) -> None:
    """Makes the owner of the memory at ``address`` known, as long as it lives."""
    _storages[address] = owner


def shared_storage_at(address: int) -> Lent | None:
    """The owner of the memory that begins at an address, where that is lent."""
    return _storages.get(address)
