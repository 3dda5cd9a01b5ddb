"""Arithmetic that the kernel families share."""

from std.math import ceildiv, exp, recip
from std.sys.info import is_nvidia_gpu
from std.utils.numerics import inf, isnan

from .argument import KernelArgument


@fieldwise_init
struct Divisor(KernelArgument):
    """A divisor from 1 to 2^31 - 1 that a launch knows: exact quotients of 0 <= n < 2^31 by a multiplication and a
    shift."""

    var value: Int32
    var multiplier: UInt32
    """2^(31 + shift) / value, rounded up: the error stays below one over the value."""
    var shift: UInt32

    def __init__(out self, value: Int):
        var log = 0
        while (1 << log) < value:
            log += 1
        self.value = Int32(value)
        self.shift = UInt32(log)
        self.multiplier = UInt32(ceildiv(1 << (31 + log), value))

    @always_inline
    def quotient(self, n: Int32) -> Int32:
        # Doubling n makes the fixed part of the shift 32: the high half of a 32-bit product.
        var product = UInt64(UInt32(n) << 1) * UInt64(self.multiplier)
        return Int32(UInt32(product >> 32) >> self.shift)

    @always_inline
    def divide(self, n: Int32) -> Tuple[Int32, Int32]:
        """Returns quotient and remainder."""
        var q = self.quotient(n)
        return (q, n - q * self.value)


@always_inline
def divide(value: Int32, by: Int32) -> Tuple[Int32, Int32]:
    """Returns quotient and remainder of values that are never negative."""
    var quotient = UInt32(value) // UInt32(by)
    return Int32(quotient), Int32(UInt32(value) - quotient * UInt32(by))


@always_inline
def truncated_quotient[
    dtype: DType, width: Int
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the quotients of whole numbers, rounded towards zero; no divisor may be 0, nor -1 where the least number
    is divided."""
    var quotient = a // b
    comptime if dtype.is_signed():
        var exact = (quotient * b).eq(a)
        var negative = a.lt(0) ^ b.lt(0)
        return (negative & ~exact).select(quotient + 1, quotient)
    return quotient


# Below and above these e to the x counts as zero and as infinite, as in lowering/numerics.py.
comptime MIN_EXPONENT = -103.0
comptime MAX_EXPONENT = 88.72283905206835


@always_inline
def exponential[
    width: Int
](x: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """Returns e to the x, zero and infinite where it leaves the range, NaN for NaN.
    """
    var value = exp(x)
    comptime if is_nvidia_gpu():
        # As its instruction has it.
        return value
    value = x.gt(MAX_EXPONENT).select(
        SIMD[DType.float32, width](inf[DType.float32]()), value
    )
    value = x.lt(MIN_EXPONENT).select(SIMD[DType.float32, width](0), value)
    return isnan(x).select(x, value)


@always_inline
def quotient_above_one[
    width: Int
](a: SIMD[DType.float32, width], b: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """Returns a / b for b of at least one: to two units in the last place on an NVIDIA GPU, and zero for b above 2^126.
    """
    comptime if is_nvidia_gpu():
        return a * recip(b)
    return a / b


def gcd(a: Int, b: Int) -> Int:
    """Returns the greatest common divisor of two numbers that are never negative.
    """
    var x = a
    var y = b
    while y != 0:
        x, y = y, x % y
    return x
