"""Pooling on the CPU over channels-last tensors: vectors of channels, forward and backward.

What a result needs is listed once for its pixel, as element offsets, and then walked for every block of channels;
a block is four vectors where C allows it, so that neither the loop nor the latency of a comparison shows.
"""

from std.sys import size_of
from std.utils.numerics import neg_inf

from .vectors import (
    EARLY,
    LINE,
    ClearedAhead,
    ask_for,
    end_past_cache,
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
    store_past_cache,
)
from .axis_tables import AboveTable, WindowTable
from .separable_max import has_window_everywhere
from ..problem import Data, PoolingAxis, PoolingProblem, accumulator

comptime MANY_TAPS = 16
"""Taps of a window above which a pixel's next channels are wanted before the data that lies EARLY bytes on."""


@always_inline
def _is_nan[
    dtype: DType, W: SIMDLength, //
](v: SIMD[dtype, W]) -> SIMD[DType.bool, W]:
    # `ne` is an ordered comparison, false for NaN.
    return ~v.eq(v)


comptime FEWEST_CHANNELS = 16
"""From which on a pixel's vectors pay for listing what it needs."""
comptime MOST_SUMMED = 16
"""Above so many addends for one average, summing rows first is cheaper, unless one window covers the whole plane."""
comptime MOST_IN_ORDER = 1024
"""Addends that are summed one after the other, at most: rows first keep the rounding smaller."""


def vectors_max_can_implement[
    adaptive: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why max_pool_fprop_vectors does not take the problem."""
    if not has_window_everywhere[adaptive](p):
        return String("a window may lie wholly in padding")
    return None


def vectors_avg_can_implement[
    adaptive: Bool, forward: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why summing whole rows first is faster than averages by vectors.
    """
    if p.channels < FEWEST_CHANNELS:
        return String("channels are few")
    var addends: Int
    var most = MOST_SUMMED
    comptime if forward:

        @always_inline
        def taps(axis: PoolingAxis) -> Int:
            return Int(min(axis.window, axis.input))

        addends = taps(p.d) * taps(p.h) * taps(p.w)
        if p.output_plane() == 1:
            most = MOST_IN_ORDER
    else:
        addends = (
            p.d.most_above[adaptive]()
            * p.h.most_above[adaptive]()
            * p.w.most_above[adaptive]()
        )
    if addends > most:
        return String("each result has many addends")
    return None


def _shares_none[adaptive: Bool](axis: PoolingAxis) -> Bool:
    """Whether windows that follow each other have no position in common; adaptive ones have one at most.
    """
    return adaptive or axis.most_above() == 1


@no_inline
def max_pool_fprop_vectors[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    y_all: Data[dtype],
    indices_all: Data[index],
    x_all: Data[dtype],
    p: PoolingProblem,
):
    """For what `vectors_max_can_implement` says."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var d_axis = WindowTable(p.d, adaptive=adaptive)
    var h_axis = WindowTable(p.h, adaptive=adaptive)
    var w_axis = WindowTable(p.w, adaptive=adaptive)
    var taps = d_axis.most_taps * h_axis.most_taps * w_axis.most_taps
    # Windows that share no pixels are read in the order of the memory.
    var in_order = (
        _shares_none[adaptive](p.d)
        and _shares_none[adaptive](p.h)
        and _shares_none[adaptive](p.w)
    )

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var height = Int(p.h.input)
        var width = Int(p.w.input)
        var out_width = Int(p.w.output)
        var d_step = 1 if adaptive else Int(p.d.dilation)
        var h_step = 1 if adaptive else Int(p.h.dilation)
        var w_step = 1 if adaptive else Int(p.w.dilation)
        var past_cache = (
            size_of[index]() == 8 and channels * size_of[index]() % LINE == 0
        )
        var at_list = own_lines[DType.int](taps)
        var fresh_list = own_lines[DType.int](taps)
        var place_list = own_lines[DType.int32](taps)
        var at = pointer_inside(at_list)
        var fresh = pointer_inside(fresh_list)
        var place = pointer_inside(place_list)
        # What of a window others have not read yet, counted from its end.
        var h_fresh = Int(p.h.window if adaptive else p.h.stride)
        var w_fresh = Int(p.w.window if adaptive else p.w.stride)
        for unit in range(first, end):
            var slab = unit // Int(p.h.output)
            var oh = unit - slab * Int(p.h.output)
            var n = slab // Int(p.d.output)
            var od = slab - n * Int(p.d.output)
            var x = x_all.unsafe_offset(n * p.input_plane() * channels)
            var d_start = d_axis.start[od]
            var h_start = h_axis.start[oh]
            var d_count = d_axis.count[od]
            var h_count = h_axis.count[oh]
            # Windows inside the tensor look alike from their first column: what they need is listed once for all.
            var count = 0
            var fresh_count = 0
            var listed = (-1, -1)
            for ow in range(out_width):
                var w_start = w_axis.start[ow]
                var w_count = w_axis.count[ow]
                var w_first = w_axis.first_tap[ow]
                if w_count != listed[0] or w_first != listed[1]:
                    listed = (w_count, w_first)
                    count = 0
                    fresh_count = 0
                    for a in range(d_count):
                        for b in range(h_count):
                            var pixel = (
                                (d_start + a * d_step) * height
                                + h_start
                                + b * h_step
                            ) * width
                            var tap = (
                                (d_axis.first_tap[od] + a) * Int(p.h.window)
                                + h_axis.first_tap[oh]
                                + b
                            ) * Int(p.w.window) + w_first
                            for k in range(w_count):
                                at[unsafe_offset=count] = Scalar[DType.int](
                                    pixel * channels
                                )
                                place[unsafe_offset=count] = Int32(
                                    tap + k if offsets else pixel
                                )
                                if (
                                    b + h_fresh >= h_count
                                    and k + w_fresh >= w_count
                                ):
                                    fresh[unsafe_offset=fresh_count] = at[
                                        unsafe_offset=count
                                    ]
                                    fresh_count += 1
                                pixel += w_step
                                count += 1
                var x_window = x.unsafe_offset(w_start * channels)
                var first_place = Int32(0 if offsets else w_start)
                var o = (unit * out_width + ow) * channels
                var y = y_all.unsafe_offset(o)
                var indices = indices_all.unsafe_offset(o)

                @always_inline
                def store[
                    W: Int
                ](c: Int, best: SIMD[Acc, W], found: SIMD[DType.int32, W]) {
                    imm
                }:
                    store_part(y, c, channels, best.cast[dtype]())
                    var entries = (found + first_place).cast[index]()
                    # Only the backward pass wants indices, and there are more bytes of them than of y. A line that is stored in
                    # part costs more so.
                    if past_cache:
                        store_past_cache(indices, c, channels, entries)
                    else:
                        store_part(indices, c, channels, entries)

                @always_inline
                def block[W: Int](c: Int) {imm}:
                    var best = SIMD[Acc, W](neg_inf[Acc]())
                    var found = SIMD[DType.int32, W](place[unsafe_offset=0])
                    # After many taps the next channels of the same pixels are wanted.
                    var ahead = c + EARLY // size_of[dtype]()
                    if count > MANY_TAPS and c + W < channels:
                        ahead = c + W
                    # Asking all at once leaves the loads that follow waiting in the same queue.
                    var ask_first = not in_order
                    for t in range(fresh_count if ask_first else 0):
                        ask_for[W](
                            x_window.unsafe_offset(Int(fresh[unsafe_offset=t])),
                            ahead,
                        )
                    for t in range(count):
                        var pixel = x_window.unsafe_offset(
                            Int(at[unsafe_offset=t])
                        )
                        if not ask_first:
                            ask_for[W](pixel, ahead)
                        var value = load_part[W](pixel, c, channels).cast[Acc]()
                        var wins = value.gt(best) | _is_nan(value)
                        best = wins.select(value, best)
                        found = wins.select(
                            SIMD[DType.int32, W](place[unsafe_offset=t]),
                            found,
                        )
                    store[W](c, best, found)

                var c = 0
                while c + 4 * V <= channels:
                    block[4 * V](c)
                    c += 4 * V
                while c < channels:
                    block[V](c)
                    c += V
        _ = at_list^
        _ = fresh_list^
        _ = place_list^
        if past_cache:
            end_past_cache()

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def avg_pool_fprop_vectors[
    dtype: DType, *, adaptive: Bool
](y_all: Data[dtype], x_all: Data[dtype], p: PoolingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var include = p.count_include_pad != 0
    var d_axis = WindowTable(p.d, adaptive=adaptive, include_pad=include)
    var h_axis = WindowTable(p.h, adaptive=adaptive, include_pad=include)
    var w_axis = WindowTable(p.w, adaptive=adaptive, include_pad=include)
    var rows = d_axis.most_taps * h_axis.most_taps
    var taps = rows * w_axis.most_taps

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var width = Int(p.w.input)
        var out_width = Int(p.w.output)
        var at_list = own_lines[DType.int](taps)
        var fresh_list = own_lines[DType.int](taps)
        var at = pointer_inside(at_list)
        var fresh = pointer_inside(fresh_list)
        var row_list = own_lines[DType.int](rows)
        var row_at = pointer_inside(row_list)
        # What windows before have read already.
        var h_seen = 0 if adaptive else Int(p.h.window - p.h.stride)
        var w_seen = 0 if adaptive else Int(p.w.window - p.w.stride)
        for unit in range(first, end):
            var slab = unit // Int(p.h.output)
            var oh = unit - slab * Int(p.h.output)
            var n = slab // Int(p.d.output)
            var od = slab - n * Int(p.d.output)
            var x = x_all.unsafe_offset(n * p.input_plane() * channels)
            # What all windows of the row share is found once: rows, those last that no windows before have read.
            var row_count = 0
            for b in range(h_axis.count[oh]):
                for a in range(d_axis.count[od]):
                    row_at[unsafe_offset=row_count] = (
                        Scalar[DType.int](
                            (d_axis.start[od] + a) * Int(p.h.input)
                            + h_axis.start[oh]
                            + b
                        )
                        * width
                    )
                    row_count += 1
            var seen = min(max(h_seen, 0) * d_axis.count[od], row_count)
            var row_divisor = d_axis.divisor[od] * h_axis.divisor[oh]
            # Windows inside the tensor look alike from their first column: what they need is listed once for all.
            var count = 0
            var fresh_count = 0
            var listed = -1
            for ow in range(out_width):
                var w_count = w_axis.count[ow]
                if w_count != listed:
                    listed = w_count
                    count = 0
                    fresh_count = 0
                    for r in range(row_count):
                        for k in range(w_count):
                            at[unsafe_offset=count] = Scalar[DType.int](
                                (Int(row_at[unsafe_offset=r]) + k) * channels
                            )
                            count += 1
                    for r in range(seen, row_count):
                        for k in range(max(w_seen, 0), w_count):
                            fresh[unsafe_offset=fresh_count] = Scalar[
                                DType.int
                            ]((Int(row_at[unsafe_offset=r]) + k) * channels)
                            fresh_count += 1
                var x_window = x.unsafe_offset(w_axis.start[ow] * channels)
                var divisor = row_divisor * w_axis.divisor[ow]
                comptime if not adaptive:
                    if p.divisor_override != 0:
                        divisor = Int(p.divisor_override)
                # A division for each vector would cost more than the sums.
                var scale = 1 / Scalar[Acc](divisor)
                var y = y_all.unsafe_offset((unit * out_width + ow) * channels)

                @always_inline
                def block[W: Int](c: Int) {imm}:
                    var total = SIMD[Acc, W](0)
                    var ahead = c + EARLY // size_of[dtype]()
                    if row_count == 1 and fresh_count == count:
                        # One stream: further ahead.
                        ahead += EARLY // size_of[dtype]()
                        var run = x_window.unsafe_offset(
                            Int(at[unsafe_offset=0])
                        )
                        for t in range(count):
                            var pixel = run.unsafe_offset(t * channels)
                            ask_for[W](pixel, ahead)
                            total += load_part[W](pixel, c, channels).cast[
                                Acc
                            ]()
                        store_part(
                            y, c, channels, (total * scale).cast[dtype]()
                        )
                        return
                    if count > MANY_TAPS and c + W < channels:
                        ahead = c + W
                    # Asking all at once leaves the loads that follow waiting in the same queue.
                    var ask_first = fresh_count < count
                    for t in range(fresh_count if ask_first else 0):
                        ask_for[W](
                            x_window.unsafe_offset(Int(fresh[unsafe_offset=t])),
                            ahead,
                        )
                    for t in range(count):
                        var pixel = x_window.unsafe_offset(
                            Int(at[unsafe_offset=t])
                        )
                        if not ask_first:
                            ask_for[W](pixel, ahead)
                        total += load_part[W](pixel, c, channels).cast[Acc]()
                    store_part(y, c, channels, (total * scale).cast[dtype]())

                var c = 0
                while c + 8 * V <= channels:
                    block[8 * V](c)
                    c += 8 * V
                while c + 4 * V <= channels:
                    block[4 * V](c)
                    c += 4 * V
                while c < channels:
                    block[V](c)
                    c += V
        _ = at_list^
        _ = row_list^
        _ = fresh_list^

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def avg_pool_dgrad_vectors[
    dtype: DType, *, adaptive: Bool
](dx_all: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var include = p.count_include_pad != 0
    var d_axis = WindowTable(p.d, adaptive=adaptive, include_pad=include)
    var h_axis = WindowTable(p.h, adaptive=adaptive, include_pad=include)
    var w_axis = WindowTable(p.w, adaptive=adaptive, include_pad=include)
    var d_above = AboveTable(p.d, adaptive=adaptive)
    var h_above = AboveTable(p.h, adaptive=adaptive)
    var w_above = AboveTable(p.w, adaptive=adaptive)
    var most_rows = d_above.most * h_above.most
    var override = not adaptive and p.divisor_override != 0

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var width = Int(p.w.input)
        var at_list = own_lines[DType.int](most_rows)
        var scale_list = own_lines[Acc](most_rows, fill=1)
        var at = pointer_inside(at_list)
        var scale = pointer_inside(scale_list)
        var w_scale_list = own_lines[Acc](
            Int(p.w.output), fill=1 / Scalar[Acc](Int(p.divisor_override))
        )
        var w_scale = pointer_inside(w_scale_list)
        if not override:
            for ow in range(Int(p.w.output)):
                w_scale[unsafe_offset=ow] = 1 / Scalar[Acc](w_axis.divisor[ow])
        for unit in range(first, end):
            var slab = unit // Int(p.h.input)
            var h = unit - slab * Int(p.h.input)
            var n = slab // Int(p.d.input)
            var d = slab - n * Int(p.d.input)
            # What all pixels of the row share is found once.
            var row_count = 0
            for od in range(d_above.first[d], d_above.end[d]):
                for oh in range(h_above.first[h], h_above.end[h]):
                    at[unsafe_offset=row_count] = Scalar[DType.int](
                        ((n * Int(p.d.output) + od) * Int(p.h.output) + oh)
                        * Int(p.w.output)
                        * channels
                    )
                    if not override:
                        scale[unsafe_offset=row_count] = 1 / Scalar[Acc](
                            d_axis.divisor[od] * h_axis.divisor[oh]
                        )
                    row_count += 1
            var dx_row = dx_all.unsafe_offset(unit * width * channels)
            var cleared = ClearedAhead(width * channels, 0)
            for w in range(width):
                var above_first = w_above.first[w]
                var above_end = w_above.end[w]
                cleared.reach(dx_row, (w + 1) * channels)
                var dx = dx_row.unsafe_offset(w * channels)

                @always_inline
                def block[W: Int](c: Int) {imm}:
                    var total = SIMD[Acc, W](0)
                    for r in range(row_count):
                        var windows = dy.unsafe_offset(
                            Int(at[unsafe_offset=r]) + c
                        )
                        # What no pixel before has read.
                        if r == row_count - 1 and above_end > above_first:
                            ask_for[W](
                                windows,
                                (above_end - 1) * channels
                                + EARLY // size_of[dtype](),
                            )
                        for ow in range(above_first, above_end):
                            total += load_part[W](
                                windows,
                                ow * channels,
                                ow * channels + channels - c,
                            ).cast[Acc]() * (
                                scale[unsafe_offset=r]
                                * w_scale[unsafe_offset=ow]
                            )
                    store_part(dx, c, channels, total.cast[dtype]())

                var c = 0
                while c + 4 * V <= channels:
                    block[4 * V](c)
                    c += 4 * V
                while c < channels:
                    block[V](c)
                    c += V
        _ = at_list^
        _ = scale_list^
        _ = w_scale_list^

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))
