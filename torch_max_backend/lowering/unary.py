"""Functions of one tensor, element by element, and casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from max.graph import TensorValue

from torch_max_backend.dtypes import max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten
prims = torch.ops.prims

#: Real functions: whole numbers are converted to float first, narrow floats computed in float32.
_REAL: dict[Any, Callable[[TensorValue], TensorValue]] = {
    aten.exp.default: numerics.exp,
    aten.exp2.default: numerics.exp2,
    aten.expm1.default: numerics.expm1,
    aten.log.default: numerics.log,
    aten.log2.default: numerics.log2,
    aten.log10.default: numerics.log10,
    aten.log1p.default: ops.log1p,
    aten.sqrt.default: ops.sqrt,
    aten.rsqrt.default: ops.rsqrt,
    aten.reciprocal.default: lambda x: ops.div(numerics.constant(x, 1), x),
    aten.sin.default: numerics.sin,
    aten.cos.default: numerics.cos,
    aten.tan.default: numerics.tan,
    aten.asin.default: numerics.asin,
    aten.acos.default: numerics.acos,
    aten.atan.default: numerics.atan,
    aten.sinh.default: numerics.sinh,
    aten.cosh.default: numerics.cosh,
    aten.tanh.default: numerics.tanh,
    aten.asinh.default: numerics.asinh,
    aten.acosh.default: numerics.acosh,
    aten.atanh.default: numerics.atanh,
    aten.erf.default: ops.erf,
    aten.sigmoid.default: numerics.sigmoid,
}


def _real(function: Callable[[TensorValue], TensorValue]) -> Callable[..., TensorValue]:
    def build(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        return numerics.cast(function(numerics.cast(x, ctx.compute_dtype)), ctx.max_dtype)

    return build


for _target, _function in _REAL.items():
    lowering(_target, layout=Layout.ELEMENTWISE)(_real(_function))

#: Rounding: whole numbers stay as they are.
_ROUNDING: dict[Any, Callable[[TensorValue], TensorValue]] = {
    aten.floor.default: ops.floor,
    aten.ceil.default: numerics.ceil,
    aten.round.default: ops.round,
    aten.trunc.default: ops.trunc,
}


def _rounding(function: Callable[[TensorValue], TensorValue]) -> Callable[..., TensorValue]:
    def build(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        if not ctx.dtype.is_floating_point:
            return x
        return numerics.cast(function(numerics.cast(x, ctx.compute_dtype)), ctx.max_dtype)

    return build


for _target, _function in _ROUNDING.items():
    lowering(_target, layout=Layout.ELEMENTWISE)(_rounding(_function))


@lowering(aten.neg.default, layout=Layout.ELEMENTWISE)
def neg(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """-x; unsigned numbers wrap."""
    return numerics.negate(x)


@lowering(aten.abs.default, layout=Layout.ELEMENTWISE)
def absolute(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """The size of x."""
    if numerics.is_float(x.dtype):
        return ops.abs(x)
    if not x.dtype.is_signed_integral():
        return x
    zero = numerics.constant(x, 0)
    return ops.where(ops.greater(zero, x), ops.sub(zero, x), x)


@lowering(aten.sign.default, layout=Layout.ELEMENTWISE)
def sign(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """1, 0 or -1; 0 for NaN."""
    if ctx.dtype is torch.bool:
        return x
    wide = numerics.cast(x, ctx.compute_dtype)
    zero, one = numerics.constant(wide, 0), numerics.constant(wide, 1)
    positive = ops.where(ops.greater(wide, zero), one, zero)
    if x.dtype.is_unsigned_integral():
        return positive
    result = ops.where(ops.greater(zero, wide), ops.sub(zero, one), positive)
    return numerics.cast(result, ctx.max_dtype)


@lowering(aten.relu.default, layout=Layout.ELEMENTWISE)
def relu(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """x where it is positive, else 0; NaN stays."""
    return numerics.relu(x)


@lowering(aten.leaky_relu.default, layout=Layout.ELEMENTWISE)
def leaky_relu(ctx: LoweringContext, x: TensorValue, negative_slope: float = 0.01) -> TensorValue:
    """x where it is positive, else a fraction of it."""
    x = numerics.cast(x, ctx.compute_dtype)
    sloped = ops.mul(x, ctx.scalar(negative_slope, x.dtype))
    return numerics.cast(ops.where(ops.greater(x, ctx.scalar(0, x.dtype)), x, sloped), ctx.max_dtype)


@lowering(aten.elu.default, layout=Layout.ELEMENTWISE)
def elu(
    ctx: LoweringContext, x: TensorValue, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> TensorValue:
    """scale * x where x is positive, else scale * alpha * (exp(input_scale * x) - 1)."""
    x = numerics.cast(x, ctx.compute_dtype)
    negative = ops.mul(numerics.expm1(_times(ctx, x, input_scale)), ctx.scalar(alpha * scale, x.dtype))
    result = ops.where(ops.greater(x, ctx.scalar(0, x.dtype)), _times(ctx, x, scale), negative)
    return numerics.cast(result, ctx.max_dtype)


def _times(ctx: LoweringContext, x: TensorValue, factor: float) -> TensorValue:
    return x if factor == 1 else ops.mul(x, ctx.scalar(factor, x.dtype))


@lowering(aten.gelu.default, layout=Layout.ELEMENTWISE)
def gelu(ctx: LoweringContext, x: TensorValue, *, approximate: str = "none") -> TensorValue:
    """x times the normal distribution function, exact or by tanh."""
    x = numerics.cast(x, ctx.compute_dtype)
    one, half = ctx.scalar(1, x.dtype), ctx.scalar(0.5, x.dtype)
    if approximate == "none":
        part = ops.erf(ops.mul(x, ctx.scalar(math.sqrt(0.5), x.dtype)))
    else:
        cubic = ops.mul(ops.mul(ops.mul(x, x), x), ctx.scalar(0.044715, x.dtype))
        part = numerics.tanh(ops.mul(ops.add(x, cubic), ctx.scalar(math.sqrt(2 / math.pi), x.dtype)))
    return numerics.cast(ops.mul(ops.mul(half, x), ops.add(one, part)), ctx.max_dtype)


@lowering(aten._to_copy.default, layout=Layout.RAW)
def to_copy(ctx: LoweringContext, x: GraphTensor, *, device: torch.device | None = None, **options: Any) -> GraphTensor:
    """A cast; a copy to the graph's own device is none."""
    result = ctx.meta.device
    if result.type != ctx.node.args[0].meta["val"].device.type and ctx.meta.dim() > 0:
        raise CannotLower(f"a copy to another device, {result}")
    return x.with_value(numerics.cast(x.value, ctx.max_dtype))


@lowering(prims.convert_element_type.default, layout=Layout.RAW)
def convert_element_type(ctx: LoweringContext, x: GraphTensor, dtype: torch.dtype) -> GraphTensor:
    """A cast."""
    return x.with_value(numerics.cast(x.value, max_dtype(dtype)))
