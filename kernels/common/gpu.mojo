"""Limits of a thread and of a launch that hold on every GPU for which kernels are compiled, and vectors of a thread."""

from std.sys import size_of

from .pointer import Ptr, accumulation_type

comptime GRID_LIMIT = 65535
"""Blocks of a grid along y, and along z."""
comptime VECTOR_BYTES = 16
"""Bytes that a thread loads or stores by one instruction."""

comptime vector_alignment[dtype: DType, width: Int]: Int = min(
    width * size_of[dtype](), VECTOR_BYTES
)
"""Alignment of a vector's address in bytes, with which it is loaded and stored by as few instructions as possible."""


@always_inline
def load_wide[
    dtype: DType, //, V: Int
](data: Ptr[dtype], at: Int) -> SIMD[accumulation_type[dtype], V]:
    """Loads a vector and converts it to the accumulation type."""
    return data.unsafe_load[width=V, alignment=vector_alignment[dtype, V]](
        at
    ).cast[accumulation_type[dtype]]()


@always_inline
def store_vector[
    dtype: DType, V: SIMDLength, //
](data: Ptr[dtype], at: Int, value: SIMD[dtype, V]):
    data.unsafe_store[alignment=vector_alignment[dtype, Int(V)]](at, value)
