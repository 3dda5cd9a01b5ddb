"""exp as softmax needs it."""

from std.math import isnan
from std.memory import bitcast
from std.utils.numerics import inf

comptime _LOG2_E = 1.44269504088896341
# exp(r) = 1 + r + r^2 * p(r) for |r| <= log(2) / 2: a minimax fit with a relative error below 1e-7 (Cephes, expf).
comptime _FIT = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# log(2) in two parts, the first of which has so few bits that its small multiples are exact.
comptime _LOG_2 = (0.693359375, -2.12194440e-4)
comptime _LOG_2_WIDE = (6.93145751953125e-1, 1.42860682030941723212e-6)
comptime _TERMS = 13
"""Terms of the Taylor series in float64: the remainder is below 1e-17."""


def _inverse_factorial(n: Int) -> Float64:
    var result = Float64(1)
    for i in range(2, n + 1):
        result /= Float64(i)
    return result


@always_inline
def exponential[
    acc: DType, width: Int
](x: SIMD[acc, width]) -> SIMD[acc, width]:
    """exp(x) in float32 or float64, 0 for -inf and where the result is no normal number, NaN for NaN.
    """
    comptime if acc == DType.float32:
        comptime Vector = SIMD[DType.float32, width]
        var v = rebind[Vector](x)
        var n = (v * _LOG2_E).__round__()
        var r = n.fma(Vector(-_LOG_2[1]), n.fma(Vector(-_LOG_2[0]), v))
        var p = Vector(_FIT[0])
        comptime for i in range(1, 6):
            p = p.fma(r, Vector(_FIT[i]))
        p = p.fma(r * r, r + 1)
        var power = bitcast[DType.float32, width](
            (n.clamp(-126, 127).cast[DType.int32]() + 127) << 23
        )
        var result = v.lt(-87.3).select(Vector(0), p * power)
        result = v.gt(88.7).select(Vector(inf[DType.float32]()), result)
        return rebind[SIMD[acc, width]](isnan(v).select(v, result))
    else:
        comptime Vector = SIMD[DType.float64, width]
        var v = rebind[Vector](x)
        var n = (v * _LOG2_E).__round__()
        var r = n.fma(
            Vector(-_LOG_2_WIDE[1]), n.fma(Vector(-_LOG_2_WIDE[0]), v)
        )
        var p = Vector(comptime (_inverse_factorial(_TERMS)))
        comptime for i in reversed(range(_TERMS)):
            p = p.fma(r, Vector(comptime (_inverse_factorial(i))))
        var power = bitcast[DType.float64, width](
            (n.clamp(-1022, 1023).cast[DType.int64]() + 1023) << 52
        )
        var result = v.lt(-708.0).select(Vector(0), p * power)
        result = v.gt(709.7).select(Vector(inf[DType.float64]()), result)
        return rebind[SIMD[acc, width]](isnan(v).select(v, result))
