"""Packs filters into panels: [group][panel][tap][channel][columns of the panel], zero beyond the last column."""

from ..common import Ptr
from ..problem import ConvolutionProblem
from ..gather import Phase, full_tap


@always_inline
def transpose[
    dtype: DType, size: Int
](mut rows: Array[SIMD[dtype, size], size]):
    """In place; `size` is a power of two. Each round interleaves row i with row i + size / 2.
    """
    comptime half = size // 2

    @always_inline
    def round() {mut rows}:
        var mixed = Array[SIMD[dtype, size], size](fill=0)
        comptime for i in range(half):
            var both = rows[i].interleave(rows[i + half])
            mixed[2 * i] = both.slice[size, offset=0]()
            mixed[2 * i + 1] = both.slice[size, offset=size]()
        rows = mixed^

    comptime if size >= 2:
        round()
    comptime if size >= 4:
        round()
    comptime if size >= 8:
        round()
    comptime if size >= 16:
        round()
    comptime assert size <= 16, "transpose: at most 16 rows"


@no_inline
def pack_forward[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    w: Ptr[dtype],
    g: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    tap: Int,
):
    """One tap of one panel: packed[c][column] = w[k][tap][c], columns being output channels.
    """
    var cg = g.group_c()
    var kg = g.group_k()
    var pitch = g.taps() * cg
    var columns = vectors * width
    var source = w.unsafe_offset(
        (group * kg + first_vector * width) * pitch
        + full_tap(g, phase, tap) * cg
    )
    var full = min(vectors, (kg - first_vector * width) // width)
    var c = 0
    # Channels outside, so that the panel is written from front to back.
    while c + width <= cg:
        for v in range(full):
            var block = Array[SIMD[acc_type, width], width](fill=0)
            var base = source.unsafe_offset(v * width * pitch + c)
            comptime for i in range(width):
                block[i] = (
                    base.unsafe_offset(i * pitch)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
            transpose[acc_type, width](block)
            comptime for i in range(width):
                packed.unsafe_offset(
                    (c + i) * columns + v * width
                ).unsafe_store(block[i])
        c += width
    for v in range(vectors):
        var left = min(width, kg - (first_vector + v) * width)
        # What whole blocks have left: the last channels, and every channel of a vector that ends beyond the last column.
        for rest in range(c if v < full else 0, cg):
            for i in range(width):
                var value = Scalar[acc_type](0)
                if i < left:
                    value = source[
                        unsafe_offset=(v * width + i) * pitch + rest
                    ].cast[acc_type]()
                packed[unsafe_offset=rest * columns + v * width + i] = value


@no_inline
def pack_gradient[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    w: Ptr[dtype],
    g: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    tap: Int,
):
    """One tap of one panel: packed[k][column] = w[k][tap][c], columns being input channels.
    """
    var cg = g.group_c()
    var kg = g.group_k()
    var pitch = g.taps() * cg
    var columns = vectors * width
    var source = w.unsafe_offset(
        group * kg * pitch + full_tap(g, phase, tap) * cg + first_vector * width
    )
    var left = cg - first_vector * width
    for k in range(kg):
        var base = source.unsafe_offset(k * pitch)
        var target = packed.unsafe_offset(k * columns)
        for v in range(vectors):
            if left >= (v + 1) * width:
                target.unsafe_offset(v * width).unsafe_store(
                    base.unsafe_offset(v * width)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
            else:
                for i in range(width):
                    var value = Scalar[acc_type](0)
                    if v * width + i < left:
                        value = base[unsafe_offset=v * width + i].cast[
                            acc_type
                        ]()
                    target[unsafe_offset=v * width + i] = value
