"""Sorting and the largest elements, by counting: an element's place is the number of elements that come before it.

That is one fused reduction over all pairs, stable and the same on every device, for as many elements as a model sorts:
the patches of an image, the candidates of a router. Longer sequences stay in PyTorch.
"""

from __future__ import annotations

import torch
from max.dtype import DType
from max.graph import StaticDim, TensorValue
from torch.fx import Node

from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.indexing import gather

aten = torch.ops.aten

#: The longest sequence: all pairs of its elements are compared.
MOST_ELEMENTS = 2048


def _short(node: Node) -> str | None:
    """Why a call stays in PyTorch."""
    fake = node.args[0].meta["val"]
    if fake.dim() == 0:
        return "a tensor of rank 0"
    position = 2 if node.target is aten.topk.default else 1
    dim = node.kwargs.get("dim", node.args[position] if len(node.args) > position else -1)
    extent = fake.shape[dim]
    if not isinstance(extent, int) or not all(isinstance(size, int) for size in fake.shape):
        return "sizes that are known only at run time"
    if fake.numel() == 0:
        return "a tensor without elements"
    if extent > MOST_ELEMENTS:
        return f"{extent} elements to sort, all pairs of which would be compared: {MOST_ELEMENTS} at most"
    return None


def _first(ctx: LoweringContext, x: GraphTensor, dim: int, count: int | None, descending: bool) -> list[GraphTensor]:
    """The first ``count`` elements along ``dim`` in sorted order (all by default), and where they were."""
    dim %= x.rank
    last = [*(axis for axis in range(x.rank) if axis != dim), dim]
    moved = x.permuted(last)
    shape = [int(size) for size in moved.shape if isinstance(size, StaticDim)]
    length = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    count = length if count is None else count
    flat = ops.reshape(moved.logical(), [rows, length])
    indices = _places_of(ctx, numerics.cast(flat, DType.int32) if flat.dtype == DType.bool else flat, count, descending)
    starts = ops.mul(ops.reshape(ops.iota(StaticDim(rows), ctx.device), [rows, 1]), ctx.scalar(length, DType.int64))
    whole = ops.reshape(ops.add(indices, starts), [rows * count])
    values = gather(ops.reshape(flat, [rows * length]), whole, 0)
    back = [last.index(axis) for axis in range(x.rank)]
    return [
        GraphTensor.contiguous(ops.reshape(value, [*shape[:-1], count])).permuted(back) for value in (values, indices)
    ]


def _places_of(ctx: LoweringContext, x: TensorValue, count: int, descending: bool) -> TensorValue:
    """For each row of ``x`` where its first ``count`` elements in sorted order are, in int64."""
    rows, length = (int(size) for size in x.shape)
    mine, other = ops.reshape(x, [rows, length, 1]), ops.reshape(x, [rows, 1, length])
    place = ops.iota(StaticDim(length), ctx.device)
    earlier = ops.greater(ops.reshape(place, [1, length, 1]), ops.reshape(place, [1, 1, length]))
    if descending:
        goes_before, goes_behind = _less(mine, other), _less(other, mine)
    else:
        goes_before, goes_behind = _less(other, mine), _less(mine, other)
    before = ops.logical_or(goes_before, ops.logical_and(earlier, ops.logical_not(goes_behind)))
    rank = ops.sum(ops.cast(before, DType.int32), axis=-1)
    wanted = ops.cast(ops.reshape(ops.iota(StaticDim(count), ctx.device), [1, count, 1]), DType.int32)
    found = ops.equal(ops.reshape(rank, [rows, 1, length]), wanted)
    own = ops.reshape(place, [1, 1, length])
    chosen = ops.where(found, own, ctx.scalar(0, DType.int64))
    return ops.reshape(ops.sum(chosen, axis=-1), [rows, count])


def _less(a: TensorValue, b: TensorValue) -> TensorValue:
    """a < b, where NaN is larger than every number."""
    less = ops.greater(b, a)
    if not numerics.is_float(a.dtype):
        return less
    return ops.logical_or(less, ops.logical_and(ops.is_nan(b), ops.logical_not(ops.is_nan(a))))


@lowering(aten.sort.default, layout=Layout.RAW, supports=_short, note=f"up to {MOST_ELEMENTS} elements; stable")
def sort(ctx: LoweringContext, x: GraphTensor, dim: int = -1, descending: bool = False) -> list[GraphTensor]:
    """All elements along ``dim`` in order, NaN as the largest, and where they were."""
    return _first(ctx, x, dim, None, descending)


@lowering(aten.sort.stable, layout=Layout.RAW, supports=_short, note=f"up to {MOST_ELEMENTS} elements")
def stable_sort(
    ctx: LoweringContext, x: GraphTensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[GraphTensor]:
    """The same; equal elements stay in their order."""
    return _first(ctx, x, dim, None, descending)


@lowering(
    aten.topk.default,
    layout=Layout.RAW,
    supports=_short,
    note=f"up to {MOST_ELEMENTS} elements; of equal ones the first, where PyTorch leaves the choice open",
)
def topk(
    ctx: LoweringContext, x: GraphTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[GraphTensor]:
    """The ``k`` largest (smallest) elements along ``dim`` in order, and where they were."""
    return _first(ctx, x, dim, k, largest)
