"""Keys: unsigned integers of an element's width, whose order is that of the elements."""

from std.memory import bitcast
from std.sys import size_of


@fieldwise_init
struct Sorting(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents: x [rows, length], values and indices [rows, count]."""

    var rows: Int
    var length: Int
    var count: Int


comptime key_type[dtype: DType] = DType.uint8 if size_of[
    dtype
]() == 1 else DType.uint16 if size_of[
    dtype
]() == 2 else DType.uint32 if size_of[
    dtype
]() == 4 else DType.uint64

comptime key_bits[dtype: DType] = 8 * size_of[dtype]()


@always_inline
def key_of[
    dtype: DType, descending: Bool
](x: Scalar[dtype]) -> Scalar[key_type[dtype]]:
    """NaN is larger than every number, and the two zeros are equal."""
    comptime unsigned = key_type[dtype]
    comptime sign = Scalar[unsigned](1) << Scalar[unsigned](key_bits[dtype] - 1)
    var key: Scalar[unsigned]
    comptime if dtype.is_floating_point():
        var bits = bitcast[unsigned, 1](x)
        if x != x:
            key = ~Scalar[unsigned](0)
        elif x == 0:
            key = sign
        elif bits & sign != 0:
            key = ~bits
        else:
            key = bits | sign
    elif dtype.is_signed():
        key = bitcast[unsigned, 1](x) ^ sign
    else:
        key = bitcast[unsigned, 1](x)
    return ~key if descending else key
