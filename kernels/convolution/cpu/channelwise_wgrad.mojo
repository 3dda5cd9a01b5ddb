"""Weight gradient of depthwise convolution and of groups of a few channels: channelwise.mojo's vectors of channels.

Row sums are added to a [tap][channel] buffer of each worker; a second stage adds the workers' buffers in order.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..gather import PhaseAxis, Phase, forward_phases
from ..problem import ConvolutionProblem
from .channelwise import (
    FilteredRow,
    RowIndex,
    block_channels,
    row_of,
    source_line,
    spread,
)


@always_inline
def _load[
    dtype: DType, width: Int
](p: Ptr[dtype], offset: Int) -> SIMD[accumulation_type[dtype], width]:
    return (
        p.unsafe_offset(offset)
        .unsafe_load[width=width]()
        .cast[accumulation_type[dtype]]()
    )


@always_inline
def _row_products[
    dtype: DType, width: Int, group: Int, rows: Int, taps: Int
](
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    dy: Ptr[dtype],
    axis: PhaseAxis,
    first_tap: Int,
    c: Int,
    channels: Int,
):
    """Adds one row of dy times `rows` source rows to `taps` neighbouring taps of each.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime size = rows * taps * group
    var acc = Array[SIMD[acc_type, width], size](fill=0)
    var x = Array[Ptr[dtype], rows](fill=dy)
    comptime for row in range(rows):
        x[row] = lines[unsafe_offset=row].source.unsafe_offset(c)
    # Pixels for which all of these taps lie inside.
    var first = axis.offset(first_tap)
    var low = min(axis.rows, max(0, ceildiv(-first, axis.step)))
    var high = (
        axis.source - 1 - axis.offset(first_tap + taps - 1)
    ) // axis.step + 1
    high = max(low, min(axis.rows, high))
    var pitch = axis.offset_step * channels

    @always_inline
    def edge(q: Int) {mut acc, imm}:
        var d = _load[dtype, width](dy, q * channels + c)
        comptime for tap in range(taps):
            var column = q * axis.step + axis.offset(first_tap + tap)
            if column >= 0 and column < axis.source:
                comptime for row in range(rows):
                    var value = _load[dtype, width](x[row], column * channels)
                    comptime for j in range(group):
                        comptime i = (row * taps + tap) * group + j
                        acc[i] = spread[acc_type, width, group, j](value).fma(
                            d, acc[i]
                        )

    for q in range(low):
        edge(q)
    for q in range(low, high):
        var d = _load[dtype, width](dy, q * channels + c)
        var at = (q * axis.step + first) * channels
        comptime for row in range(rows):
            comptime for tap in range(taps):
                var value = _load[dtype, width](x[row], at + tap * pitch)
                comptime for j in range(group):
                    comptime i = (row * taps + tap) * group + j
                    acc[i] = spread[acc_type, width, group, j](value).fma(
                        d, acc[i]
                    )
    for q in range(high, axis.rows):
        edge(q)
    comptime for row in range(rows):
        var line = lines[unsafe_offset=row].filter.unsafe_offset(
            first_tap * group * channels + c
        )
        comptime for i in range(taps * group):
            var target = line.unsafe_offset(i * channels)
            target.unsafe_store(
                target.unsafe_load[width=width]() + acc[row * taps * group + i]
            )


@no_inline
def _wgrad_channels[
    dtype: DType, width: Int, group: Int
](
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    count: Int,
    dy: Ptr[dtype],
    axis: PhaseAxis,
    first: Int,
    last: Int,
    channels: Int,
):
    """Adds the products of one row of dy with every tap of `count` source rows, channels [first, last).
    """
    # As many source rows at once as leave the sums in registers.
    comptime rows = 3 if group == 1 else 1
    for c in range(first, last, width):
        var s = 0
        while s < axis.taps:
            var wide = axis.taps - s >= 3
            var line = 0
            while line < count:
                var at = lines.unsafe_offset(line)
                if wide and count - line >= rows:
                    _row_products[dtype, width, group, rows, 3](
                        at, dy, axis, s, c, channels
                    )
                    line += rows
                elif wide:
                    _row_products[dtype, width, group, 1, 3](
                        at, dy, axis, s, c, channels
                    )
                    line += 1
                else:
                    _row_products[dtype, width, group, 1, 1](
                        at, dy, axis, s, c, channels
                    )
                    line += 1
            s += 3 if wide else 1


@no_inline
def _wgrad_row[
    dtype: DType, group: Int
](
    sums: Ptr[accumulation_type[dtype]],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    lines: MutPointer[FilteredRow[dtype], MutUntrackedOrigin],
    phase: Phase,
    row: RowIndex,
    first_channel: Int,
    last_channel: Int,
    channels: Int,
):
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var count = 0
    for t in range(phase.d.taps):
        for r in range(phase.h.taps):
            var line = source_line(phase, row, t, r)
            if line >= 0:
                var tap = (t * phase.h.taps + r) * phase.w.taps
                lines[unsafe_offset=count] = FilteredRow[dtype](
                    x.unsafe_offset(line * phase.w.source * channels),
                    sums.unsafe_offset(tap * group * channels),
                )
                count += 1
    var dy_row = dy.unsafe_offset(
        ((row.n * phase.d.rows + row.o) * phase.h.rows + row.p)
        * phase.w.rows
        * channels
    )
    var first = first_channel
    comptime for size in [width, 4, 1]:
        comptime if group > 1 and size < width:
            break
        var last = first + (last_channel - first) // size * size
        _wgrad_channels[dtype, size, group](
            lines, count, dy_row, phase.w, first, last, channels
        )
        first = last


@no_inline
def channelwise_wgrad_cpu[
    dtype: DType, group: Int
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var phase = forward_phases(p)[0]
    var workers = worker_count()
    var size = p.taps() * group * p.c
    var partials = unsafe_alloc[Scalar[acc_type]](
        max(1, workers * size), alignment=64
    )
    var lines = unsafe_alloc[FilteredRow[dtype]](workers * p.t * p.r)
    var block = block_channels[dtype](p, p.w)

    @always_inline
    def task(worker: Int) {imm}:
        var sums = partials.unsafe_offset(worker * size)
        var mine = lines.unsafe_offset(worker * p.t * p.r)
        unsafe_memset_zero(sums, size)
        var rows = p.n * p.o * p.p
        var start = rows * worker // workers
        var stop = rows * (worker + 1) // workers
        while start < stop:
            # The rows of one plane, for one block of channels after the other.
            var end = min(stop, (start // p.p + 1) * p.p)
            for c in range(0, p.c, block):
                for index in range(start, end):
                    _wgrad_row[dtype, group](
                        sums,
                        x,
                        dy,
                        mine,
                        phase,
                        row_of(index, phase),
                        c,
                        min(p.c, c + block),
                        p.c,
                    )
            start = end

    sync_parallelize(task, workers)
    var taps = p.taps()
    for c in range(p.c):
        for i in range(taps * group):
            var tap = i // group
            var at = tap * p.tap_pitch() + i % group * p.channel_pitch()
            var total = Scalar[acc_type](0)
            for worker in range(workers):
                total += partials[unsafe_offset=worker * size + i * p.c + c]
            dw[unsafe_offset=c * taps * group + at] = total.cast[dtype]()
    lines.unsafe_free()
    partials.unsafe_free()
