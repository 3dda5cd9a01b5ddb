"""Comparisons, predicates, logical and bitwise ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from max.dtype import DType
from max.graph import TensorValue

from torch_max_backend.dtypes import NARROW_FLOATS, max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.pointwise import Operand, Promotion, computation_dtype, operand
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten


def _comparison(compare: Callable[[TensorValue, TensorValue], TensorValue]) -> Callable[..., TensorValue]:
    def build(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        first, second = _probes(ctx)
        dtype = max_dtype(torch.result_type(first, second))
        wide = max_dtype(computation_dtype(ctx, 0, 1, kind=Promotion.ALWAYS_BOOL))
        # Programs have an order of numbers alone.
        wide = DType.uint8 if wide == DType.bool else wide
        if a is b and numerics.is_float(a.dtype) and compare in _OF_ITSELF:
            # MAX takes x == x for true, which the NaN tests in PyTorch's decompositions are not.
            return _OF_ITSELF[compare](a)
        # A number is rounded to the tensors' dtype before it is compared, as in ATen.
        left, right = (numerics.cast(operand(ctx, value, dtype), wide) for value in (a, b))
        return compare(left, right)

    build.__name__ = compare.__name__
    return build


def _probes(ctx: LoweringContext) -> list[torch.Tensor | float | int | bool]:
    """The two arguments' fake values, symbolic numbers replaced by plain ones of their type."""
    return [1 if isinstance(v, torch.SymInt) else v for v in (ctx.arg_meta(0), ctx.arg_meta(1))]


def less(a: TensorValue, b: TensorValue) -> TensorValue:
    """a < b."""
    return ops.greater(b, a)


def less_equal(a: TensorValue, b: TensorValue) -> TensorValue:
    """a <= b."""
    return ops.greater_equal(b, a)


def _is_number(x: TensorValue) -> TensorValue:
    return ops.logical_not(ops.is_nan(x))


#: What comparing a float tensor with itself comes to.
_OF_ITSELF: dict[Callable[..., TensorValue], Callable[[TensorValue], TensorValue]] = {
    ops.equal: _is_number,
    ops.greater_equal: _is_number,
    less_equal: _is_number,
    numerics.not_equal: ops.is_nan,
}

for _packet, _compare in (
    (aten.eq, ops.equal),
    (aten.ne, numerics.not_equal),
    (aten.gt, ops.greater),
    (aten.ge, ops.greater_equal),
    (aten.lt, less),
    (aten.le, less_equal),
):
    lowering(_packet.Tensor, _packet.Scalar, layout=Layout.ELEMENTWISE)(_comparison(_compare))


@lowering(aten.isnan.default, layout=Layout.ELEMENTWISE)
def isnan(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """Whether each element is NaN."""
    return numerics.is_nan(x)


@lowering(aten.isinf.default, layout=Layout.ELEMENTWISE)
def isinf(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """Whether each element is infinite."""
    return numerics.is_inf(x)


@lowering(aten.signbit.default, layout=Layout.ELEMENTWISE)
def signbit(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """Whether each element is negative, minus zero included."""
    if x.dtype == DType.bool:
        return numerics.filled(x, False)
    return numerics.sign_bit(numerics.cast(x, DType.float32) if x.dtype in NARROW_FLOATS else x)


@lowering(aten.logical_not.default, layout=Layout.ELEMENTWISE)
def logical_not(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """Whether each element is zero."""
    return ops.logical_not(numerics.nonzero(x))


def _logical(combine: Callable[[TensorValue, TensorValue], TensorValue]) -> Callable[..., TensorValue]:
    def build(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> TensorValue:
        return combine(numerics.nonzero(a), numerics.nonzero(b))

    build.__name__ = combine.__name__
    return build


for _packet, _combine in (
    (aten.logical_and, ops.logical_and),
    (aten.logical_or, ops.logical_or),
    (aten.logical_xor, ops.logical_xor),
):
    lowering(_packet.default, layout=Layout.ELEMENTWISE)(_logical(_combine))


@lowering(aten.bitwise_not.default, layout=Layout.ELEMENTWISE)
def bitwise_not(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    """Every bit flipped."""
    if x.dtype == DType.bool:
        return ops.logical_not(x)
    # Two's complement: ~x is -1 - x; unsigned 8 bits: 255 - x.
    return ops.sub(numerics.constant(x, 255 if x.dtype.is_unsigned_integral() else -1), x)


def _bitwise(combine: Callable[[TensorValue, TensorValue], TensorValue]) -> Callable[..., TensorValue]:
    def build(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        if ctx.dtype is not torch.bool:
            raise CannotLower("MAX has no bitwise ops on whole numbers")
        return combine(operand(ctx, a, DType.bool), operand(ctx, b, DType.bool))

    build.__name__ = combine.__name__
    return build


for _packet, _combine in (
    (aten.bitwise_and, ops.logical_and),
    (aten.bitwise_or, ops.logical_or),
    (aten.bitwise_xor, ops.logical_xor),
):
    lowering(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor, layout=Layout.ELEMENTWISE)(_bitwise(_combine))
