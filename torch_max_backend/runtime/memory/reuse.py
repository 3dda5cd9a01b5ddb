"""Saved values whose memory serves as workspace when the backward graph no longer needs them.

A value stays as it is while anything else may read it: a graph that is kept for another backward pass, hooks on saved
tensors, a user who took it from the graph's node. Each call checks this; what would be written over such a value gets
memory of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from torch_max_backend.launch_list import LaunchList
from torch_max_backend.runtime.memory.shared_storage import shared_storage_at
from torch_max_backend.runtime.tensors.interface import InputSpec
from torch_max_backend.torch_compat import graph_is_kept, storage_users

_REFERENCES = 4
"""References to an argument that AOTAutograd has handed over and nothing else holds: the lists ``args`` and
``entering``, and the two functions that look. If a release of PyTorch kept one more, nothing would be written over."""

_ALIGNMENT = 64
"""Bytes: as PyTorch's allocators align, and as launches take for granted where they write."""


class Reuse:
    """The arguments of a launch list that it may write over.

    Args:
        listing: the list.
        inputs: how arguments enter.
        device: that the list runs on.
    """

    def __init__(self, listing: LaunchList, inputs: Sequence[InputSpec], device: torch.device) -> None:
        self._arguments = [(number, inputs[number].position, size) for number, size in listing.reused.items()]
        self._device = device

    def written_over(self, entering: Sequence[torch.Tensor], args: Sequence[object]) -> list[torch.Tensor]:
        """Memory that is written to: each of these arguments, or as many bytes elsewhere.

        Args:
            entering: the list's arguments.
            args: the graph's.
        """
        if not self._arguments:
            return []
        kept = graph_is_kept()
        memory = []
        # By the address of a storage, which a captured forward graph's results share.
        crowded: dict[int, bool] = {}
        for number, position, size in self._arguments:
            tensor = entering[number]
            # What came in another memory order is a copy of the argument, or a view.
            if (
                kept
                or tensor is not args[position]
                or tensor.data_ptr() % _ALIGNMENT
                or sys.getrefcount(tensor) > _REFERENCES
                or _lies_beside_others(tensor, args, crowded)
            ):
                tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
            memory.append(tensor)
        return memory


def _lies_beside_others(tensor: torch.Tensor, args: Sequence[object], crowded: dict[int, bool]) -> bool:
    """Whether there is a tensor in its memory that is not among ``args``; ``crowded`` has the answers of this call."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in crowded:
        shared = shared_storage_at(address)
        crowded[address] = (
            # The tensor, and ``storage``.
            storage_users(storage) > 2
            if shared is None
            else shared.borrowers > sum(_begins_at(each, address) for each in args)
        )
    return crowded[address]


def _begins_at(value: object, address: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.untyped_storage().data_ptr() == address
