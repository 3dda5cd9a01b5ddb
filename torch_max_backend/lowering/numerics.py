"""Arithmetic on MAX values with PyTorch's semantics: NaN, infinities, integer division, casts.

MAX's own elementwise ops are accurate inside their domain but saturate or drop NaN outside it: ``exp`` never
reaches infinity, ``max`` and ``relu`` lose NaN, ``not_equal`` is false for NaN, an integer division by zero ends
the process. Lowerings call these functions instead; on finite values they cost a compare and a select, which run in
the same generated program as the op itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue

from torch_max_backend.ir import ops
from torch_max_backend.lowering.context import scalar
from torch_max_backend.max_compat import integer_division

#: tanh(x) / x in x squared up to 1/4, and atan(x) / x in x squared up to tan(pi / 8) squared: Chebyshev fits.
_TANH = (
    0.9999999999924758,
    -0.33333333036130935,
    0.13333314118602452,
    -0.05396357613491213,
    0.021814863252924813,
    -0.008530990079382943,
    0.0025535014536989856,
)
_ATAN = (
    1.0000000000000002,
    -0.33333333333328286,
    0.19999999998796014,
    -0.1428571417295105,
    0.11111105659048044,
    -0.09090754633846673,
    0.07689567207088523,
    -0.06635220982333596,
    0.056476191412793975,
    -0.04146418161108749,
    0.015575241989926896,
    0.006546401653874069,
)
#: Taylor series in x squared, exact in float64 up to pi / 4.
_SINE = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(9))
_COSINE = tuple((-1) ** k / math.factorial(2 * k) for k in range(10))
#: pi / 2 as float64 and what that leaves out.
_HALF_PI = (math.pi / 2, 6.123233995736766e-17)

#: Beyond these, exp of a finite argument leaves the dtype's normal range.
_EXP_RANGE = {DType.float32: (-103.0, 88.72283905206835), DType.float64: (-745.0, 709.782712893384)}


def constant(like: TensorValue, value: float | int | bool) -> TensorValue:
    """A rank-0 constant of ``like``'s dtype, on its device."""
    return scalar(value, like.dtype, like.device)


def cast(x: TensorValue, dtype: DType) -> TensorValue:
    """``x.to(dtype)``: floats truncate towards zero, anything but zero (NaN too) is True."""
    if x.dtype == dtype:
        return x
    if dtype == DType.bool:
        return nonzero(x)
    return ops.cast(x, dtype)


def is_float(dtype: DType) -> bool:
    """Whether ``dtype`` is a floating point type."""
    return dtype.is_float()


def dim_value(dim: Dim, like: TensorValue, dtype: DType) -> TensorValue:
    """A dimension as a rank-0 value of ``dtype`` on ``like``'s device."""
    if isinstance(dim, StaticDim):
        return scalar(int(dim), dtype, like.device)
    value = ops.cast(TensorValue(dim), dtype)
    return value if like.device == value.device else ops.transfer_to(value, like.device)


def filled(like: TensorValue, value: float | int | bool) -> TensorValue:
    """A tensor of ``like``'s shape and dtype, every element ``value``."""
    return ops.broadcast_to(constant(like, value), like.shape)


def divided(x: TensorValue, divisor: float | int) -> TensorValue:
    """``x`` over a number that is known now, as a product with its reciprocal.

    MAX itself turns such a division into that product. But it leaves 1 / divisor to its constant folding, which
    compiles code of its own for that: as much time again as the smallest graph takes.
    """
    wide = x.dtype if x.dtype in (DType.float32, DType.float64) else DType.float32
    reciprocal = 1 / float(divisor) if divisor else math.copysign(math.inf, divisor)
    info = np.finfo(wide.to_numpy())
    if divisor and not info.tiny <= abs(reciprocal) <= info.max:
        return ops.div(x, constant(x, divisor))
    return cast(ops.mul(cast(x, wide), scalar(reciprocal, wide, x.device)), x.dtype)


# Predicates and comparisons


def nonzero(x: TensorValue) -> TensorValue:
    """``x != 0``, true for NaN."""
    if x.dtype == DType.bool:
        return x
    return ops.logical_not(ops.equal(x, constant(x, 0)))


def not_equal(a: TensorValue, b: TensorValue) -> TensorValue:
    """``a != b``, true where either is NaN."""
    return ops.logical_not(ops.equal(a, b))


def is_nan(x: TensorValue) -> TensorValue:
    """Whether each element is NaN; false everywhere for integers."""
    if not is_float(x.dtype):
        return ops.broadcast_to(scalar(False, DType.bool, x.device), x.shape)
    return ops.is_nan(x)


def is_inf(x: TensorValue) -> TensorValue:
    """Whether each element is infinite; false everywhere for integers."""
    if not is_float(x.dtype):
        return ops.broadcast_to(scalar(False, DType.bool, x.device), x.shape)
    return ops.is_inf(x)


# Extrema


def maximum(a: TensorValue, b: TensorValue) -> TensorValue:
    """The larger element; NaN where either is."""
    if not is_float(a.dtype):
        return ops.where(ops.greater_equal(a, b), a, b)
    return ops.where(ops.logical_or(ops.is_nan(a), ops.greater_equal(a, b)), a, b)


def minimum(a: TensorValue, b: TensorValue) -> TensorValue:
    """The smaller element; NaN where either is."""
    if not is_float(a.dtype):
        return ops.where(ops.greater_equal(b, a), a, b)
    return ops.where(ops.logical_or(ops.is_nan(a), ops.greater_equal(b, a)), a, b)


def at_least(x: TensorValue, low: float | int) -> TensorValue:
    """``max(x, low)`` for a number ``low``; NaN stays."""
    bound = constant(x, low)
    return ops.where(ops.greater(bound, x), bound, x)


def at_most(x: TensorValue, high: float | int) -> TensorValue:
    """``min(x, high)`` for a number ``high``; NaN stays."""
    bound = constant(x, high)
    return ops.where(ops.greater(x, bound), bound, x)


# Division


def negate(x: TensorValue) -> TensorValue:
    """-x; unsigned numbers wrap."""
    return subtract(constant(x, 0), x) if x.dtype.is_unsigned_integral() else ops.negate(x)


def subtract(a: TensorValue, b: TensorValue) -> TensorValue:
    """a - b; unsigned numbers wrap."""
    if not a.dtype.is_unsigned_integral():
        return ops.sub(a, b)
    # MAX turns 0 - x into a negation, which it refuses to compile for unsigned numbers.
    return ops.cast(ops.sub(ops.cast(a, DType.int32), ops.cast(b, DType.int32)), a.dtype)


def floor_divide(a: TensorValue, b: TensorValue) -> TensorValue:
    """Division rounded towards minus infinity, as ATen's for floats and for integers."""
    if is_float(a.dtype):
        remainder = fmod(a, b)
        quotient = ops.div(ops.sub(a, remainder), b)
        differ = ops.logical_and(nonzero(remainder), ops.logical_xor(_negative(b), _negative(remainder)))
        quotient = ops.where(differ, ops.sub(quotient, constant(a, 1)), quotient)
        return ops.where(nonzero(b), ops.round(quotient), ops.div(a, b))
    quotient = truncated_divide(a, b)
    if a.dtype.is_unsigned_integral():
        return quotient
    remainder = ops.sub(a, ops.mul(quotient, b))
    differ = ops.logical_and(nonzero(remainder), ops.logical_xor(_negative(b), _negative(remainder)))
    return ops.where(differ, ops.sub(quotient, constant(a, 1)), quotient)


def truncated_divide(a: TensorValue, b: TensorValue) -> TensorValue:
    """Division rounded towards zero. An integer divided by zero gives the dividend: it must not trap."""
    if is_float(a.dtype):
        return ops.trunc(ops.div(a, b))
    one = constant(b, 1)
    unsafe = ops.equal(b, constant(b, 0))
    if a.dtype.is_unsigned_integral():
        return integer_division(a, ops.where(unsafe, one, b))
    # The smallest integer divided by -1 overflows, which traps as well; negation wraps.
    negate = ops.equal(b, constant(b, -1))
    quotient = integer_division(a, ops.where(ops.logical_or(unsafe, negate), one, b))
    return ops.where(negate, ops.negate(quotient), quotient)


def fmod(a: TensorValue, b: TensorValue) -> TensorValue:
    """The remainder with the sign of ``a``."""
    if not is_float(a.dtype):
        return ops.sub(a, ops.mul(truncated_divide(a, b), b))
    result = ops.sub(a, ops.mul(ops.trunc(ops.div(a, b)), b))
    # a - 0 * inf is NaN; C's fmod returns a.
    whole = ops.logical_and(ops.is_inf(b), ops.logical_not(ops.is_inf(a)))
    return ops.where(whole, a, result)


def remainder(a: TensorValue, b: TensorValue) -> TensorValue:
    """The remainder with the sign of ``b``."""
    result = fmod(a, b)
    if a.dtype.is_unsigned_integral():
        return result
    differ = ops.logical_and(nonzero(result), ops.logical_xor(_negative(b), _negative(result)))
    return ops.where(differ, ops.add(result, b), result)


def _negative(x: TensorValue) -> TensorValue:
    return ops.greater(constant(x, 0), x)


def sign_bit(x: TensorValue) -> TensorValue:
    """Whether the sign bit is set; minus zero counts, the sign of NaN does not."""
    if not is_float(x.dtype):
        return _negative(x)
    return ops.logical_or(_negative(x), _negative(ops.div(constant(x, 1), x)))


# Transcendental functions of float32 and float64


def exp(x: TensorValue) -> TensorValue:
    """e to the x, infinite and zero where it leaves the dtype's range, NaN for NaN."""
    low, high = _EXP_RANGE[x.dtype]
    y = ops.exp(x)
    if x.dtype == DType.float64:
        # MAX's float64 exp has 10 good digits; its log has all: one Newton step.
        y = ops.add(y, ops.mul(y, ops.sub(x, ops.log(y))))
    y = ops.where(ops.greater(x, constant(x, high)), constant(x, math.inf), y)
    y = ops.where(ops.greater(constant(x, low), x), constant(x, 0), y)
    return ops.where(ops.is_nan(x), x, y)


def expm1(x: TensorValue) -> TensorValue:
    """exp(x) - 1 without cancellation near zero."""
    one = constant(x, 1)
    u = exp(x)
    less = ops.sub(u, one)
    corrected = ops.div(ops.mul(less, x), log(u))
    plain = ops.logical_or(ops.is_inf(u), ops.equal(less, constant(x, -1)))
    return ops.where(ops.equal(u, one), x, ops.where(plain, less, corrected))


def log(x: TensorValue) -> TensorValue:
    """The natural logarithm."""
    if x.dtype == DType.float64:
        return ops.log(x)
    # On a GPU MAX takes an approximate instruction whose error is absolute: useless where the result is near zero.
    one = constant(x, 1)
    near = ops.logical_and(ops.greater(x, constant(x, 0.5)), ops.greater(constant(x, 2), x))
    return ops.where(near, ops.log1p(ops.sub(x, one)), ops.log(x))


def sigmoid(x: TensorValue) -> TensorValue:
    """1 / (1 + exp(-x))."""
    one = constant(x, 1)
    return ops.div(one, ops.add(one, exp(ops.negate(x))))


def tanh(x: TensorValue) -> TensorValue:
    """The hyperbolic tangent; NaN stays."""
    if x.dtype == DType.float64:
        return ops.where(ops.is_nan(x), x, ops.tanh(x))
    # On a GPU MAX takes an approximate instruction that is right to 11 bits.
    size = ops.abs(x)
    one = constant(x, 1)
    near = ops.mul(x, _polynomial(ops.mul(x, x), _TANH))
    shrunk = exp(ops.mul(size, constant(x, -2)))
    far = ops.div(ops.sub(one, shrunk), ops.add(one, shrunk))
    far = ops.where(_negative(x), ops.negate(far), far)
    return ops.where(ops.greater(constant(x, 0.5), size), near, far)


def _polynomial(x: TensorValue, coefficients: Sequence[float]) -> TensorValue:
    value = constant(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = ops.add(ops.mul(value, x), constant(x, coefficient))
    return value


def relu(x: TensorValue) -> TensorValue:
    """``x`` where it is positive or NaN, zero elsewhere."""
    zero = constant(x, 0)
    return ops.where(ops.greater_equal(zero, x), zero, x)


def in_double(function: Callable[..., TensorValue]) -> Callable[..., TensorValue]:
    """``function`` evaluated in float64, rounded once to the dtype of its (float) arguments.

    For functions that MAX lacks: the formulas lose a few of float64's digits and none of float32's.
    """

    def evaluated(*args: TensorValue) -> TensorValue:
        return ops.cast(function(*(ops.cast(arg, DType.float64) for arg in args)), args[0].dtype)

    return evaluated


def sin(x: TensorValue) -> TensorValue:
    """The sine."""
    return _circular(x, ops.sin, 0)


def cos(x: TensorValue) -> TensorValue:
    """The cosine."""
    return _circular(x, ops.cos, 1)


def _circular(x: TensorValue, own: Callable[[TensorValue], TensorValue], quarters: int) -> TensorValue:
    """The sine of x plus so many quarter turns; ``own`` is MAX's function of x, which GPUs approximate in
    float32 and lack in float64.
    """
    if x.dtype == DType.float64 and x.device.is_cpu():
        return own(x)
    wide = ops.cast(x, DType.float64)
    turns = ops.round(ops.mul(wide, constant(wide, 2 / math.pi)))
    rest = ops.sub(wide, ops.mul(turns, constant(wide, _HALF_PI[0])))
    rest = ops.sub(rest, ops.mul(turns, constant(wide, _HALF_PI[1])))
    square = ops.mul(rest, rest)
    sine = ops.mul(rest, _polynomial(square, _SINE))
    cosine = _polynomial(square, _COSINE)
    # Which quarter, 0 to 3, as floats: the remainder of a whole number by 4.
    shifted = ops.add(turns, constant(wide, quarters))
    quarter = ops.sub(shifted, ops.mul(ops.floor(ops.mul(shifted, constant(wide, 0.25))), constant(wide, 4)))
    odd = ops.logical_or(ops.equal(quarter, constant(wide, 1)), ops.equal(quarter, constant(wide, 3)))
    value = ops.where(odd, cosine, sine)
    value = ops.where(ops.greater_equal(quarter, constant(wide, 2)), ops.negate(value), value)
    value = ops.cast(value, x.dtype)
    if x.dtype == DType.float64:
        return value
    # Beyond this the reduction runs out of digits; infinities and NaN take this way too.
    return ops.where(ops.greater(constant(x, 1e6), ops.abs(x)), value, own(x))


@in_double
def asin(x: TensorValue) -> TensorValue:
    """The arc sine, NaN outside [-1, 1]."""
    one = constant(x, 1)
    cosine = ops.sqrt(ops.mul(ops.sub(one, x), ops.add(one, x)))
    return ops.mul(constant(x, 2), atan(ops.div(x, ops.add(one, cosine))))


@in_double
def acos(x: TensorValue) -> TensorValue:
    """The arc cosine, NaN outside [-1, 1]."""
    one = constant(x, 1)
    # Not the quotient of the roots: (1 - x) / (1 + x) at -1 is an infinity that atan takes.
    return ops.mul(constant(x, 2), atan(ops.sqrt(ops.div(ops.sub(one, x), ops.add(one, x)))))


@in_double
def atan(x: TensorValue) -> TensorValue:
    """The arc tangent."""
    one, size = constant(x, 1), ops.abs(x)
    # Twice reduced: to [0, 1] by the reciprocal, to tan(pi / 8) by turning a further pi / 4.
    large = ops.greater(size, one)
    reduced = ops.where(large, ops.div(one, size), size)
    turned = ops.greater(reduced, constant(x, math.tan(math.pi / 8)))
    small = ops.where(turned, ops.div(ops.sub(reduced, one), ops.add(reduced, one)), reduced)
    angle = ops.mul(small, _polynomial(ops.mul(small, small), _ATAN))
    angle = ops.where(turned, ops.add(angle, constant(x, math.pi / 4)), angle)
    angle = ops.where(large, ops.sub(constant(x, math.pi / 2), angle), angle)
    angle = ops.where(_negative(x), ops.negate(angle), angle)
    return ops.where(ops.is_nan(x), x, angle)


@in_double
def atan2(y: TensorValue, x: TensorValue) -> TensorValue:
    """The angle of the point (x, y), with the quadrants and signed zeros of C's atan2."""
    zero, one, pi = constant(x, 0), constant(x, 1), constant(x, math.pi)
    height, width = ops.abs(y), ops.abs(x)
    both = ops.logical_and(ops.is_inf(x), ops.is_inf(y))
    ratio = ops.where(both, one, ops.div(height, width))
    ratio = ops.where(ops.logical_and(ops.equal(height, zero), ops.equal(width, zero)), zero, ratio)
    angle = atan(ratio)
    angle = ops.where(sign_bit(x), ops.sub(pi, angle), angle)
    return ops.where(sign_bit(y), ops.negate(angle), angle)


@in_double
def tan(x: TensorValue) -> TensorValue:
    """The tangent."""
    return ops.div(sin(x), cos(x))


@in_double
def sinh(x: TensorValue) -> TensorValue:
    """The hyperbolic sine."""
    one, half = constant(x, 1), constant(x, 0.5)
    grown = expm1(ops.abs(x))
    # For a huge argument grown / (grown + 1) would be inf / inf.
    rest = ops.where(ops.is_inf(grown), one, ops.div(grown, ops.add(grown, one)))
    size = ops.mul(half, ops.add(grown, rest))
    return ops.where(_negative(x), ops.negate(size), size)


@in_double
def cosh(x: TensorValue) -> TensorValue:
    """The hyperbolic cosine."""
    grown = exp(ops.abs(x))
    return ops.mul(constant(x, 0.5), ops.add(grown, ops.div(constant(x, 1), grown)))


@in_double
def asinh(x: TensorValue) -> TensorValue:
    """The inverse hyperbolic sine."""
    one, size = constant(x, 1), ops.abs(x)
    square = ops.mul(x, x)
    near = ops.log1p(ops.add(size, ops.div(square, ops.add(one, ops.sqrt(ops.add(one, square))))))
    far = ops.add(ops.log(size), constant(x, math.log(2)))
    result = ops.where(ops.greater(size, constant(x, 1e8)), far, near)
    return ops.where(_negative(x), ops.negate(result), result)


@in_double
def acosh(x: TensorValue) -> TensorValue:
    """The inverse hyperbolic cosine, NaN below 1."""
    above = ops.sub(x, constant(x, 1))
    near = ops.log1p(ops.add(above, ops.sqrt(ops.add(ops.mul(constant(x, 2), above), ops.mul(above, above)))))
    far = ops.add(ops.log(x), constant(x, math.log(2)))
    return ops.where(ops.greater(x, constant(x, 1e8)), far, near)


@in_double
def atanh(x: TensorValue) -> TensorValue:
    """The inverse hyperbolic tangent, NaN beyond 1."""
    size = ops.abs(x)
    grown = ops.div(ops.mul(constant(x, 2), size), ops.sub(constant(x, 1), size))
    result = ops.mul(constant(x, 0.5), ops.log1p(grown))
    return ops.where(_negative(x), ops.negate(result), result)


def ceil(x: TensorValue) -> TensorValue:
    """The least whole number that is not below."""
    return ops.negate(ops.floor(ops.negate(x)))


@in_double
def exp2(x: TensorValue) -> TensorValue:
    """2 to the x."""
    return exp(ops.mul(x, constant(x, math.log(2))))


@in_double
def log2(x: TensorValue) -> TensorValue:
    """The logarithm to base 2."""
    return ops.mul(ops.log(x), constant(x, 1 / math.log(2)))


@in_double
def log10(x: TensorValue) -> TensorValue:
    """The logarithm to base 10."""
    return ops.mul(ops.log(x), constant(x, 1 / math.log(10)))


@in_double
def power(base: TensorValue, exponent: TensorValue) -> TensorValue:
    """``base ** exponent`` with the special cases of C's pow."""
    zero, one = constant(base, 0), constant(base, 1)
    size = ops.abs(base)
    result = exp(ops.mul(exponent, ops.log(size)))
    whole = ops.equal(ops.floor(exponent), exponent)
    halved = ops.mul(exponent, constant(base, 0.5))
    odd = ops.logical_and(whole, not_equal(ops.floor(halved), halved))
    negative = ops.greater(zero, base)
    result = ops.where(ops.logical_and(sign_bit(base), odd), ops.negate(result), result)
    invalid = ops.logical_and(ops.logical_and(negative, ops.logical_not(ops.is_inf(base))), ops.logical_not(whole))
    result = ops.where(invalid, constant(base, math.nan), result)
    # 1 ** anything and anything ** 0 are 1, NaN included; (-1) ** (+-inf) is 1 as well.
    unit = ops.logical_or(
        ops.equal(base, one), ops.logical_and(ops.equal(base, constant(base, -1)), ops.is_inf(exponent))
    )
    return ops.where(ops.logical_or(unit, ops.equal(exponent, zero)), one, result)


def integer_power(x: TensorValue, exponent: int) -> TensorValue:
    """``x ** exponent`` by squaring, for a whole ``exponent`` >= 0."""
    result: TensorValue | None = None
    while exponent:
        if exponent & 1:
            result = x if result is None else ops.mul(result, x)
        exponent >>= 1
        if exponent:
            x = ops.mul(x, x)
    return filled(x, 1) if result is None else result
