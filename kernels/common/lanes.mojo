"""Values that the lanes of a warp hand to each other."""

from std.memory import bitcast
from std.sys.info import is_nvidia_gpu, size_of

import max.gpu.primitives.warp as warps

from .ptx import exchange_lanes


@always_inline
def from_lane[
    dtype: DType, //
](value: Scalar[dtype], distance: Int) -> Scalar[dtype]:
    """Returns the value of the lane whose number differs in the bits of `distance`; every lane of the warp takes part.
    """
    comptime if size_of[dtype]() < 4:
        # Every number of so few bits is one of 32 bits.
        comptime wide = DType.float32 if dtype.is_floating_point() else DType.int32
        return from_lane(value.cast[wide](), distance).cast[dtype]()
    else:
        comptime words = size_of[dtype]() // 4
        var own = bitcast[DType.uint32, words](value)
        comptime for i in range(words):
            comptime if is_nvidia_gpu():
                own[i] = exchange_lanes(own[i], Int32(distance))
            else:
                own[i] = warps.shuffle_xor(own[i], UInt32(distance))
        return bitcast[dtype, 1](own)
