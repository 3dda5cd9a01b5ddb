"""Widening of elements of 16 bits, two of which a register holds."""

from std.memory import bitcast
from std.sys.info import is_nvidia_gpu

from .ptx import wide_halves


@always_inline
def wide[
    dtype: DType, vector: SIMDLength, //
](value: SIMD[dtype, vector]) -> SIMD[DType.float32, vector]:
    """Converts to float32, by one instruction for each value; the compiler takes two for the upper half of a pair.
    """
    comptime if dtype == DType.bfloat16 and vector > 1:
        var pairs = bitcast[DType.uint32, vector // 2](value)
        var low = bitcast[DType.float32, vector // 2](pairs << 16)
        var high = bitcast[DType.float32, vector // 2](pairs & 0xFFFF0000)
        return rebind[SIMD[DType.float32, vector]](low.interleave(high))
    elif dtype == DType.float16 and vector > 1 and is_nvidia_gpu():
        # The compiler would widen what is loaded ahead at once, and spill it.
        var pairs = bitcast[DType.uint32, vector // 2](value)
        var result = SIMD[DType.float32, vector]()
        comptime for i in range(vector // 2):
            var pair = wide_halves(pairs[i])
            result[2 * i] = pair[0]
            result[2 * i + 1] = pair[1]
        return result
    else:
        return value.cast[DType.float32]()
