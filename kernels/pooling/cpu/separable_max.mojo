"""Max pooling on the CPU, forward, for contiguous NCHW (C = 1 here).

Separable. The maximum over D and H of every column comes first, whole vectors at a time, with the
place where it was found; then each window takes the best of its columns. Of equal maxima the first in the plane wins,
of NaNs the last: both are decided by comparing places.
"""

from max.gpu.host import DeviceContext
from std.math import iota
from std.utils.numerics import neg_inf

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    ask_ahead,
    for_each_share,
    is_nan,
    lanes,
    load_even,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from .axis_tables import WindowTable
from ..kernel import NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem, ClippedTaps

comptime NOWHERE = Int32.MAX
"""The place of padding: after every pixel."""


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
        | (is_nan(value) & (~is_nan(best) | at.gt(place)))
    )
    best = wins.select(value, best)
    place = wins.select(at, place)


@always_inline
def _best_lane[
    Acc: DType, V: Int, //
](best: SIMD[Acc, V], place: SIMD[DType.int32, V]) -> Tuple[
    SIMD[Acc, 1], SIMD[DType.int32, 1]
]:
    """The lane that a scan in order would have ended with."""
    comptime if V == 1:
        return (best[0], place[0])
    else:
        comptime half = V // 2
        var value = best.slice[half]()
        var at = place.slice[half]()
        _take_better[half](
            value,
            at,
            best.slice[half, offset=half](),
            place.slice[half, offset=half](),
        )
        return _best_lane(value, at)


def has_window_everywhere[adaptive: Bool](p: PoolingProblem) -> Bool:
    """Returns whether every window has a pixel and a plane's places fit 32 bits.
    """
    comptime if not adaptive:
        if p.may_miss():
            return False
    return p.input_plane() < 1 << 31


@always_inline
def _pool_columns[
    dtype: DType, Acc: DType, //, argmax: DType
](
    values: Ptr[Acc],
    places: Ptr[DType.int32],
    plane: Ptr[dtype],
    p: PoolingProblem,
    td: ClippedTaps,
    th: ClippedTaps,
):
    """The best of every column under a row of windows, and where it is: in the plane, or by offset the tap in a
    window's first column."""
    comptime V = lanes[dtype]
    var width = Int(p.w.input)
    for w in range(0, width, V):
        var best = SIMD[Acc, V](neg_inf[Acc]())
        var place = SIMD[DType.int32, V](NOWHERE)
        var lane = iota[DType.int32, V](Int32(w))
        for a in range(td.count):
            for b in range(th.count):
                var h = th.start + b * th.step
                var row = (
                    (td.start + a * td.step) * Int(p.h.input) + h
                ) * width
                ask_ahead[V](plane.unsafe_offset(row), w)
                var value = load_part[V](
                    plane.unsafe_offset(row), w, width
                ).cast[Acc]()
                var at: SIMD[DType.int32, V]
                comptime if argmax == OFFSET:
                    var tap = (td.first + a) * Int(p.h.window) + th.first + b
                    at = SIMD[DType.int32, V](Int32(tap * Int(p.w.window)))
                else:
                    at = lane + Int32(row)
                if a == 0 and b == 0:
                    best = value
                    place = at
                else:
                    var wins = value.gt(best) | is_nan(value)
                    best = wins.select(value, best)
                    place = wins.select(at, place)
        values.unsafe_store[alignment=1](w, best)
        places.unsafe_store[alignment=1](w, place)
    # The last vector may have written past the row.
    for j in range(width, width + V):
        values[unsafe_offset=j] = neg_inf[Acc]()
        places[unsafe_offset=j] = NOWHERE


@always_inline
def _pool_vectors_of_windows[
    dtype: DType, Acc: DType, argmax: DType, //
](
    y: Ptr[dtype],
    argmaxes: Ptr[argmax],
    values: Ptr[Acc],
    places: Ptr[DType.int32],
    p: PoolingProblem,
):
    """The best column of every window of a row, for strides of 1 and 2; columns begin with the padding.
    """
    comptime V = lanes[dtype]
    var windows = Int(p.w.output)
    for ow in range(0, windows, V):
        var best = SIMD[Acc, V](neg_inf[Acc]())
        var place = SIMD[DType.int32, V](NOWHERE)
        for k in range(Int(p.w.window)):
            var value: SIMD[Acc, V]
            var at: SIMD[DType.int32, V]
            var first = ow * Int(p.w.stride) + k * Int(p.w.dilation)
            if p.w.stride == 1:
                value = values.unsafe_load[width=V, alignment=1](first)
                at = places.unsafe_load[width=V, alignment=1](first)
            else:
                value = load_even[V](values, first)
                at = load_even[V](places, first)
            comptime if argmax == OFFSET:
                at = at.eq(SIMD[DType.int32, V](NOWHERE)).select(
                    at, at + Int32(k)
                )
            _take_better[V](best, place, value, at)
        store_part(y, ow, windows, best.cast[dtype]())
        store_part(argmaxes, ow, windows, place.cast[argmax]())


@no_inline
def _max_pool_fprop_separable[
    dtype: DType, argmax: DType, //, *, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var out_width = Int(p.w.output)
    var d_axis = WindowTable(p.d, adaptive=adaptive)
    var h_axis = WindowTable(p.h, adaptive=adaptive)
    var w_axis = WindowTable(p.w, adaptive=adaptive)
    var stride = Int(p.w.stride)
    var padding = Int(p.w.padding)
    var dilation = Int(p.w.dilation)
    var vectors = not adaptive and stride <= 2
    var room = padding + max(
        Int(p.w.input) + 2 * V,
        (out_width + 2 * V) * stride + Int(p.w.window) * dilation,
    )

    def share(first: Int, end: Int) {imm}:
        var values_storage = own_lines[Acc](room, neg_inf[Acc]())
        var places_storage = own_lines[DType.int32](room, NOWHERE)
        var padded_values = pointer_inside(values_storage)
        var padded_places = pointer_inside(places_storage)
        var values = padded_values.unsafe_offset(padding)
        var places = padded_places.unsafe_offset(padding)
        for unit in range(first, end):
            var row = p.output_row(unit)
            _pool_columns[argmax](
                values,
                places,
                t.source.unsafe_offset(row.n * p.input_plane()),
                p,
                d_axis.taps(row.d),
                h_axis.taps(row.h),
            )
            var y = t.result.unsafe_offset(unit * out_width)
            var argmaxes = t.argmaxes.unsafe_offset(unit * out_width)
            if vectors:
                _pool_vectors_of_windows(
                    y, argmaxes, padded_values, padded_places, p
                )
                continue
            for ow in range(out_width):
                var best = SIMD[Acc, 1](neg_inf[Acc]())
                var place = SIMD[DType.int32, 1](NOWHERE)
                var column = w_axis.start[ow]
                var count = w_axis.count[ow]
                var begin = 0
                if dilation == 1 and count >= V // 2:
                    # V of a window's columns at once; behind the last there are none.
                    var bests = SIMD[Acc, V](neg_inf[Acc]())
                    var found = SIMD[DType.int32, V](NOWHERE)
                    for k in range(0, count, V):
                        var value = values.unsafe_load[width=V, alignment=1](
                            column + k
                        )
                        var at = places.unsafe_load[width=V, alignment=1](
                            column + k
                        )
                        comptime if argmax == OFFSET:
                            at += iota[DType.int32, V](
                                Int32(w_axis.first_tap[ow] + k)
                            )
                        var inside = iota[DType.int32, V]().lt(Int32(count - k))
                        _take_better[V](
                            bests,
                            found,
                            inside.select(value, SIMD[Acc, V](neg_inf[Acc]())),
                            inside.select(at, SIMD[DType.int32, V](NOWHERE)),
                        )
                    best, place = _best_lane(bests, found)
                    begin = count
                for k in range(begin, count):
                    var at = places[unsafe_offset=column]
                    comptime if argmax == OFFSET:
                        at += Int32(w_axis.first_tap[ow] + k)
                    _take_better[1](
                        best, place, values[unsafe_offset=column], at
                    )
                    column += dilation
                y[unsafe_offset=ow] = best.cast[dtype]()
                argmaxes[unsafe_offset=ow] = place.cast[argmax]()
        _ = values_storage^
        _ = places_storage^

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


struct SeparableMaxFprop(PoolingKernel):
    comptime NAME: StaticString = "separable_max"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax != NO_ARGMAX

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if not has_window_everywhere[adaptive](p):
            return String("a window may lie wholly in padding")
        if p.channels != 1:
            return String("channels lie between pixels")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _max_pool_fprop_separable[adaptive=adaptive](t, p)
