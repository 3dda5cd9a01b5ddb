"""Max pooling on the CPU, forward, for contiguous NCHW (C = 1 here).

Separable. The maximum over D and H of every column comes first, whole vectors at a time, with the
place where it was found; then each window takes the best of its columns. Of equal maxima the first in the plane wins,
of NaNs the last: both are decided by comparing places.
"""

from std.math import iota
from std.utils.numerics import neg_inf

from .vectors import (
    ask_ahead,
    for_each_share,
    lanes,
    load_even,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from .axis_tables import WindowTable
from ..problem import Data, PoolingProblem, accumulator

comptime NOWHERE = Int32.MAX
"""The place of padding: after every pixel."""


@always_inline
def _is_nan[dtype: DType, V: Int, //](v: SIMD[dtype, V]) -> SIMD[DType.bool, V]:
    # `ne` is an ordered comparison, false for NaN.
    return ~v.eq(v)


@always_inline
def _take_better[
    Acc: DType, //, V: Int
](
    mut best: SIMD[Acc, V],
    mut place: SIMD[DType.int32, V],
    value: SIMD[Acc, V],
    at: SIMD[DType.int32, V],
):
    """Keeps of two candidates the one that a scan of the plane in order would have ended with.
    """
    var wins = (
        value.gt(best)
        | (value.eq(best) & at.lt(place))
        | (_is_nan(value) & (~_is_nan(best) | at.gt(place)))
    )
    best = wins.select(value, best)
    place = wins.select(at, place)


def has_window_everywhere[adaptive: Bool](p: PoolingProblem) -> Bool:
    """Whether every window has a pixel, and a plane's places fit 32 bits."""
    comptime if not adaptive:
        if p.may_miss():
            return False
    return p.input_plane() < 1 << 31


def separable_can_implement[
    adaptive: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why max_pool_fprop_planes does not take the problem."""
    if not has_window_everywhere[adaptive](p):
        return String("a window may lie wholly in padding")
    if p.channels != 1:
        return String("channels lie between pixels")
    return None


@no_inline
def max_pool_fprop_planes[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    """For what `separable_can_implement` says."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var width = Int(p.w.input)
    var out_width = Int(p.w.output)
    var d_axis = WindowTable(p.d, adaptive=adaptive)
    var h_axis = WindowTable(p.h, adaptive=adaptive)
    var w_axis = WindowTable(p.w, adaptive=adaptive)
    var stride = Int(p.w.stride)
    var padding = Int(p.w.padding)
    var dilation = Int(p.w.dilation)
    var window = Int(p.w.window)
    var d_step = 1 if adaptive else Int(p.d.dilation)
    var h_step = 1 if adaptive else Int(p.h.dilation)
    var vectors = not adaptive and stride <= 2
    var room = padding + max(
        width + 2 * V, (out_width + 2 * V) * stride + window * dilation
    )

    def share(first: Int, end: Int) {imm}:
        var values_storage = own_lines[Acc](room, neg_inf[Acc]())
        var places_storage = own_lines[DType.int32](room, NOWHERE)
        var padded_values = pointer_inside(values_storage)
        var padded_places = pointer_inside(places_storage)
        var values = padded_values.unsafe_offset(padding)
        var places = padded_places.unsafe_offset(padding)
        for unit in range(first, end):
            var slab = unit // Int(p.h.output)
            var oh = unit - slab * Int(p.h.output)
            var n = slab // Int(p.d.output)
            var od = slab - n * Int(p.d.output)
            var plane = x.unsafe_offset(n * p.input_plane())

            # The best of every column.
            var w = 0
            while w < width:
                var best = SIMD[Acc, V](neg_inf[Acc]())
                var place = SIMD[DType.int32, V](NOWHERE)
                var lane = iota_from[V](w)
                for a in range(d_axis.count[od]):
                    var d = d_axis.start[od] + a * d_step
                    for b in range(h_axis.count[oh]):
                        var h = h_axis.start[oh] + b * h_step
                        var row = (d * Int(p.h.input) + h) * width
                        ask_ahead[V](plane.unsafe_offset(row), w)
                        var value = load_part[V](
                            plane.unsafe_offset(row), w, width
                        ).cast[Acc]()
                        var at: SIMD[DType.int32, V]
                        comptime if offsets:
                            at = SIMD[DType.int32, V](
                                Int32(
                                    (
                                        (d_axis.first_tap[od] + a)
                                        * Int(p.h.window)
                                        + h_axis.first_tap[oh]
                                        + b
                                    )
                                    * window
                                )
                            )
                        else:
                            at = lane + Int32(row)
                        if a == 0 and b == 0:
                            best = value
                            place = at
                        else:
                            var wins = value.gt(best) | _is_nan(value)
                            best = wins.select(value, best)
                            place = wins.select(at, place)
                values.unsafe_store[alignment=1](w, best)
                places.unsafe_store[alignment=1](w, place)
                w += V
            # The last vector may have written past the row.
            for j in range(width, width + V):
                values[unsafe_offset=j] = neg_inf[Acc]()
                places[unsafe_offset=j] = NOWHERE

            # The best column of every window.
            var first_output = unit * out_width
            var y_row = y.unsafe_offset(first_output)
            var indices_row = indices.unsafe_offset(first_output)
            if vectors:
                var ow = 0
                while ow < out_width:
                    var best = SIMD[Acc, V](neg_inf[Acc]())
                    var place = SIMD[DType.int32, V](NOWHERE)
                    for k in range(window):
                        var value: SIMD[Acc, V]
                        var at: SIMD[DType.int32, V]
                        if stride == 1:
                            value = padded_values.unsafe_load[
                                width=V, alignment=1
                            ](ow + k * dilation)
                            at = padded_places.unsafe_load[
                                width=V, alignment=1
                            ](ow + k * dilation)
                        else:
                            value = load_even[V](
                                padded_values, 2 * ow + k * dilation
                            )
                            at = load_even[V](
                                padded_places, 2 * ow + k * dilation
                            )
                        comptime if offsets:
                            at = at.eq(SIMD[DType.int32, V](NOWHERE)).select(
                                at, at + Int32(k)
                            )
                        _take_better[V](best, place, value, at)
                    store_part(y_row, ow, out_width, best.cast[dtype]())
                    store_part(indices_row, ow, out_width, place.cast[index]())
                    ow += V
            else:
                for ow in range(out_width):
                    var best = SIMD[Acc, 1](neg_inf[Acc]())
                    var place = SIMD[DType.int32, 1](NOWHERE)
                    var column = w_axis.start[ow]
                    for k in range(w_axis.count[ow]):
                        var at = places[unsafe_offset=column]
                        comptime if offsets:
                            at += Int32(w_axis.first_tap[ow] + k)
                        _take_better[1](
                            best, place, values[unsafe_offset=column], at
                        )
                        column += dilation
                    y_row[unsafe_offset=ow] = best.cast[dtype]()
                    indices_row[unsafe_offset=ow] = place.cast[index]()
        _ = values_storage^
        _ = places_storage^

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@always_inline
def iota_from[V: Int](start: Int) -> SIMD[DType.int32, V]:
    return iota[DType.int32, V](Int32(start))
