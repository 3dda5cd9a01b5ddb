"""Depthwise convolution and groups of a few channels: direct kernels, vectorised over channels.

With `group` channels in and out of each group a vector of channels holds whole groups; member j of every group is
spread over its group's lanes by a shuffle, so each product is one multiply-add whatever the group's size.
Forward pass and data gradient share one kernel: both read source pixels through the taps of a phase.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of
from std.utils.index import IndexList

from ...parallel import sync_parallelize
from ..common import FPROP, Ptr, accumulation_type, worker_count
from ..problem import ConvolutionProblem
from ..gather import Axis, Phase, forward_phases, full_tap, gradient_phases

# Pixels of one register tile.
comptime TILE = 8
# Bytes of source rows that stay in the L1 cache from one row of pixels to the next.
comptime ROWS_BYTES = 96 * 1024


def _members[width: Int, group: Int, member: Int]() -> IndexList[width]:
    var lanes = IndexList[width]()
    for i in range(width):
        lanes[i] = i // group * group + member
    return lanes


@always_inline
def spread[
    dtype: DType, width: Int, group: Int, member: Int
](v: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Each lane gets the value of its group's lane number `member`."""
    comptime if group == 1:
        return v
    else:
        comptime lanes = _members[width, group, member]()
        return v.shuffle[lanes]()


@fieldwise_init
struct Row(ImplicitlyCopyable, TrivialRegisterPassable):
    """Where one row of pixels stands: its image and its indices on the two outer axes.
    """

    var n: Int
    var o: Int
    var p: Int


@always_inline
def row_of(index: Int, phase: Phase) -> Row:
    var outer = index // phase.h.rows
    return Row(
        outer // phase.d.rows, outer % phase.d.rows, index % phase.h.rows
    )


@always_inline
def source_line(phase: Phase, row: Row, t: Int, r: Int) -> Int:
    """Index of the source row that taps t and r read, -1 in the padding."""
    var d = row.o * phase.d.step + phase.d.offset(t)
    var h = row.p * phase.h.step + phase.h.offset(r)
    if d < 0 or d >= phase.d.source or h < 0 or h >= phase.h.source:
        return -1
    return (row.n * phase.d.source + d) * phase.h.source + h


def block_channels[
    dtype: DType
](g: ConvolutionProblem, source_width: Int) -> Int:
    """Channels that are taken together: the source rows of one row of pixels, and one more, stay in the L1 cache.
    """
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var bytes = (g.t * g.r + 1) * source_width * size_of[dtype]()
    return max(1, ROWS_BYTES // max(1, bytes * width)) * width


@always_inline
def _inside(axis: Axis) -> Tuple[Int, Int]:
    """The rows of an axis whose taps all lie inside the source, none of them where no row's do.
    """
    if axis.taps == 0:
        return (0, axis.rows)
    var one = axis.offset(0)
    var other = axis.offset(axis.taps - 1)
    # Padding may be longer than the row: the range never leaves it.
    var low = min(axis.rows, max(0, ceildiv(-min(one, other), axis.step)))
    var high = min(
        axis.rows, (axis.source - 1 - max(one, other)) // axis.step + 1
    )
    return (low, max(low, high))


@fieldwise_init
struct Line[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """One source row that a row of pixels reads, and the filter taps that read it.
    """

    var source: Ptr[Self.dtype]
    var filter: Ptr[accumulation_type[Self.dtype]]


@always_inline
def _pixels[
    dtype: DType, width: Int, group: Int, tile: Int, checked: Bool
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[Line[dtype], MutUntrackedOrigin],
    count: Int,
    zeros: Ptr[dtype],
    axis: Axis,
    pixel: Int,
    c: Int,
    channels: Int,
):
    """`tile` neighbouring pixels by `width` channels; `checked` where a tap may lie outside along W.
    """
    comptime acc_type = accumulation_type[dtype]
    var acc = Array[SIMD[acc_type, width], tile](fill=0)
    var pitch = axis.step * channels
    var first = pixel * axis.step + axis.first_offset
    for i in range(count):
        var line = lines[unsafe_offset=i]
        var f = line.filter.unsafe_offset(c)
        var column = first
        for _ in range(axis.taps):
            var filter = Array[SIMD[acc_type, width], group](fill=0)
            comptime for j in range(group):
                filter[j] = f.unsafe_offset(j * channels).unsafe_load[
                    width=width
                ]()
            var base = line.source.unsafe_offset(column * channels + c)
            comptime for i in range(tile):
                var p = base.unsafe_offset(i * pitch)
                comptime if checked:
                    var at = column + i * axis.step
                    if at < 0 or at >= axis.source:
                        p = zeros
                var value = p.unsafe_load[width=width]().cast[acc_type]()
                comptime for j in range(group):
                    acc[i] = spread[acc_type, width, group, j](value).fma(
                        filter[j], acc[i]
                    )
            column += axis.offset_step
            f = f.unsafe_offset(group * channels)
    var target = result.unsafe_offset(pixel * result_pitch + c)
    comptime for i in range(tile):
        target.unsafe_offset(i * result_pitch).unsafe_store(
            acc[i].cast[dtype]()
        )


@no_inline
def _channels[
    dtype: DType, width: Int, group: Int
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[Line[dtype], MutUntrackedOrigin],
    count: Int,
    zeros: Ptr[dtype],
    axis: Axis,
    first: Int,
    last: Int,
    channels: Int,
):
    """One row of pixels, channels [first, last) in steps of `width`."""
    var low, high = _inside(axis)

    @always_inline
    def part[tile: Int, checked: Bool](pixel: Int, c: Int) {imm}:
        _pixels[dtype, width, group, tile, checked](
            result,
            result_pitch,
            lines,
            count,
            zeros,
            axis,
            pixel,
            c,
            channels,
        )

    for c in range(first, last, width):
        var pixel = 0
        # Before, inside and behind the pixels whose taps all lie in the source: a check costs as much as the product.
        while pixel < low:
            if pixel + 4 <= low:
                part[4, True](pixel, c)
                pixel += 4
            else:
                part[1, True](pixel, c)
                pixel += 1
        while pixel < high:
            var left = high - pixel
            if left >= TILE:
                part[TILE, False](pixel, c)
                pixel += TILE
            elif left >= 4:
                part[4, False](pixel, c)
                pixel += 4
            elif left >= 2:
                part[2, False](pixel, c)
                pixel += 2
            else:
                part[1, False](pixel, c)
                pixel += 1
        while pixel < axis.rows:
            if pixel + 4 <= axis.rows:
                part[4, True](pixel, c)
                pixel += 4
            else:
                part[1, True](pixel, c)
                pixel += 1


@no_inline
def _result_row[
    dtype: DType, group: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    filter: Ptr[accumulation_type[dtype]],
    zeros: Ptr[dtype],
    lines: MutPointer[Line[dtype], MutUntrackedOrigin],
    phase: Phase,
    row: Row,
    first_channel: Int,
    last_channel: Int,
    channels: Int,
):
    """Every pixel of one row of one phase, channels [first_channel, last_channel).
    """
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var count = 0
    for t in range(phase.d.taps):
        for r in range(phase.h.taps):
            var line = source_line(phase, row, t, r)
            if line >= 0:
                var tap = (t * phase.h.taps + r) * phase.w.taps
                lines[unsafe_offset=count] = Line[dtype](
                    source.unsafe_offset(line * phase.w.source * channels),
                    filter.unsafe_offset(tap * group * channels),
                )
                count += 1
    var pixel = (
        (
            row.n * phase.d.out_extent
            + phase.d.out_first
            + row.o * phase.d.out_step
        )
        * phase.h.out_extent
        + phase.h.out_first
        + row.p * phase.h.out_step
    ) * phase.w.out_extent + phase.w.out_first
    var target = result.unsafe_offset(pixel * channels)
    var pitch = phase.w.out_step * channels
    var first = first_channel
    # Groups of several channels come in whole vectors only.
    comptime for size in [width, 4, 1]:
        comptime if group > 1 and size < width:
            break
        var last = first + (last_channel - first) // size * size
        _channels[dtype, size, group](
            target, pitch, lines, count, zeros, phase.w, first, last, channels
        )
        first = last


@no_inline
def _pack_taps[
    dtype: DType, pass_: Int, group: Int
](
    packed: Ptr[accumulation_type[dtype]],
    w: Ptr[dtype],
    g: ConvolutionProblem,
    phase: Phase,
):
    """The phase's taps as [tap][member of the group][channel]."""
    var pitch = g.taps() * group
    var inner = g.channel_pitch()
    for tap in range(phase.taps()):
        var full = full_tap(g, phase, tap)
        for j in range(group):
            for c in range(g.c):
                var at: Int
                comptime if pass_ == FPROP:
                    at = c * pitch + full * g.tap_pitch() + j * inner
                else:
                    at = (
                        (c // group * group + j) * pitch
                        + full * g.tap_pitch()
                        + c % group * inner
                    )
                packed[unsafe_offset=(tap * group + j) * g.c + c] = w[
                    unsafe_offset=at
                ].cast[accumulation_type[dtype]]()


@no_inline
def channelwise_cpu[
    dtype: DType, pass_: Int, group: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    g: ConvolutionProblem,
):
    """The forward pass (source x, result y) or the data gradient (source dy, result dx).
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(g)
    else:
        phases = gradient_phases(g, group * g.c)
    var packed = unsafe_alloc[Scalar[acc_type]](
        max(1, g.taps() * group * g.c), alignment=64
    )
    for phase in phases:
        _pack_taps[dtype, pass_, group](
            packed.unsafe_offset(phase.filter_offset), w, g, phase
        )
    var zeros = unsafe_alloc[Scalar[dtype]](width, alignment=64)
    unsafe_memset_zero(zeros, width)
    var workers = worker_count()
    var most_lines = g.t * g.r
    var lines = unsafe_alloc[Line[dtype]](workers * most_lines)
    # Rows of the result in memory order, whatever phase they belong to: neighbours share source rows.
    var extent_d = phases[0].d.out_extent
    var extent_h = phases[0].h.out_extent
    var step_d = phases[0].d.out_step
    var step_h = phases[0].h.out_step
    var phases_h = min(step_h, extent_h)
    var phases_w = min(phases[0].w.out_step, phases[0].w.out_extent)
    var block = block_channels[dtype](g, phases[0].w.source)

    @always_inline
    def task(worker: Int) {imm}:
        var mine = lines.unsafe_offset(worker * most_lines)
        var rows = g.n * extent_d * extent_h
        var start = rows * worker // workers
        var stop = rows * (worker + 1) // workers
        while start < stop:
            # The rows of one plane, for one block of channels after the other.
            var end = min(stop, (start // extent_h + 1) * extent_h)
            var d = start // extent_h % extent_d
            var n = start // extent_h // extent_d
            for c in range(0, g.c, block):
                for index in range(start, end):
                    var h = index % extent_h
                    var first = (
                        (d % step_d) * phases_h + h % step_h
                    ) * phases_w
                    for i in range(first, first + phases_w):
                        _result_row[dtype, group](
                            result,
                            source,
                            packed.unsafe_offset(phases[i].filter_offset),
                            zeros,
                            mine,
                            phases[i],
                            Row(n, d // step_d, h // step_h),
                            c,
                            min(g.c, c + block),
                            g.c,
                        )
            start = end

    sync_parallelize(task, workers)
    lines.unsafe_free()
    zeros.unsafe_free()
    packed.unsafe_free()


def channelwise_can_implement[
    dtype: DType, group: Int
](g: ConvolutionProblem) -> Optional[String]:
    """None, or why these kernels do not take the problem."""
    if g.c != g.k or g.groups * group != g.c:
        return String(
            t"C = {g.c} and K = {g.k} are not {group} in each of"
            t" {g.groups} groups"
        )
    comptime width = simd_width_of[accumulation_type[dtype]]()
    comptime if group > 1:
        if g.c % width != 0:
            return String(t"C = {g.c} is not a multiple of {width}")
    var bytes = (
        worker_count() * g.w_size() * size_of[accumulation_type[dtype]]()
    )
    if bytes > g.workspace_limit:
        return String(
            t"partial sums take {bytes} bytes, the workspace limit is"
            t" {g.workspace_limit}"
        )
    return None
