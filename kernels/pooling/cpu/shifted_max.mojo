"""Gradient of max pooling on the CPU over contiguous NCHW tensors: vectors of pixels gather what the windows above them send.

Where windows move by one pixel, neighbouring pixels lie under neighbouring windows. If the rows of windows are laid out
as far apart as rows of pixels, that holds for a whole band of rows as one run: tap k of a window lies over pixel i where
the entry of window i + shift(k) names it. So a vector of pixels takes one comparison and one masked addition for each
tap, and ends of rows cost nothing, where scattering adds one window after the other. The windows above a band are first
copied, with their entries narrowed and room on all sides, so that no vector looks at what does not exist. dx is written
once, and the additions always come in the same order.
"""

from std.math import iota
from std.sys import size_of

from .vectors import (
    ClearedAhead,
    apart,
    ask_ahead,
    ask_for,
    for_each_share,
    lanes,
    load_part,
    pointer_to,
    smallest_share,
    store_part,
)
from .axis_tables import AboveTable
from ..problem import Data, PoolingAxis, PoolingProblem, accumulator

comptime BAND_BYTES = 24 * 1024
"""What the copied windows take at most, if one row of dx needs no more: half of the nearest cache."""
comptime MOST_BYTES = 128 * 1024
"""What they may take for one row of dx."""
comptime TOGETHER = 4
"""Vectors of pixels that share what finding a tap's windows costs."""


def shifted_can_implement[
    dtype: DType, index: DType, *, offsets: Bool
](p: PoolingProblem) -> Bool:
    """Whether `max_pool_dgrad_planes` takes the problem and is the fastest: windows move by one, and have few taps for
    the vectors' width. Indices are eight times as long as offsets, so they gain less.
    """
    comptime V = lanes[dtype]
    var taps = p.window_size()
    var slab = Int(p.h.input) * Int(p.w.input)
    comptime if offsets:
        # One entry must be free to name nothing.
        if index != DType.uint8 or taps > min(V, Int(UInt8.MAX)):
            return False
        if slab < 12 * V:
            return False
    else:
        if index == DType.uint8:
            return False
        if taps > 9 * V // 16 or slab < 32 * V or p.d.most_above() > 1:
            return False

    @always_inline
    def moves_by_one(axis: PoolingAxis) -> Bool:
        # Rows of windows fit between the beginnings of rows of pixels.
        return axis.stride == 1 and axis.output <= axis.input

    return (
        p.channels == 1
        and moves_by_one(p.h)
        and moves_by_one(p.w)
        and p.input_plane() < Int(Int32.MAX)
        and Band[dtype, index].row_bytes(p) * Int(p.h.reach()) <= MOST_BYTES
    )


struct Band[dtype: DType, index: DType](Movable):
    """The windows above a band of dx, copied: entries in as few bits as comparing takes, gradients as they are added.
    A row of windows takes as many elements as a row of dx; in what is left, entries name nothing.
    """

    comptime Acc = accumulator[Self.dtype]
    comptime V = lanes[Self.dtype]
    comptime Key = DType.uint8 if Self.index == DType.uint8 else DType.int32
    comptime NOTHING = Scalar[Self.Key].MAX

    @staticmethod
    def row_bytes(p: PoolingProblem) -> Int:
        """What one row of windows takes, in all slabs above it."""
        return (
            p.d.most_above()
            * Int(p.w.input)
            * (size_of[Scalar[Self.Key]]() + size_of[Scalar[Self.Acc]]())
        )

    var keys: List[Scalar[Self.Key]]
    var gradients: List[Scalar[Self.Acc]]

    def __init__(out self, room: Int):
        self.keys = List[Scalar[Self.Key]](length=room, fill=Self.NOTHING)
        self.gradients = List[Scalar[Self.Acc]](length=room, fill=0)

    @always_inline
    def fill(
        mut self,
        place: Int,
        dy: Data[Self.dtype],
        entries: Data[Self.index],
        length: Int,
        first: Int,
        plane: Int,
    ):
        """Copies `length` windows to `place` and what follows; the rest of their last vector names nothing. An index
        becomes the number of its pixel counted from pixel `first`; one outside the plane names nothing.
        """
        var keys = pointer_to(self.keys).unsafe_offset(place)
        var gradients = pointer_to(self.gradients).unsafe_offset(place)

        @always_inline
        def block[whole: Bool](at: Int) {imm}:
            var found: SIMD[Self.index, Self.V]
            var gradient: SIMD[Self.dtype, Self.V]
            comptime if whole:
                found = entries.unsafe_load[width=Self.V, alignment=1](at)
                gradient = dy.unsafe_load[width=Self.V, alignment=1](at)
            else:
                found = load_part[Self.V](entries, at, length)
                gradient = load_part[Self.V](dy, at, length)
            ask_ahead[Self.V](entries, at)
            ask_ahead[Self.V](dy, at)
            var key: SIMD[Self.Key, Self.V]
            comptime if Self.index == DType.uint8:
                key = rebind[SIMD[Self.Key, Self.V]](found)
            else:
                var inside = found.cast[DType.uint64]().lt(
                    SIMD[DType.uint64, Self.V](UInt64(plane))
                )
                key = inside.select(
                    found.cast[Self.Key]() - Scalar[Self.Key](first),
                    SIMD[Self.Key, Self.V](Self.NOTHING),
                )
            comptime if not whole:
                var live = iota[DType.int32, Self.V]().lt(
                    SIMD[DType.int32, Self.V](Int32(length - at))
                )
                key = live.select(key, SIMD[Self.Key, Self.V](Self.NOTHING))
            keys.unsafe_store[alignment=1](at, key)
            gradients.unsafe_store[alignment=1](at, gradient.cast[Self.Acc]())

        var at = 0
        while at + Self.V <= length:
            block[True](at)
            at += Self.V
        if at < length:
            block[False](at)

    @always_inline
    def clear(mut self, place: Int, length: Int):
        """Windows that do not exist."""
        var keys = pointer_to(self.keys).unsafe_offset(place)
        var at = 0
        while at < length:
            store_part(keys, at, length, SIMD[Self.Key, Self.V](Self.NOTHING))
            at += Self.V


struct TapsAbove(Movable):
    """For each tap over a pixel: how far behind the pixel its window lies in the band, and the tap's number.
    """

    var shift: List[Int]
    var tap: List[Int]

    def __init__(out self):
        self.shift = List[Int](capacity=apart(0))
        self.tap = List[Int](capacity=apart(0))

    def clear(mut self):
        self.shift.clear()
        self.tap.clear()

    def append_slab(mut self, p: PoolingProblem, kd: Int, place: Int):
        """Adds the taps of slab kd of the windows; the slab's windows begin at `place`.
        """
        var width = Int(p.w.input)
        for kh in range(Int(p.h.window)):
            var row = (Int(p.h.window) - 1 - kh) * Int(p.h.dilation)
            for kw in range(Int(p.w.window)):
                self.shift.append(
                    place
                    + row * width
                    + (Int(p.w.window) - 1 - kw) * Int(p.w.dilation)
                )
                self.tap.append(
                    (kd * Int(p.h.window) + kh) * Int(p.w.window) + kw
                )


@always_inline
def _gather_run[
    dtype: DType, index: DType, //
](
    dx: Data[dtype],
    mut band: Band[dtype, index],
    taps: TapsAbove,
    length: Int,
    next_dy: Data[dtype],
    next_entries: Data[index],
):
    """`next_dy` and `next_entries` are what the next band reads, and is asked for meanwhile.
    """
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    comptime Key = Band[dtype, index].Key
    var keys = pointer_to(band.keys)
    var gradients = pointer_to(band.gradients)
    var count = len(taps.shift)
    var shift_of = taps.shift.unsafe_ptr()
    var tap_of = taps.tap.unsafe_ptr()

    @always_inline
    def block[vectors: Int, whole: Bool](at: Int) {imm}:
        var sums = Array[SIMD[Acc, V], vectors](fill=SIMD[Acc, V](0))
        var first = SIMD[DType.int32, V](Int32(at)) + iota[DType.int32, V]()
        ask_for[vectors * V](next_dy, at)
        ask_for[vectors * V](next_entries, at)
        for k in range(count):
            var window = at + shift_of[unsafe_offset=k]
            var tap = tap_of[unsafe_offset=k]
            comptime for v in range(vectors):
                var wanted: SIMD[Key, V]
                comptime if index == DType.uint8:
                    wanted = SIMD[Key, V](Scalar[Key](tap))
                else:
                    wanted = rebind[SIMD[Key, V]](first + Int32(v * V))
                var key = keys.unsafe_load[width=V, alignment=1](window + v * V)
                var gradient = gradients.unsafe_load[width=V, alignment=1](
                    window + v * V
                )
                sums[v] = key.eq(wanted).select(sums[v] + gradient, sums[v])
        comptime for v in range(vectors):
            comptime if whole:
                dx.unsafe_store[alignment=1](at + v * V, sums[v].cast[dtype]())
            else:
                store_part(dx, at + v * V, length, sums[v].cast[dtype]())

    var at = 0
    while at + TOGETHER * V <= length:
        block[TOGETHER, True](at)
        at += TOGETHER * V
    while at < length:
        block[1, False](at)
        at += V


@no_inline
def max_pool_dgrad_planes[
    dtype: DType, index: DType
](
    dx_all: Data[dtype],
    dy_all: Data[dtype],
    entries_all: Data[index],
    p: PoolingProblem,
):
    """For what `can_compare` says."""
    comptime V = lanes[dtype]
    var d_axis = AboveTable(p.d, adaptive=False)
    var slabs = p.d.most_above()
    var width = Int(p.w.input)
    var height = Int(p.h.input)
    var out_width = Int(p.w.output)
    # Rows of windows that are above a band's first row, or before its first column, only.
    var more_rows = Int(p.h.reach()) - 1
    var before = Int(p.w.reach()) - 1 - Int(p.w.padding)
    var fitting = BAND_BYTES // Band[dtype, index].row_bytes(p)
    var band_rows = min(max(fitting - more_rows, 1), height)
    # From one slab of windows to the next, with room for the taps of the last vectors.
    var pitch = (band_rows + more_rows) * width + Int(p.w.reach())

    def share(first: Int, end: Int) {imm}:
        var depth = Int(p.d.input)
        var band = Band[dtype, index](
            slabs * pitch + before + Int(p.w.padding) + (TOGETHER + 1) * V
        )
        var dx_share = dx_all.unsafe_offset(first * width)
        var cleared = ClearedAhead((end - first) * width, 0)
        var taps = TapsAbove()
        var ods = List[Int](capacity=apart(0))
        var unit = first
        while unit < end:
            var slab = unit // height
            var h0 = unit - slab * height
            var n = slab // depth
            var d = slab - n * depth
            var slab_end = min(slab * height + height, end)
            taps.clear()
            ods.clear()
            for od in range(d_axis.first[d], d_axis.end[d]):
                var distance = d + Int(p.d.padding) - od * Int(p.d.stride)
                if distance % Int(p.d.dilation) == 0:
                    taps.append_slab(
                        p, distance // Int(p.d.dilation), len(ods) * pitch
                    )
                    ods.append(od)
            while unit < slab_end:
                var rows = min(band_rows, slab_end - unit)
                # The rows of windows above the band, counted from the one that lies over its first row with the last tap.
                var top = h0 + Int(p.h.padding) - more_rows
                var oh0 = max(top, 0)
                var oh1 = min(top + rows + more_rows, Int(p.h.output))
                var read = 0
                for a in range(len(ods)):
                    var place = a * pitch
                    if oh0 > top:
                        band.clear(place + before, (oh0 - top) * width)
                    var row = (
                        (n * Int(p.d.output) + ods[a]) * Int(p.h.output) + oh0
                    ) * out_width
                    var runs = oh1 - oh0
                    var run = out_width
                    if out_width == width:
                        run *= runs
                        runs = 1
                    read = row + run * runs
                    for r in range(runs):
                        band.fill(
                            place + before + (oh0 - top + r) * width,
                            dy_all.unsafe_offset(row + r * run),
                            entries_all.unsafe_offset(row + r * run),
                            run,
                            (d * height + h0) * width,
                            p.input_plane(),
                        )
                    var below = top + rows + more_rows - max(oh1, oh0)
                    if below > 0:
                        band.clear(
                            place + before + (max(oh1, oh0) - top) * width,
                            below * width,
                        )
                cleared.reach(dx_share, (unit + rows - first) * width)
                _gather_run(
                    dx_all.unsafe_offset(unit * width),
                    band,
                    taps,
                    rows * width,
                    dy_all.unsafe_offset(read),
                    entries_all.unsafe_offset(read),
                )
                unit += rows
                h0 += rows
        _ = band^

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))
