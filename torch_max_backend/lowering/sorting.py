"""Sorting and top-k: one stable kernel that sorts rows, with the same results on every device."""

from __future__ import annotations

import functools
import operator

import torch
from max.dtype import DType
from max.graph import Dim

from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.sorting import sort_rows

aten = torch.ops.aten


def _first(ctx: LoweringContext, x: GraphTensor, dim: int, count: int | None, descending: bool) -> list[GraphTensor]:
    """The first ``count`` elements along ``dim`` in sorted order (all by default), and where they were."""
    if x.rank == 0:
        return [x, GraphTensor.contiguous(ctx.scalar(0, DType.int64))]
    dim %= x.rank
    last = [*(axis for axis in range(x.rank) if axis != dim), dim]
    moved = x.permuted(last)
    *before, length = moved.shape
    wanted = length if count is None else Dim(count)
    rows = functools.reduce(operator.mul, before, Dim(1))
    flat = ops.reshape(moved.logical(), [rows, length])
    is_bool = flat.dtype == DType.bool
    values, indices = sort_rows(ops.cast(flat, DType.uint8) if is_bool else flat, wanted, descending)
    back = [last.index(axis) for axis in range(x.rank)]
    return [
        GraphTensor.contiguous(ops.reshape(value, [*before, wanted])).permuted(back)
        for value in (numerics.cast(values, DType.bool) if is_bool else values, indices)
    ]


@lowering(aten.sort.default, layout=Layout.RAW, note="stable")
def sort(ctx: LoweringContext, x: GraphTensor, dim: int = -1, descending: bool = False) -> list[GraphTensor]:
    """All elements along ``dim`` in order, NaN as the largest, and where they were."""
    return _first(ctx, x, dim, None, descending)


@lowering(aten.sort.stable, layout=Layout.RAW)
def stable_sort(
    ctx: LoweringContext, x: GraphTensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[GraphTensor]:
    """The same; equal elements stay in their order."""
    return _first(ctx, x, dim, None, descending)


@lowering(
    aten.topk.default,
    layout=Layout.RAW,
    note="of equal elements the first, where PyTorch leaves the choice open",
)
def topk(
    ctx: LoweringContext, x: GraphTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[GraphTensor]:
    """The ``k`` largest (smallest) elements along ``dim`` in order, and where they were."""
    return _first(ctx, x, dim, k, largest)
