"""Gradient of max pooling on the CPU over channels-last tensors, for windows that lie side by side.

Each window is read once, and all pixels under it are written: dy where the entry names the pixel, zero elsewhere.
"""

from std.sys import size_of

from .vectors import (
    LONG_RUN,
    ClearedAhead,
    ask_ahead,
    clear_run,
    for_each_share,
    lanes,
    narrowed,
    smallest_share,
)
from ..problem import Data, PoolingAxis, PoolingProblem

comptime MOST_TAPS = 8
"""Taps of a window, at most: of more, most pixels are zeros, which clearing writes faster."""
comptime PIECE_BYTES = 2 * LONG_RUN
"""Bytes of a row of dx that are cleared shortly before they are written."""


def disjoint_can_implement[
    dtype: DType, *, offsets: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why this kernel does not take the problem, or others take it faster.
    """
    comptime V = lanes[dtype]

    @always_inline
    def beside(axis: PoolingAxis) -> Bool:
        return (
            axis.window == axis.stride
            and axis.padding == 0
            and (axis.dilation == 1 or axis.window == 1)
        )

    var channels = Int(p.channels)
    # Of a last vector most may be computed twice; indices are read twice, too.
    var most = channels % V == 0
    comptime if offsets:
        most = most or channels >= V
    else:
        most = most or channels >= 4 * V
    if not most:
        return String("channels fill no vectors")
    if not (beside(p.d) and beside(p.h) and beside(p.w)):
        return String("windows do not lie side by side")
    if p.window_size() > MOST_TAPS:
        return String("most pixels of long windows are zeros")
    if p.input_plane() >= Int(Int32.MAX):
        return String("places do not fit 32 bits")
    return None


struct Rows:
    """The rows of pixels under one row of windows: where they begin in dx, and which entry names the first pixel of a
    window (by index, of the row's first window). On the stack: lists of two cores may come to share a line.
    """

    var count: Int
    var start: Array[Int, MOST_TAPS]
    var wanted: Array[Int, MOST_TAPS]

    @always_inline
    def __init__(out self):
        self.count = 0
        self.start = Array[Int, MOST_TAPS](fill=0)
        self.wanted = Array[Int, MOST_TAPS](fill=0)

    @always_inline
    def clear(mut self):
        self.count = 0

    @always_inline
    def append(mut self, start: Int, wanted: Int):
        self.start[self.count] = start
        self.wanted[self.count] = wanted
        self.count += 1


@always_inline
def _spread_window[
    dtype: DType, index: DType, //, W: Int, *, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    entries: Data[index],
    rows: Rows,
    p: PoolingProblem,
    ow: Int,
    c: Int,
):
    """Channels c, ..., c + W - 1 of window `ow`."""
    comptime Key = index if offsets else DType.int32
    var channels = Int(p.channels)
    var o = ow * channels + c
    var place = ow * Int(p.w.window)
    var taps = min(Int(p.w.window), Int(p.w.input) - place)
    ask_ahead[W](entries, o)
    ask_ahead[W](dy, o)
    var found = entries.unsafe_load[width=W, alignment=1](o)
    var gradient = dy.unsafe_load[width=W, alignment=1](o)
    var key: SIMD[Key, W]
    comptime if offsets:
        key = rebind[SIMD[Key, W]](found)
    else:
        key = rebind[SIMD[Key, W]](narrowed(found) - Int32(place))
    var starts = rows.start.unsafe_ptr()
    var wanteds = rows.wanted.unsafe_ptr()
    for r in range(rows.count):
        var pixel = dx.unsafe_offset(
            starts[unsafe_offset=r] + place * channels + c
        )
        var wanted = wanteds[unsafe_offset=r]
        for k in range(taps):
            var name = SIMD[Key, W](Scalar[Key](wanted + k))
            pixel.unsafe_store[alignment=1](
                k * channels,
                key.eq(name).select(gradient, SIMD[dtype, W](0)),
            )


@always_inline
def _spread_row[
    dtype: DType, index: DType, //, *, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    entries: Data[index],
    rows: Rows,
    p: PoolingProblem,
):
    """A row of windows, and the columns that no window covers."""
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var width = Int(p.w.input)
    var window = Int(p.w.window)
    var count = Int(p.w.output)
    # The C library clears whole lines without reading them; a store reads first.
    var long = width * channels * size_of[dtype]() >= PIECE_BYTES
    var step = count
    if long:
        step = max(PIECE_BYTES // (window * channels * size_of[dtype]()), 1)
    for first in range(0, count, step):
        if long:
            for r in range(rows.count):
                clear_run(
                    dx.unsafe_offset(rows.start[r] + first * window * channels),
                    min(step * window, width - first * window) * channels,
                )
        var end = min(first + step, count)
        for ow in range(first, end):
            var c = 0
            while c + 4 * V <= channels:
                _spread_window[4 * V, offsets=offsets](
                    dx, dy, entries, rows, p, ow, c
                )
                c += 4 * V
            while c < channels:
                # The last one takes some of the vector before once more.
                _spread_window[V, offsets=offsets](
                    dx, dy, entries, rows, p, ow, min(c, channels - V)
                )
                c += V
    var covered = count * window
    if covered < width:
        for r in range(rows.count):
            clear_run(
                dx.unsafe_offset(rows.start[r] + covered * channels),
                (width - covered) * channels,
            )


@no_inline
def max_pool_dgrad_disjoint[
    dtype: DType, index: DType, *, offsets: Bool
](
    dx_all: Data[dtype],
    dy_all: Data[dtype],
    entries_all: Data[index],
    p: PoolingProblem,
):
    """For what `disjoint_can_implement` says."""
    var height = Int(p.h.input)
    var depth = Int(p.d.input)
    var length = Int(p.w.input) * Int(p.channels)
    var out_length = Int(p.w.output) * Int(p.channels)
    # Rows of windows, and the pixels after the last ones.
    var d_groups = Int(p.d.output)
    if d_groups * Int(p.d.window) < depth:
        d_groups += 1
    var h_groups = Int(p.h.output)
    if h_groups * Int(p.h.window) < height:
        h_groups += 1

    def share(first: Int, end: Int) {imm}:
        var rows = Rows()
        # Short rows are cleared together, if they are written in the order of the memory.
        var together = (
            p.d.window == 1 and length * size_of[dtype]() < PIECE_BYTES
        )
        var first_row = first // h_groups * height + first % h_groups * Int(
            p.h.window
        )
        var end_row = end // h_groups * height + end % h_groups * Int(
            p.h.window
        )
        var dx_share = dx_all.unsafe_offset(first_row * length)
        var cleared = ClearedAhead((end_row - first_row) * length, 0)
        for unit in range(first, end):
            var slab = unit // h_groups
            var oh = unit - slab * h_groups
            var n = slab // d_groups
            var od = slab - n * d_groups
            var d0 = od * Int(p.d.window)
            var h0 = oh * Int(p.h.window)
            var covered = od < Int(p.d.output) and oh < Int(p.h.output)
            var d1 = depth
            if od < Int(p.d.output):
                d1 = min(d0 + Int(p.d.window), depth)
            var h1 = height
            if oh < Int(p.h.output):
                h1 = min(h0 + Int(p.h.window), height)
            if together:
                cleared.reach(
                    dx_share,
                    ((n * depth + d0) * height + h1 - first_row) * length,
                )
            rows.clear()
            for d in range(d0, d1):
                for h in range(h0, h1):
                    var start = ((n * depth + d) * height + h) * length
                    if not covered:
                        clear_run(dx_all.unsafe_offset(start), length)
                        continue
                    comptime if offsets:
                        rows.append(
                            start,
                            ((d - d0) * Int(p.h.window) + h - h0)
                            * Int(p.w.window),
                        )
                    else:
                        rows.append(start, (d * height + h) * Int(p.w.input))
            if covered:
                var o = (
                    (n * Int(p.d.output) + od) * Int(p.h.output) + oh
                ) * out_length
                _spread_row[offsets=offsets](
                    dx_all,
                    dy_all.unsafe_offset(o),
                    entries_all.unsafe_offset(o),
                    rows,
                    p,
                )

    var units = Int(p.batch) * d_groups * h_groups
    for_each_share(share, units, smallest_share(p.input_size(), units))
