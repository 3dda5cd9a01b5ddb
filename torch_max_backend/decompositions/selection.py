"""Decompositions of operators that select elements: masked scatter, search in sorted values, scatter with reduction.

Where PyTorch raises an error that depends on the tensors' values (a mask with more true elements than the source has),
a graph cannot raise; it reads the last element instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_max_backend.torch_compat import OpOverload

aten = torch.ops.aten

#: The longest sequence that is searched: a number is compared with all of it.
MAX_BOUNDARIES = 2048


def _shared(mask: Tensor) -> int:
    """How many neighbouring elements surely have one value: a mask of tokens that was expanded over their channels."""
    width = 1
    for size, stride in zip(reversed(mask.shape), reversed(mask.stride()), strict=True):
        if size != 1 and stride != 0:
            break
        width *= size
    return width


def _rows(mask: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """The mask as rows of elements that come from neighbouring ones of ``count``: which rows it has, how many come
    before each or are it, and their width."""
    width = max(1, _shared(mask))
    if count % width:
        width = 1
    chosen = mask.reshape(-1, width)[:, 0]
    return chosen, chosen.to(torch.int64).cumsum(0), width


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``aten.masked_scatter``: ``x`` with the elements of ``source``, in their order, where ``mask`` is true.

    Where ``source`` has too few, an index is outside its dimension, which is reported.
    """
    x, mask = torch.broadcast_tensors(x, mask)
    if x.numel() == 0 or source.numel() == 0:
        return x.clone()
    chosen, places, width = _rows(mask, source.numel())
    rows = source.reshape(-1, width)
    taken = rows.index_select(0, torch.where(chosen, places - 1, 0))
    return torch.where(mask, taken.reshape(x.shape), x)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """``aten.masked_scatter_backward``: the gradient of a source of shape ``sizes``; zero for what the mask did not
    reach."""
    count = math.prod(sizes)
    mask = mask.expand_as(grad)
    if grad.numel() == 0 or count == 0:
        return grad.new_zeros(sizes)
    chosen, places, width = _rows(mask, count)
    rows = count // width
    # What is not chosen, or has no element left, lands behind the result.
    target = torch.where(chosen & (places <= rows), places - 1, rows)
    summed = grad.new_zeros(rows + 1, width).index_put([target], grad.reshape(-1, width))
    return summed[:rows].reshape(sizes)


def _count_before(boundaries: Tensor, x: Tensor, out_int32: bool, right: bool) -> Any:
    """How many of the last dimension of ``boundaries`` come before each of ``x``; NaN comes behind all numbers."""
    if not isinstance(boundaries.shape[-1], int) or boundaries.shape[-1] > MAX_BOUNDARIES:
        return NotImplemented
    behind = boundaries > x if right else boundaries >= x
    return behind.logical_not().sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """``aten.bucketize``: for each element of ``x`` the number of boundaries before it."""
    return _count_before(boundaries, x.unsqueeze(-1), out_int32, right)


def searchsorted(
    sequence: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """``aten.searchsorted``: the same in the sorted rows of ``sequence``, one for all or one for each row of ``x``."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    if sequence.dim() > 1:
        sequence = sequence.unsqueeze(-2)
    return _count_before(sequence, x.unsqueeze(-1), out_int32, right or side == "right")


def scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    """``aten.scatter_reduce`` for sums and means."""
    if reduce not in ("sum", "mean") or x.dim() == 0:
        return NotImplemented
    added = src[tuple(slice(size) for size in index.shape)]
    if not include_self:
        x = x.scatter(dim, index, 0)
    total = x.scatter_add(dim, index, added)
    if reduce == "sum":
        return total
    start = torch.ones_like(x) if include_self else torch.zeros_like(x)
    counts = start.scatter_add(dim, index, torch.ones_like(added)).clamp(min=1)
    return total / counts if x.is_floating_point() else torch.div(total, counts, rounding_mode="floor")


def selection_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table of these decompositions."""
    return {
        aten.masked_scatter.default: masked_scatter,
        aten.masked_scatter_backward.default: masked_scatter_backward,
        aten.bucketize.Tensor: bucketize,
        aten.searchsorted.Tensor: searchsorted,
        aten.scatter_reduce.two: scatter_reduce,
    }
