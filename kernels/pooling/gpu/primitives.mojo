"""Single instructions of NVIDIA's GPUs that the compiler does not choose by itself, with a form for other GPUs beside
each: tests of argmaxes, masked additions, prefetching."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import is_nvidia_gpu


from ...common.pointer import Ptr


@always_inline
def widen[
    dtype: DType, width: Int, //, first: Int, V: Int
](raw: SIMD[dtype, width]) -> SIMD[DType.float32, V]:
    """Elements first, ... in float32. A bfloat16 is the upper half of its float32: one instruction each.
    """
    comptime if dtype == DType.bfloat16 and width % 2 == 0:
        var words = bitcast[DType.uint32, width // 2](raw)
        var wide = SIMD[DType.float32, V](0)
        comptime for v in range(V):
            comptime word = (first + v) // 2
            comptime if (first + v) % 2 == 0:
                wide[v] = bitcast[DType.float32](words[word] << 16)
            else:
                wide[v] = bitcast[DType.float32](words[word] & 0xFFFF0000)
        return wide
    else:
        return raw.slice[V, offset=first]().cast[DType.float32]()


@always_inline
def fetch[dtype: DType](data: Ptr[dtype]):
    """Prefetches the element at a pointer to a GPU's second-level cache; the pointer must lie in a tensor.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly["prefetch.global.L2 [$0];", NoneType, constraints="l"](
            Int64(Int(data))
        )


@always_inline
def fits_word[
    index: DType, V: Int
](found: SIMD[index, V], inside: Bool) -> SIMD[DType.bool, V]:
    """Returns whether a window exists and its argmax has no bits above its low word.
    """
    var there = SIMD[DType.bool, V](fill=inside)
    comptime if index == DType.int64:
        return there & (found >> 32).eq(SIMD[index, V](0))
    else:
        return there


@always_inline
def narrow[
    index: DType, V: Int, //
](found: SIMD[index, V]) -> SIMD[DType.int32, V]:
    """Narrows indices to 32 bits; one that does not fit becomes -1, which names no pixel.
    """
    comptime if index == DType.int64:
        var low = found.cast[DType.int32]()
        return low.cast[index]().eq(found).select(low, SIMD[DType.int32, V](-1))
    else:
        return found.cast[DType.int32]()


comptime NOWHERE = UInt32(0xFFFFFFFF)
"""A place that no pixel has."""


@always_inline
def where_below(
    place: UInt32,
    a: UInt32,
    most_a: UInt32,
    b: UInt32,
    most_b: UInt32,
    c: UInt32,
    most_c: UInt32,
) -> UInt32:
    """The place where each number is less than its bound, else NOWHERE: a comparison each and one selection, where the
    compiler would select after each comparison."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            (
                "{.reg .pred fits; setp.lt.u32 fits, $2, $3;"
                " setp.lt.and.u32 fits, $4, $5, fits;"
                " setp.lt.and.u32 fits, $6, $7, fits;"
                " selp.b32 $0, $1, 0xFFFFFFFF, fits;}"
            ),
            UInt32,
            constraints="=r,r,r,r,r,r,r,r",
            has_side_effect=False,
        ](place, a, most_a, b, most_b, c, most_c)
    else:
        return place if (a < most_a) & (b < most_b) & (c < most_c) else NOWHERE


@always_inline
def one_bit(one: Int32, tap: Int32) -> Int32:
    """Returns the bits that add_tap tests: the bit of `one`, moved to the tap's place, so that one instruction serves
    seven taps where a comparison serves one; no bits where `one` is 0. LLVM would turn a shift and a test of one bit
    back into a comparison. Elsewhere than on NVIDIA's GPUs it returns the tap itself.
    """
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "shl.b32 $0, $1, $2;",
            Int32,
            constraints="=r,r,r",
            has_side_effect=False,
        ](one, tap)
    else:
        return tap if one != 0 else Int32(-1)


@always_inline
def twice(bits: Int32) -> Int32:
    """Bits moved by one, by a unit of the GPU that tests and shifts leave idle.
    """
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "mul.lo.s32 $0, $1, 2;",
            Int32,
            constraints="=r,r",
            has_side_effect=False,
        ](bits)
    else:
        return bits


@always_inline
def add_tap[tap: Int](sum: Float32, bits: Int32, g: Float32) -> Float32:
    """Adds g where one_bit names the tap."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            (
                "{.reg .pred hit; .reg .b32 bit; and.b32 bit, $1, $2;"
                " setp.ne.b32 hit, bit, 0; @hit add.f32 $0, $0, $3;}"
            ),
            Float32,
            constraints="=f,r,n,f,0",
            has_side_effect=False,
        ](bits, Int32(1 << tap), g, sum)
    else:
        return sum + g if bits == Int32(tap) else sum


@always_inline
def set_tap[tap: Int](bits: Int32, g: Float32) -> Float32:
    """g where one_bit names the tap, else nothing."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            (
                "{.reg .pred hit; .reg .b32 bit; and.b32 bit, $1, $2;"
                " setp.ne.b32 hit, bit, 0; selp.f32 $0, $3, 0f00000000, hit;}"
            ),
            Float32,
            constraints="=f,r,n,f",
            has_side_effect=False,
        ](bits, Int32(1 << tap), g)
    else:
        return g if bits == Int32(tap) else Float32(0)


@always_inline
def add_if(sum: Float32, given: Float32, there: Int32) -> Float32:
    """Adds `given` to `sum` where `there` is not 0."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            (
                "{.reg .pred hit; setp.ne.s32 hit, $2, 0;"
                " @hit add.f32 $0, $0, $1;}"
            ),
            Float32,
            constraints="=f,f,r,0",
            has_side_effect=False,
        ](given, there, sum)
    else:
        return sum + given if there != 0 else sum
