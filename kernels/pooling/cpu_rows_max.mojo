"""Gradient of max pooling on the CPU over channels-last tensors, for windows of few taps: every row of dx takes what
the windows above it send.

Vectors of channels compare a window's entries with the pixels that they could name: for 16 entries that costs less than
to add them one by one. A row of dx is made at once, in the nearest cache, and always in the same order.
"""

from .cpu_row import (
    AxisTables,
    clear_run,
    for_each_share,
    lanes,
    load_part,
    pointer_to,
    round_run,
    smallest_share,
    store_part,
)
from .direct import Data, accumulator
from .problem import PoolingProblem

comptime NOTHING = Int32(-1)
"""An entry that names no pixel."""


@always_inline
def _narrow[
    index: DType, V: SIMDLength, //
](found: SIMD[index, V]) -> SIMD[DType.int32, V]:
    """Entries in 32 bits; an index that does not fit names nothing."""
    comptime if index == DType.int64:
        var low = found.cast[DType.int32]()
        return (
            low.cast[index]()
            .eq(found)
            .select(low, SIMD[DType.int32, V](NOTHING))
        )
    else:
        return found.cast[DType.int32]()


struct Above(Movable):
    """The rows of windows above one row of dx, and what their entries hold for its first pixel or its first tap.
    """

    var row: List[Int]
    """Numbers of rows of windows in the whole tensor."""
    var wanted: List[Int]

    def __init__(out self):
        self.row = List[Int]()
        self.wanted = List[Int]()

    def fill(
        mut self,
        p: PoolingProblem,
        d_axis: AxisTables,
        h_axis: AxisTables,
        n: Int,
        d: Int,
        h: Int,
        *,
        offsets: Bool,
    ):
        self.row.clear()
        self.wanted.clear()
        for od in range(d_axis.above_first[d], d_axis.above_end[d]):
            var kd = d + Int(p.d.padding) - od * Int(p.d.stride)
            if kd % Int(p.d.dilation) != 0:
                continue
            for oh in range(h_axis.above_first[h], h_axis.above_end[h]):
                var kh = h + Int(p.h.padding) - oh * Int(p.h.stride)
                if kh % Int(p.h.dilation) != 0:
                    continue
                var pixel = (d * Int(p.h.input) + h) * Int(p.w.input)
                var tap = (
                    kd // Int(p.d.dilation) * Int(p.h.window)
                    + kh // Int(p.h.dilation)
                ) * Int(p.w.window)
                self.row.append(
                    (n * Int(p.d.output) + od) * Int(p.h.output) + oh
                )
                self.wanted.append(tap if offsets else pixel)


def apart(p: PoolingProblem) -> Bool:
    """Whether no pixel lies under two windows and none is left out between them on W.
    """
    return (
        p.d.window <= p.d.stride
        and p.h.window <= p.h.stride
        and p.w.window == p.w.stride
        and p.d.dilation == 1
        and p.h.dilation == 1
        and p.w.dilation == 1
        and p.w.padding == 0
        and Int(p.w.output) * Int(p.w.stride) >= Int(p.w.input)
    )


@no_inline
def max_pool_dgrad_rows[
    dtype: DType, index: DType, *, offsets: Bool
](
    dx_all: Data[dtype],
    dy_all: Data[dtype],
    indices_all: Data[index],
    p: PoolingProblem,
):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    comptime in_place = dtype == Acc
    var d_axis = AxisTables(p.d, adaptive=False)
    var h_axis = AxisTables(p.h, adaptive=False)
    var w_axis = AxisTables(p.w, adaptive=False)
    var no_overlap = apart(p)

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var out_width = Int(p.w.output)
        var length = Int(p.w.input) * channels
        var step = Int(p.w.dilation)
        var above = Above()
        # Half-precision sums are kept in float32 and rounded once.
        var storage = List[Scalar[Acc]]()
        comptime if not in_place:
            storage.resize(length + V, 0)
        var h = first % Int(p.h.input) - 1
        var d = first // Int(p.h.input) % Int(p.d.input)
        var n = first // (Int(p.h.input) * Int(p.d.input))
        for unit in range(first, end):
            h += 1
            if h == Int(p.h.input):
                h = 0
                d += 1
                if d == Int(p.d.input):
                    d = 0
                    n += 1
            above.fill(p, d_axis, h_axis, n, d, h, offsets=offsets)
            var dx = dx_all.unsafe_offset(unit * length)
            var sums: Data[Acc]
            comptime if in_place:
                sums = rebind[Data[Acc]](dx)
            else:
                sums = pointer_to(storage)
            var direct = no_overlap and len(above.row) == 1
            if not direct:
                clear_run(sums, length)

            for a in range(len(above.row)):
                var start = above.row[a] * out_width * channels
                for ow in range(out_width):
                    var dy = dy_all.unsafe_offset(start + ow * channels)
                    var found_at = indices_all.unsafe_offset(
                        start + ow * channels
                    )
                    var wanted = above.wanted[a] + (
                        w_axis.first_tap[ow] if offsets else w_axis.start[ow]
                    )
                    var wanted_step = 1 if offsets else step
                    var taps = w_axis.count[ow]
                    var under = sums.unsafe_offset(w_axis.start[ow] * channels)

                    @always_inline
                    def block(c: Int, live: Int) {imm}:
                        var found = _narrow(load_part[V](found_at, c, live))
                        var gradient = load_part[V](dy, c, live).cast[Acc]()
                        var want = Int32(wanted)
                        var pixel = under
                        for _ in range(taps):
                            var value = found.eq(
                                SIMD[DType.int32, V](want)
                            ).select(gradient, SIMD[Acc, V](0))
                            if not direct:
                                value += load_part[V](pixel, c, live)
                            store_part(pixel, c, live, value)
                            want += Int32(wanted_step)
                            pixel = pixel.unsafe_offset(step * channels)

                    var c = 0
                    while c + V <= channels:
                        block(c, c + V)
                        c += V
                    if c < channels:
                        block(c, channels)
            comptime if not in_place:
                round_run(dx, sums, length)
        _ = storage^

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))
