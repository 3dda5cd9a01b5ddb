"""Arithmetic: sums, products, quotients, powers, clamping, selection, with PyTorch's type promotion."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import sympy
import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorValue

from torch_max_backend.dtypes import max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext, dim_of, scalar
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.torch_compat import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    FloatTrueDiv,
    IntTrueDiv,
    ToFloat,
    elementwise_dtypes,
)

aten = torch.ops.aten
Operand: TypeAlias = TensorValue | int | float | bool | torch.SymInt | torch.SymFloat
Promotion = ELEMENTWISE_TYPE_PROMOTION_KIND

#: Whole exponents up to this are multiplied out; beyond, rounding adds up and a logarithm is better.
_MULTIPLIED_OUT = 8


def computation_dtype(ctx: LoweringContext, *positions: int, kind: Promotion = Promotion.DEFAULT) -> torch.dtype:
    """The dtype that PyTorch computes in, for the arguments at ``positions``."""
    return elementwise_dtypes(*(ctx.arg_meta(i) for i in positions), type_promotion_kind=kind)[0]


def operand(ctx: LoweringContext, value: Operand, dtype: DType) -> TensorValue:
    """A tensor, number or symbolic size as a value of ``dtype``."""
    if isinstance(value, TensorValue):
        return numerics.cast(value, dtype)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        number = _symbolic(ctx, value.node.expr, DType.int64 if isinstance(value, torch.SymInt) else DType.float64)
        # Made of sizes, on the host, wherever the tensors are.
        return ops.cast(number if ctx.device.is_cpu() else ops.transfer_to(number, ctx.device), dtype)
    if isinstance(value, (int, float)):
        return ctx.scalar(value, dtype)
    raise CannotLower(f"{value!r} is neither a tensor nor a number known while compiling")


def _symbolic(ctx: LoweringContext, expr: sympy.Expr, dtype: DType) -> TensorValue:
    """A number made of sizes, such as 1 / (N * C), as a rank-0 value on the host."""
    if expr.is_number:
        return scalar(float(expr) if dtype == DType.float64 else int(expr), dtype, DeviceRef.CPU())
    if dtype == DType.int64:
        return TensorValue(dim_of(expr))
    if isinstance(expr, (FloatTrueDiv, IntTrueDiv)):
        return ops.div(*(_symbolic(ctx, arg, dtype) for arg in expr.args))
    if isinstance(expr, ToFloat):
        return _symbolic(ctx, expr.args[0], dtype)
    if expr.is_integer:
        return ops.cast(TensorValue(dim_of(expr)), dtype)
    if isinstance(expr, (sympy.Mul, sympy.Add)):
        combine = ops.mul if isinstance(expr, sympy.Mul) else ops.add
        return functools.reduce(combine, (_symbolic(ctx, arg, dtype) for arg in expr.args))
    raise CannotLower(f"the number {expr} has no counterpart in MAX")


def operands(ctx: LoweringContext, *values: Operand, kind: Promotion = Promotion.DEFAULT) -> list[TensorValue]:
    """The first positional arguments, cast to the dtype that PyTorch computes in."""
    dtype = max_dtype(computation_dtype(ctx, *range(len(values)), kind=kind))
    return [operand(ctx, value, dtype) for value in values]


def rounded(ctx: LoweringContext, value: TensorValue) -> TensorValue:
    """``value`` in the dtype of the node's result."""
    return numerics.cast(value, ctx.max_dtype)


@lowering(aten.add.Tensor, aten.add.Scalar, layout=Layout.ELEMENTWISE)
def add(ctx: LoweringContext, a: Operand, b: Operand, alpha: float | int = 1) -> TensorValue:
    """a + alpha * b; "or" for bools."""
    a, b = operands(ctx, a, b)
    if a.dtype == DType.bool:
        return ops.logical_or(a, b) if alpha else a
    return rounded(ctx, ops.add(a, _scaled(ctx, b, alpha)))


@lowering(aten.sub.Tensor, aten.sub.Scalar, layout=Layout.ELEMENTWISE)
def sub(ctx: LoweringContext, a: Operand, b: Operand, alpha: float | int = 1) -> TensorValue:
    """a - alpha * b."""
    a, b = operands(ctx, a, b)
    return rounded(ctx, numerics.subtract(a, _scaled(ctx, b, alpha)))


def _scaled(ctx: LoweringContext, x: TensorValue, factor: float | int) -> TensorValue:
    return x if factor == 1 else ops.mul(x, operand(ctx, factor, x.dtype))


@lowering(aten.mul.Tensor, aten.mul.Scalar, layout=Layout.ELEMENTWISE)
def mul(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    """a * b; "and" for bools."""
    a, b = operands(ctx, a, b)
    if a.dtype == DType.bool:
        return ops.logical_and(a, b)
    return rounded(ctx, ops.mul(a, b))


@lowering(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    layout=Layout.ELEMENTWISE,
    note="an integer divided by a zero in a tensor gives the dividend; PyTorch raises on the CPU",
)
def div(ctx: LoweringContext, a: Operand, b: Operand, rounding_mode: str | None = None) -> TensorValue:
    """a / b, as a real number, truncated or floored."""
    if rounding_mode is None:
        a, divisor = operands(ctx, a, b, kind=Promotion.INT_TO_FLOAT)
        if isinstance(b, (int, float)) and not isinstance(b, bool):
            return rounded(ctx, numerics.divided(a, b))
        return rounded(ctx, ops.div(a, divisor))
    _refuse_division_by_zero(ctx, b)
    a, b = operands(ctx, a, b)
    if rounding_mode == "trunc":
        return rounded(ctx, numerics.truncated_divide(a, b))
    exactly = numerics.in_double if numerics.is_float(a.dtype) else _unchanged
    return rounded(ctx, exactly(numerics.floor_divide)(a, b))


def _unchanged(function: Callable[..., TensorValue]) -> Callable[..., TensorValue]:
    return function


def _refuse_division_by_zero(ctx: LoweringContext, divisor: Operand) -> None:
    if isinstance(divisor, int) and divisor == 0 and not ctx.dtype.is_floating_point:
        raise CannotLower("an integer division by zero, which PyTorch reports")


@lowering(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    layout=Layout.ELEMENTWISE,
)
def remainder(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    """The remainder with the divisor's sign."""
    return _remainder(ctx, numerics.remainder, a, b)


@lowering(aten.fmod.Tensor, aten.fmod.Scalar, layout=Layout.ELEMENTWISE)
def fmod(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    """The remainder with the dividend's sign."""
    return _remainder(ctx, numerics.fmod, a, b)


def _remainder(ctx: LoweringContext, function: Callable[..., TensorValue], a: Operand, b: Operand) -> TensorValue:
    _refuse_division_by_zero(ctx, b)
    a, b = operands(ctx, a, b)
    # In float64 the quotient of two float32 is exact enough for an exact remainder.
    exactly = numerics.in_double if numerics.is_float(a.dtype) else _unchanged
    return rounded(ctx, exactly(function)(a, b))


@lowering(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, layout=Layout.ELEMENTWISE)
def power(ctx: LoweringContext, base: Operand, exponent: Operand) -> TensorValue:
    """base ** exponent."""
    if isinstance(exponent, (int, float)) and isinstance(base, TensorValue):
        dtype = ctx.compute_dtype
        return rounded(ctx, _power_of_number(numerics.cast(base, dtype), exponent))
    base, exponent = operands(ctx, base, exponent)
    if not numerics.is_float(base.dtype):
        return rounded(ctx, ops.pow(base, exponent))
    return rounded(ctx, numerics.power(base, exponent))


def _power_of_number(x: TensorValue, exponent: float | int) -> TensorValue:
    whole = math.isfinite(exponent) and float(exponent).is_integer()
    if not numerics.is_float(x.dtype):
        if exponent < 0 or not whole:
            raise CannotLower(f"whole numbers to the power {exponent}")
        return numerics.integer_power(x, int(exponent))
    if whole and abs(exponent) <= _MULTIPLIED_OUT:
        size = numerics.integer_power(x, abs(int(exponent)))
        return size if exponent >= 0 else ops.div(numerics.constant(x, 1), size)
    if exponent == 0.5:
        return ops.sqrt(x)
    if exponent == -0.5:
        return ops.rsqrt(x)
    return numerics.power(x, numerics.constant(x, exponent))


@lowering(aten.maximum.default, layout=Layout.ELEMENTWISE)
def maximum(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
    """The larger; NaN where either is."""
    return rounded(ctx, numerics.maximum(*operands(ctx, a, b)))


@lowering(aten.minimum.default, layout=Layout.ELEMENTWISE)
def minimum(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
    """The smaller; NaN where either is."""
    return rounded(ctx, numerics.minimum(*operands(ctx, a, b)))


@lowering(aten.fmax.default, layout=Layout.ELEMENTWISE)
def fmax(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
    """The larger; the other where one is NaN."""
    a, b = operands(ctx, a, b)
    return rounded(ctx, ops.where(numerics.is_nan(b), a, ops.where(ops.greater(a, b), a, b)))


@lowering(aten.fmin.default, layout=Layout.ELEMENTWISE)
def fmin(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
    """The smaller; the other where one is NaN."""
    a, b = operands(ctx, a, b)
    return rounded(ctx, ops.where(numerics.is_nan(b), a, ops.where(ops.greater(b, a), a, b)))


@lowering(aten.clamp.default, aten.hardtanh.default, layout=Layout.ELEMENTWISE)
def clamp(
    ctx: LoweringContext, x: TensorValue, low: float | int | None = None, high: float | int | None = None, **named: Any
) -> TensorValue:
    """x between two numbers; NaN stays."""
    if ctx.node.target is aten.hardtanh.default:
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
        low, high = named.get("min_val", low), named.get("max_val", high)
    low, high = named.get("min", low), named.get("max", high)
    if any(bound is not None and not isinstance(bound, (int, float)) for bound in (low, high)):
        raise CannotLower("a bound that is known only at run time")
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        raise CannotLower("a bound that is NaN")
    x = numerics.cast(x, ctx.compute_dtype)
    if low is not None:
        x = numerics.at_least(x, low)
    if high is not None:
        x = numerics.at_most(x, high)
    return rounded(ctx, x)


@lowering(aten.clamp.Tensor, layout=Layout.ELEMENTWISE)
def clamp_tensor(
    ctx: LoweringContext, x: TensorValue, min: TensorValue | None = None, max: TensorValue | None = None
) -> TensorValue:
    """x between two tensors; NaN in any of them gives NaN."""
    x = numerics.cast(x, ctx.compute_dtype)
    if min is not None:
        x = numerics.maximum(x, numerics.cast(min, ctx.compute_dtype))
    if max is not None:
        x = numerics.minimum(x, numerics.cast(max, ctx.compute_dtype))
    return rounded(ctx, x)


@lowering(aten.where.self, layout=Layout.ELEMENTWISE)
def where(ctx: LoweringContext, condition: TensorValue, a: TensorValue, b: TensorValue) -> TensorValue:
    """a where the condition holds, b elsewhere."""
    dtype = ctx.max_dtype
    return ops.where(numerics.nonzero(condition), numerics.cast(a, dtype), numerics.cast(b, dtype))


@lowering(aten.copysign.Tensor, aten.copysign.Scalar, layout=Layout.ELEMENTWISE)
def copysign(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    """The size of a with the sign of b."""
    a, b = operands(ctx, a, b, kind=Promotion.INT_TO_FLOAT)
    size = ops.abs(a)
    return rounded(ctx, ops.where(numerics.sign_bit(b), ops.negate(size), size))


@lowering(aten.atan2.default, layout=Layout.ELEMENTWISE)
def atan2(ctx: LoweringContext, y: TensorValue, x: TensorValue) -> TensorValue:
    """The angle of the point (x, y)."""
    return rounded(ctx, numerics.atan2(*operands(ctx, y, x, kind=Promotion.INT_TO_FLOAT)))


@lowering(aten.hypot.default, layout=Layout.ELEMENTWISE)
def hypot(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
    """The length of (a, b)."""
    length = numerics.in_double(lambda x, y: ops.sqrt(ops.add(ops.mul(x, x), ops.mul(y, y))))
    return rounded(ctx, length(*operands(ctx, a, b)))
