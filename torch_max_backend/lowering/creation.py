"""Tensors created from sizes and numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from max.dtype import DType

from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten

Number = float | int | bool
Size = int | torch.SymInt


def filled(ctx: LoweringContext, value: Number, like: GraphTensor | None = None) -> GraphTensor:
    """A tensor of the node's shape and dtype full of ``value``, in the memory order of ``like``."""
    if not isinstance(value, (bool, int, float)):
        raise CannotLower(f"the fill value {value!r} is known at run time only")
    shape = ctx.out_shape()
    if ctx.dtype is torch.bool:
        value = bool(value)
    elif not ctx.dtype.is_floating_point:
        value = int(value)
    number = ctx.scalar(value, ctx.max_dtype)
    if like is None:
        return GraphTensor.contiguous(ops.broadcast_to(number, shape) if shape else number)
    physical = [shape[dim] for dim in like.order]
    return GraphTensor(ops.broadcast_to(number, physical) if physical else number, like.order)


@lowering(aten.full.default, layout=Layout.RAW)
def full(ctx: LoweringContext, size: Sequence[Size], value: Number, **options: Any) -> GraphTensor:
    """One number everywhere."""
    return filled(ctx, value)


@lowering(aten.full_like.default, layout=Layout.RAW)
def full_like(ctx: LoweringContext, x: GraphTensor, value: Number, **options: Any) -> GraphTensor:
    """One number everywhere, shaped as ``x``."""
    return filled(ctx, value, x)


@lowering(
    aten.empty.memory_format,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten._efficientzerotensor.default,
    layout=Layout.RAW,
)
def empty(ctx: LoweringContext, *sizes: Any, **options: Any) -> GraphTensor:
    """Zeros, also where PyTorch leaves memory undefined; what forward-mode differentiation calls a zero tensor too."""
    return filled(ctx, 0)


@lowering(aten.scalar_tensor.default, layout=Layout.RAW)
def scalar_tensor(ctx: LoweringContext, value: Number, **options: Any) -> GraphTensor:
    """One number as a 0-d tensor."""
    return filled(ctx, value)


@lowering(aten.arange.start_step, layout=Layout.RAW)
def arange(ctx: LoweringContext, start: Number, end: Number | Size, step: Number = 1, **options: Any) -> GraphTensor:
    """Evenly spaced numbers; float steps are multiplied, not summed, as PyTorch does."""
    length = ctx.meta.shape[0]
    if not all(isinstance(number, (int, float)) for number in (start, step)):
        raise CannotLower("arange from a number that is known at run time only")
    if isinstance(length, int):
        numbers = torch.arange(start, end, step, dtype=ctx.dtype)
        return GraphTensor.contiguous(ops.constant(numbers, device=ctx.device))
    wide = DType.float64 if ctx.dtype.is_floating_point and ctx.device.is_cpu() else ctx.compute_dtype
    count = ops.range(0, ctx.dim(length), 1, ctx.dim(length), dtype=DType.int64, device=ctx.device)
    scaled = ops.cast(count, wide) * ctx.scalar(step, wide) + ctx.scalar(start, wide)
    return GraphTensor.contiguous(ctx.cast(scaled, ctx.max_dtype))
