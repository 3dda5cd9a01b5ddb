"""Packs filters into panels: [group][panel][tap][channel][columns of the panel], zero beyond the last column.

A filter lies in memory as [K][tap][C/G] or, with `taps_inside`, as [K][C/G][tap].
"""

from ...common.amx import TILE_STEPS
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr
from ...common.vectors import transpose
from ..problem import ConvolutionProblem
from ..gather import Phase, full_tap
from .microkernel import has_pairs, packed_length, packed_type


@no_inline
def pair_rows[
    dtype: DType
](rows: Ptr[packed_type[dtype]], count: Int, columns: Int):
    """Joins two rows of `columns` values, one after the other, to one row of pairs, in place; zeros go beside an odd
    last row, and behind it up to the packed length.

    Without pairs nothing happens.
    """
    comptime if has_pairs[dtype]:
        comptime for size in [8, 16, 32, 48, 64]:
            if columns == size:
                _pair_rows[dtype, size](rebind[Ptr[dtype]](rows), count)


@always_inline
def _pair_rows[dtype: DType, columns: Int](rows: Ptr[dtype], count: Int):
    comptime width = min(columns, 16)
    comptime vectors = columns // width
    for row in range(0, packed_length[dtype](count), 2):
        var target = rows.unsafe_offset(row * columns)
        var first = Array[SIMD[dtype, width], vectors](fill=0)
        var second = Array[SIMD[dtype, width], vectors](fill=0)
        if row < count:
            comptime for v in range(vectors):
                first[v] = target.unsafe_offset(v * width).unsafe_load[
                    width=width
                ]()
        if row + 1 < count:
            comptime for v in range(vectors):
                second[v] = target.unsafe_offset(
                    columns + v * width
                ).unsafe_load[width=width]()
        comptime for v in range(vectors):
            target.unsafe_offset(2 * v * width).unsafe_store(
                first[v].interleave(second[v])
            )


@always_inline
def turn_rows[dtype: DType](rows: Ptr[packed_type[dtype]], count: Int):
    """Turns `count` packed steps of 16 columns, a whole number of tile registers, from [step / 2][column][2] into
    [column][step]: the order of the first operand's tiles."""
    comptime side = TILE_STEPS // 2
    var pairs = rows.unsafe_bitcast[UInt32]()
    for first in range(0, count // 2, side):
        var at = pairs.unsafe_offset(first * side)
        var block = Array[SIMD[DType.uint32, side], side](fill=0)
        comptime for i in range(side):
            block[i] = at.unsafe_offset(i * side).unsafe_load[width=side]()
        transpose[DType.uint32, side](block)
        comptime for i in range(side):
            at.unsafe_offset(i * side).unsafe_store(block[i])


@no_inline
def pack_forward[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    tap: Int,
):
    """Packs one tap of one panel: packed[c][column] = w[k][tap][c], columns being output channels.
    """
    var cg = p.group_c()
    var kg = p.group_k()
    var pitch = p.taps() * cg
    var columns = vectors * width
    var source = w.unsafe_offset(
        (group * kg + first_vector * width) * pitch
        + full_tap(p, phase, tap) * cg
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
        # What whole blocks have left: the last channels, and every channel of a vector that ends beyond the last
        # column.
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
    p: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    tap: Int,
):
    """Packs one tap of one panel: packed[k][column] = w[k][tap][c], columns being input channels.
    """
    var cg = p.group_c()
    var kg = p.group_k()
    var pitch = p.taps() * cg
    var columns = vectors * width
    var source = w.unsafe_offset(
        group * kg * pitch + full_tap(p, phase, tap) * cg + first_vector * width
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


@no_inline
def pack_forward_taps_inside[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    group: Int,
    first_vector: Int,
    vectors: Int,
    first_channel: Int,
    last_channel: Int,
):
    """Packs some channels of a whole panel: packed[tap][c][column] = w[k][c][tap], columns being output channels.
    """
    var kg = p.group_k()
    var taps = p.taps()
    var pitch = taps * p.group_c()
    var columns = vectors * width
    var tap_size = packed_length[dtype](p.group_c()) * columns
    var source = w.unsafe_offset((group * kg + first_vector * width) * pitch)
    var full = max(0, min(vectors, (kg - first_vector * width) // width))
    var j = first_channel * taps
    var last = last_channel * taps
    var places = Array[Int, width](fill=0)
    while j + width <= last:
        var c = j // taps
        var tap = j % taps
        comptime for i in range(width):
            places[i] = tap * tap_size + c * columns
            tap += 1
            if tap == taps:
                tap = 0
                c += 1
        for v in range(full):
            var block = Array[SIMD[acc_type, width], width](fill=0)
            var base = source.unsafe_offset(v * width * pitch + j)
            comptime for i in range(width):
                block[i] = (
                    base.unsafe_offset(i * pitch)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
            transpose[acc_type, width](block)
            comptime for i in range(width):
                packed.unsafe_offset(places[i] + v * width).unsafe_store(
                    block[i]
                )
        j += width
    for v in range(vectors):
        var left = min(width, kg - (first_vector + v) * width)
        # What whole blocks have left: the last values, and every value of a vector that ends beyond the last column.
        for rest in range(j if v < full else first_channel * taps, last):
            var target = packed.unsafe_offset(
                rest % taps * tap_size + rest // taps * columns + v * width
            )
            for i in range(width):
                var value = Scalar[acc_type](0)
                if i < left:
                    value = source[
                        unsafe_offset=(v * width + i) * pitch + rest
                    ].cast[acc_type]()
                target[unsafe_offset=i] = value


@no_inline
def pack_gradient_taps_inside[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    first_k: Int,
    last_k: Int,
):
    """Packs some output channels of a whole panel: packed[tap][k][column] = w[k][c][tap], columns being input channels.
    """
    # A few filters' part of the panel stays in the L1 cache from tap to tap.
    comptime FILTERS = 8
    var kg = p.group_k()
    var taps = p.taps()
    var pitch = taps * p.group_c()
    var columns = vectors * width
    var lanes = min(columns, p.group_c() - first_vector * width)
    var source = w.unsafe_offset(
        group * kg * pitch + first_vector * width * taps
    )
    for start in range(first_k, last_k, FILTERS):
        for tap in range(phase.taps()):
            var base = source.unsafe_offset(full_tap(p, phase, tap))
            for k in range(start, min(start + FILTERS, last_k)):
                var target = packed.unsafe_offset(
                    (tap * packed_length[dtype](kg) + k) * columns
                )
                var values = base.unsafe_offset(k * pitch)
                for i in range(lanes):
                    target[unsafe_offset=i] = values[
                        unsafe_offset=i * taps
                    ].cast[acc_type]()
                for i in range(lanes, columns):
                    target[unsafe_offset=i] = 0


@always_inline
def write_filter[
    dtype: DType, acc_type: DType
](
    target: Ptr[dtype],
    source: Ptr[acc_type],
    taps: Int,
    channels: Int,
    source_pitch: Int,
    target_channels: Int,
    taps_inside: Bool,
):
    """Writes some channels of one output channel's filter, from source[tap][source_pitch]; `target` is the first
    channel's."""
    if taps_inside:
        for c in range(channels):
            for tap in range(taps):
                target[unsafe_offset=c * taps + tap] = source[
                    unsafe_offset=tap * source_pitch + c
                ].cast[dtype]()
    else:
        for tap in range(taps):
            for c in range(channels):
                target[unsafe_offset=tap * target_channels + c] = source[
                    unsafe_offset=tap * source_pitch + c
                ].cast[dtype]()


@no_inline
def swap_filter[
    dtype: DType
](target: Ptr[dtype], source: Ptr[dtype], count: Int, rows: Int, columns: Int):
    """Transposes each of `count` matrices of `rows` by `columns`."""
    var workers = worker_count()

    @always_inline
    def task(worker: Int) {imm}:
        for k in range(
            count * worker // workers, count * (worker + 1) // workers
        ):
            write_filter[dtype, dtype](
                target.unsafe_offset(k * rows * columns),
                source.unsafe_offset(k * rows * columns),
                rows,
                columns,
                columns,
                columns,
                True,
            )

    sync_parallelize(task, workers)
