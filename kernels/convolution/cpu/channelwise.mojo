"""Depthwise convolution and groups of a few channels: direct kernels, vectorised over channels.

With `group` channels in and out of each group a vector of channels holds whole groups; member j of every group is
spread over its group's lanes by a shuffle, so each product is one multiply-add whatever the group's size.
Forward pass and data gradient share one kernel: both read source pixels through the taps of a phase.

convolution_by_kernel.json has times beside oneDNN's for drawn problems.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of
from std.utils.index import IndexList

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..passes import FPROP
from ..problem import ConvolutionProblem
from ..gather import PhaseAxis, Phase, forward_phases, full_tap, gradient_phases

# Pixels of one register tile.
comptime TILE = 8
# Vectors of channels of a pixel whose taps partly lie outside.
comptime EDGE_VECTORS = 4
# Bytes of source rows that stay in the L2 cache from one row of pixels to the next.
comptime ROWS_BYTES = 512 * 1024


def _members[width: Int, group: Int, member: Int]() -> IndexList[width]:
    var lanes = IndexList[width]()
    for i in range(width):
        lanes[i] = i // group * group + member
    return lanes


@always_inline
def spread[
    dtype: DType, width: Int, group: Int, member: Int
](v: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Gives each lane the value of its group's lane number `member`."""
    comptime if group == 1:
        return v
    else:
        comptime lanes = _members[width, group, member]()
        return v.shuffle[lanes]()


@fieldwise_init
struct RowIndex(ImplicitlyCopyable, TrivialRegisterPassable):
    """The position of one row of pixels: its image and its indices on the two outer axes.
    """

    var n: Int
    var o: Int
    var p: Int


@always_inline
def row_of(index: Int, phase: Phase) -> RowIndex:
    var outer = index // phase.h.rows
    return RowIndex(
        outer // phase.d.rows, outer % phase.d.rows, index % phase.h.rows
    )


@always_inline
def source_line(phase: Phase, row: RowIndex, t: Int, r: Int) -> Int:
    """Returns the index of the source row that taps t and r read, -1 in the padding.
    """
    var d = row.o * phase.d.step + phase.d.offset(t)
    var h = row.p * phase.h.step + phase.h.offset(r)
    if d < 0 or d >= phase.d.source or h < 0 or h >= phase.h.source:
        return -1
    return (row.n * phase.d.source + d) * phase.h.source + h


def block_channels[
    dtype: DType
](p: ConvolutionProblem, source_width: Int) -> Int:
    """Returns the number of channels that are taken together: the source rows of one row of pixels, and one more, stay
    in the L1 cache."""
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var bytes = (p.t * p.r + 1) * source_width * size_of[dtype]()
    return max(1, ROWS_BYTES // max(1, bytes * width)) * width


@always_inline
def _inside(axis: PhaseAxis) -> Tuple[Int, Int]:
    """Returns the range of an axis's rows whose taps all lie inside the source, an empty one where no row's do.
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
struct FilteredRow[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """One source row that a row of pixels reads, and the filter taps that read it.
    """

    var source: Ptr[Self.dtype]
    var filter: Ptr[accumulation_type[Self.dtype]]


@always_inline
def _pixels[
    dtype: DType, width: Int, group: Int, tile: Int
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    count: Int,
    axis: PhaseAxis,
    pixel: Int,
    c: Int,
    channels: Int,
):
    """Computes `tile` neighbouring pixels, whose taps all lie in the source, by `width` channels.
    """
    comptime acc_type = accumulation_type[dtype]
    var acc = Array[SIMD[acc_type, width], tile](fill=0)
    var pitch = axis.step * channels
    var first = pixel * axis.step + axis.first_offset
    for i in range(count):
        var line = lines[unsafe_offset=i]
        var f = line.filter.unsafe_offset(c)
        var base = line.source.unsafe_offset(first * channels + c)
        for _ in range(axis.taps):
            var filter = Array[SIMD[acc_type, width], group](fill=0)
            comptime for j in range(group):
                filter[j] = f.unsafe_offset(j * channels).unsafe_load[
                    width=width
                ]()
            comptime for i in range(tile):
                var value = (
                    base.unsafe_offset(i * pitch)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
                comptime for j in range(group):
                    acc[i] = spread[acc_type, width, group, j](value).fma(
                        filter[j], acc[i]
                    )
            base = base.unsafe_offset(axis.offset_step * channels)
            f = f.unsafe_offset(group * channels)
    var target = result.unsafe_offset(pixel * result_pitch + c)
    comptime for i in range(tile):
        target.unsafe_offset(i * result_pitch).unsafe_store(
            acc[i].cast[dtype]()
        )


@always_inline
def _neighbours[
    dtype: DType, width: Int, tile: Int, taps: Int, checked: Bool
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    count: Int,
    axis: PhaseAxis,
    pixel: Int,
    c: Int,
    channels: Int,
):
    """Computes pixels as `_pixels` does, for depthwise problems whose pixels and taps read neighbours: each value is
    loaded once for all taps. `checked` where some may lie outside the source.
    """
    comptime acc_type = accumulation_type[dtype]
    var acc = Array[SIMD[acc_type, width], tile](fill=0)
    # From left to right in the source, whichever way the taps go.
    var first = pixel + axis.first_offset
    var first_tap = 0
    var tap_pitch = channels
    if axis.offset_step < 0:
        first -= taps - 1
        first_tap = taps - 1
        tap_pitch = -channels
    for i in range(count):
        var line = lines[unsafe_offset=i]
        var f = line.filter.unsafe_offset(first_tap * channels + c)
        var base = line.source.unsafe_offset(first * channels + c)
        var values = Array[SIMD[acc_type, width], tile + taps - 1](fill=0)
        comptime for i in range(tile + taps - 1):
            if not checked or (first + i >= 0 and first + i < axis.source):
                values[i] = (
                    base.unsafe_offset(i * channels)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
        comptime for tap in range(taps):
            var filter = f.unsafe_offset(tap * tap_pitch).unsafe_load[
                width=width
            ]()
            comptime for i in range(tile):
                acc[i] = values[i + tap].fma(filter, acc[i])
    var target = result.unsafe_offset(pixel * result_pitch + c)
    comptime for i in range(tile):
        target.unsafe_offset(i * result_pitch).unsafe_store(
            acc[i].cast[dtype]()
        )


@always_inline
def _edge_pixel[
    dtype: DType, width: Int, group: Int, vectors: Int
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    count: Int,
    axis: PhaseAxis,
    pixel: Int,
    first_tap: Int,
    last_tap: Int,
    c: Int,
    channels: Int,
):
    """Computes one pixel by `vectors` vectors of channels, with taps [first_tap, last_tap) only.
    """
    comptime acc_type = accumulation_type[dtype]
    var acc = Array[SIMD[acc_type, width], vectors](fill=0)
    var column = pixel * axis.step + axis.offset(first_tap)
    for i in range(count):
        var line = lines[unsafe_offset=i]
        var f = line.filter.unsafe_offset(first_tap * group * channels + c)
        var base = line.source.unsafe_offset(column * channels + c)
        for _ in range(first_tap, last_tap):
            comptime for v in range(vectors):
                var value = (
                    base.unsafe_offset(v * width)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
                comptime for j in range(group):
                    acc[v] = spread[acc_type, width, group, j](value).fma(
                        f.unsafe_offset(j * channels + v * width).unsafe_load[
                            width=width
                        ](),
                        acc[v],
                    )
            base = base.unsafe_offset(axis.offset_step * channels)
            f = f.unsafe_offset(group * channels)
    var target = result.unsafe_offset(pixel * result_pitch + c)
    comptime for v in range(vectors):
        target.unsafe_offset(v * width).unsafe_store(acc[v].cast[dtype]())


@no_inline
def _channels[
    dtype: DType, width: Int, group: Int
](
    result: Ptr[dtype],
    result_pitch: Int,
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    count: Int,
    axis: PhaseAxis,
    first: Int,
    last: Int,
    channels: Int,
):
    """Computes one row of pixels, channels [first, last), at least `width`.

    Channels are the inner loop, so that memory is read and written from front to back. The last tile of pixels, and
    the last vector of channels, overlap the ones before: what is computed twice costs less than smaller tiles.
    """
    var low, high = _inside(axis)
    var neighbours = 0
    comptime if group == 1 and width > 4:
        if axis.step == 1 and abs(axis.offset_step) == 1:
            neighbours = axis.taps

    comptime for taps in [3, 5, 7, 9]:

        @always_inline
        def row_of_tiles[tile: Int]() {imm}:
            @always_inline
            def part[checked: Bool](pixel: Int) {imm}:
                for c in range(first, last, width):
                    _neighbours[dtype, width, tile, taps, checked](
                        result,
                        result_pitch,
                        lines,
                        count,
                        axis,
                        pixel,
                        min(c, last - width),
                        channels,
                    )

            for start in range(0, axis.rows, tile):
                var pixel = min(start, axis.rows - tile)
                if tile == TILE and pixel >= low and pixel + tile <= high:
                    part[tile < TILE](pixel)
                else:
                    part[True](pixel)

        if neighbours == taps and axis.rows >= TILE:
            row_of_tiles[TILE]()
            return
        if neighbours == taps and axis.rows >= TILE // 2:
            row_of_tiles[TILE // 2]()
            return

    @always_inline
    def inside[tile: Int](pixel: Int) {imm}:
        for c in range(first, last, width):
            _pixels[dtype, width, group, tile](
                result,
                result_pitch,
                lines,
                count,
                axis,
                pixel,
                min(c, last - width),
                channels,
            )

    @always_inline
    def edge(pixel: Int) {imm}:
        var first_tap = 0
        var last_tap = axis.taps
        var column = pixel * axis.step

        @always_inline
        def is_outside(tap: Int) {imm} -> Bool:
            var at = column + axis.offset(tap)
            return at < 0 or at >= axis.source

        while first_tap < last_tap and is_outside(first_tap):
            first_tap += 1
        while last_tap > first_tap and is_outside(last_tap - 1):
            last_tap -= 1
        var c = first
        while c + EDGE_VECTORS * width <= last:
            _edge_pixel[dtype, width, group, EDGE_VECTORS](
                result,
                result_pitch,
                lines,
                count,
                axis,
                pixel,
                first_tap,
                last_tap,
                c,
                channels,
            )
            c += EDGE_VECTORS * width
        while c < last:
            c = min(c, last - width)
            _edge_pixel[dtype, width, group, 1](
                result,
                result_pitch,
                lines,
                count,
                axis,
                pixel,
                first_tap,
                last_tap,
                c,
                channels,
            )
            c += width

    for pixel in range(low):
        edge(pixel)
    if high - low >= TILE:
        for pixel in range(low, high - TILE, TILE):
            inside[TILE](pixel)
        inside[TILE](high - TILE)
    elif high - low >= TILE // 2:
        inside[TILE // 2](low)
        inside[TILE // 2](high - TILE // 2)
    else:
        for pixel in range(low, high):
            edge(pixel)
    for pixel in range(high, axis.rows):
        edge(pixel)


@no_inline
def _result_row[
    dtype: DType, group: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    filter: Ptr[accumulation_type[dtype]],
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    phase: Phase,
    row: RowIndex,
    first_channel: Int,
    last_channel: Int,
    channels: Int,
):
    """Computes every pixel of one row of one phase, channels [first_channel, last_channel).
    """
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var count = 0
    for t in range(phase.d.taps):
        for r in range(phase.h.taps):
            var line = source_line(phase, row, t, r)
            if line >= 0:
                var tap = (t * phase.h.taps + r) * phase.w.taps
                lines[unsafe_offset=count] = FilteredRow[dtype](
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
    # Groups of several channels come in whole vectors only.
    comptime for size in [width, 4, 1]:
        comptime if group == 1 or size == width:
            if last_channel - first_channel >= size:
                _channels[dtype, size, group](
                    target,
                    pitch,
                    lines,
                    count,
                    phase.w,
                    first_channel,
                    last_channel,
                    channels,
                )
                return


@no_inline
def _pack_taps[
    dtype: DType, pass_: Int, group: Int
](
    packed: Ptr[accumulation_type[dtype]],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
):
    """Packs the phase's taps as [tap][member of the group][channel]."""
    var pitch = p.taps() * group
    var inner = p.channel_pitch()
    for tap in range(phase.taps()):
        var full = full_tap(p, phase, tap)
        for j in range(group):
            for c in range(p.c):
                var at: Int
                comptime if pass_ == FPROP:
                    at = c * pitch + full * p.tap_pitch() + j * inner
                else:
                    at = (
                        (c // group * group + j) * pitch
                        + full * p.tap_pitch()
                        + c % group * inner
                    )
                packed[unsafe_offset=(tap * group + j) * p.c + c] = w[
                    unsafe_offset=at
                ].cast[accumulation_type[dtype]]()


@no_inline
def channelwise_cpu[
    dtype: DType, pass_: Int, group: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
):
    """Computes the forward pass (source x, result y) or the data gradient (source dy, result dx).
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, group * p.c)
    var packed = unsafe_alloc[Scalar[acc_type]](
        max(1, p.taps() * group * p.c), alignment=64
    )
    for phase in phases:
        _pack_taps[dtype, pass_, group](
            packed.unsafe_offset(phase.filter_offset), w, p, phase
        )
    var workers = worker_count()
    var most_lines = p.t * p.r
    var lines = unsafe_alloc[FilteredRow[dtype]](workers * most_lines)
    # Rows of the result in memory order, whatever phase they belong to: neighbours share source rows.
    var every = phases.unsafe_ptr()
    var some = every[]
    var extent_d = some.d.out_extent
    var extent_h = some.h.out_extent
    var step_d = some.d.out_step
    var step_h = some.h.out_step
    var phases_h = min(step_h, extent_h)
    var phases_w = min(some.w.out_step, some.w.out_extent)
    var block = block_channels[dtype](p, some.w.source)

    @always_inline
    def task(worker: Int) {imm}:
        var mine = lines.unsafe_offset(worker * most_lines)
        var rows = p.n * extent_d * extent_h
        var start = rows * worker // workers
        var stop = rows * (worker + 1) // workers
        while start < stop:
            # The rows of one plane, for one block of channels after the other.
            var end = min(stop, (start // extent_h + 1) * extent_h)
            var d = start // extent_h % extent_d
            var n = start // extent_h // extent_d
            for c in range(0, p.c, block):
                for index in range(start, end):
                    var h = index % extent_h
                    var first = (
                        (d % step_d) * phases_h + h % step_h
                    ) * phases_w
                    for i in range(first, first + phases_w):
                        var phase = every[unsafe_offset=i]
                        _result_row[dtype, group](
                            result,
                            source,
                            packed.unsafe_offset(phase.filter_offset),
                            mine,
                            phase,
                            RowIndex(n, d // step_d, h // step_h),
                            c,
                            min(p.c, c + block),
                            p.c,
                        )
            start = end

    sync_parallelize(task, workers)
    _ = phases^
    lines.unsafe_free()
    packed.unsafe_free()
