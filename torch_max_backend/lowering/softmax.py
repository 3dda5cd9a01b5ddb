"""Softmax and log-softmax along any dimension, forward and backward, in any memory order."""

from __future__ import annotations

import torch
from max.graph import TensorValue

from torch_max_backend.dtypes import LOW_PRECISION, max_dtype
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten


def _shifted(ctx: LoweringContext, x: GraphTensor, axis: int) -> TensorValue:
    """x less its maximum, in the dtype to compute in. MAX's maximum skips NaN, which the difference restores."""
    wide = ctx.cast(x.value, ctx.compute_dtype)
    return ops.sub(wide, ops.max(wide, axis=axis))


def _is_trivial(x: GraphTensor) -> bool:
    return any(str(size) == "0" for size in x.shape)


@lowering(aten._softmax.default, layout=Layout.RAW)
def softmax(ctx: LoweringContext, x: GraphTensor, dim: int, half_to_float: bool) -> GraphTensor:
    """exp(x) over its sum."""
    if _is_trivial(x):
        return x.with_value(ctx.cast(x.value, ctx.max_dtype))
    if x.rank == 0:
        value = ctx.cast(x.value, ctx.compute_dtype)
        return x.with_value(ctx.cast(numerics.exp(ops.sub(value, value)), ctx.max_dtype))
    axis = x.axis(dim)
    powers = numerics.exp(_shifted(ctx, x, axis))
    return x.with_value(ctx.cast(ops.div(powers, ops.sum(powers, axis=axis)), ctx.max_dtype))


@lowering(aten._log_softmax.default, layout=Layout.RAW)
def log_softmax(ctx: LoweringContext, x: GraphTensor, dim: int, half_to_float: bool) -> GraphTensor:
    """x less the logarithm of the sum of exp(x)."""
    if _is_trivial(x):
        return x.with_value(ctx.cast(x.value, ctx.max_dtype))
    if x.rank == 0:
        value = ctx.cast(x.value, ctx.compute_dtype)
        return x.with_value(ctx.cast(ops.sub(value, value), ctx.max_dtype))
    axis = x.axis(dim)
    shifted = _shifted(ctx, x, axis)
    total = ops.sum(numerics.exp(shifted), axis=axis)
    return x.with_value(ctx.cast(ops.sub(shifted, numerics.log(total)), ctx.max_dtype))


def _backward_operands(
    ctx: LoweringContext, grad: GraphTensor, output: GraphTensor, dim: int
) -> tuple[TensorValue, TensorValue, int]:
    dtype = max_dtype(torch.float32 if ctx.arg_meta(0).dtype in LOW_PRECISION else ctx.arg_meta(0).dtype)
    gradient = ctx.cast(grad.to_order(output.order).value, dtype)
    return gradient, ctx.cast(output.value, dtype), output.axis(dim)


@lowering(aten._softmax_backward_data.default, layout=Layout.RAW)
def softmax_backward(
    ctx: LoweringContext, grad: GraphTensor, output: GraphTensor, dim: int, input_dtype: torch.dtype
) -> GraphTensor:
    """(grad - sum(grad * output)) * output."""
    if _is_trivial(output):
        return output.with_value(ctx.cast(output.value, ctx.max_dtype))
    if output.rank == 0:
        return output.with_value(ctx.cast(ops.sub(output.value, output.value), ctx.max_dtype))
    gradient, result, axis = _backward_operands(ctx, grad, output, dim)
    weighted = ops.mul(gradient, result)
    value = ops.sub(weighted, ops.mul(result, ops.sum(weighted, axis=axis)))
    return output.with_value(ctx.cast(value, ctx.max_dtype))


@lowering(aten._log_softmax_backward_data.default, layout=Layout.RAW)
def log_softmax_backward(
    ctx: LoweringContext, grad: GraphTensor, output: GraphTensor, dim: int, input_dtype: torch.dtype
) -> GraphTensor:
    """grad - exp(output) * sum(grad)."""
    if _is_trivial(output):
        return output.with_value(ctx.cast(output.value, ctx.max_dtype))
    if output.rank == 0:
        return output.with_value(ctx.cast(ops.sub(output.value, output.value), ctx.max_dtype))
    gradient, result, axis = _backward_operands(ctx, grad, output, dim)
    value = ops.sub(gradient, ops.mul(numerics.exp(result), ops.sum(gradient, axis=axis)))
    return output.with_value(ctx.cast(value, ctx.max_dtype))
