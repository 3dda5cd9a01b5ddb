"""Max pooling on the CPU, forward and backward.

Forward, C = 1: separable. The maximum over D and H of every column comes first, whole vectors at a time, with the
place where it was found; then each window takes the best of its columns. Of equal maxima the first in the plane wins,
of NaNs the last: both are decided by comparing places. Forward, C > 1: vectors of channels, tap by tap.

Backward: vectors of channels gather what the windows above a pixel send it; C = 1, and windows that overlap a lot,
scatter one plane, or one block of channels, at a time, always in the same order. An index outside the plane is
ignored.
"""

from std.math import iota
from std.utils.numerics import neg_inf

from .cpu_row import (
    AxisTables,
    for_each_share,
    lanes,
    load_even,
    load_part,
    smallest_share,
    store_part,
)
from .direct import Data, accumulator
from .problem import PoolingProblem

comptime NOWHERE = Int32.MAX
"""The place of padding: after every pixel."""


@always_inline
def _is_nan[
    dtype: DType, V: Int, //
](v: SIMD[dtype, V]) -> SIMD[DType.bool, V]:
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
    """Keeps of two candidates the one that a scan of the plane in order would have ended with."""
    var wins = (
        value.gt(best)
        | (value.eq(best) & at.lt(place))
        | (_is_nan(value) & (~_is_nan(best) | at.gt(place)))
    )
    best = wins.select(value, best)
    place = wins.select(at, place)


@no_inline
def max_pool_fprop_planes[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    """For C = 1 and no window that lies wholly in padding."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var width = Int(p.w.input)
    var out_width = Int(p.w.output)
    var d_axis = AxisTables(p.d, adaptive=adaptive)
    var h_axis = AxisTables(p.h, adaptive=adaptive)
    var w_axis = AxisTables(p.w, adaptive=adaptive)
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
        var values_storage = List[Scalar[Acc]](
            length=room, fill=neg_inf[Acc]()
        )
        var places_storage = List[Int32](length=room, fill=NOWHERE)
        var padded_values = rebind[Data[Acc]](values_storage.unsafe_ptr())
        var padded_places = rebind[Data[DType.int32]](
            places_storage.unsafe_ptr()
        )
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
            var out = unit * out_width
            var y_row = y.unsafe_offset(out if store_values else 0)
            var indices_row = indices.unsafe_offset(out)
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
                            at = at.eq(
                                SIMD[DType.int32, V](NOWHERE)
                            ).select(at, at + Int32(k))
                        _take_better[V](best, place, value, at)
                    comptime if store_values:
                        store_part(y_row, ow, out_width, best.cast[dtype]())
                    store_part(
                        indices_row, ow, out_width, place.cast[index]()
                    )
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
                    comptime if store_values:
                        y_row[unsafe_offset=ow] = best.cast[dtype]()
                    indices_row[unsafe_offset=ow] = place.cast[index]()

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@always_inline
def iota_from[V: Int](start: Int) -> SIMD[DType.int32, V]:
    return iota[DType.int32, V](Int32(start))


@no_inline
def max_pool_fprop_vectors[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    """For C > 1 and no window that lies wholly in padding."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var d_axis = AxisTables(p.d, adaptive=adaptive)
    var h_axis = AxisTables(p.h, adaptive=adaptive)
    var w_axis = AxisTables(p.w, adaptive=adaptive)
    var d_step = 1 if adaptive else Int(p.d.dilation)
    var h_step = 1 if adaptive else Int(p.h.dilation)
    var w_step = 1 if adaptive else Int(p.w.dilation)

    def share(first: Int, end: Int) {imm}:
        for unit in range(first, end):
            var slab = unit // Int(p.h.output)
            var oh = unit - slab * Int(p.h.output)
            var n = slab // Int(p.d.output)
            var od = slab - n * Int(p.d.output)
            var plane = x.unsafe_offset(n * p.input_plane() * channels)
            for ow in range(Int(p.w.output)):
                var o = (unit * Int(p.w.output) + ow) * channels
                var y_pixel = y.unsafe_offset(o if store_values else 0)
                var indices_pixel = indices.unsafe_offset(o)
                var c = 0
                while c < channels:
                    var best = SIMD[Acc, V](neg_inf[Acc]())
                    var first_place = (
                        d_axis.start[od] * Int(p.h.input) + h_axis.start[oh]
                    ) * Int(p.w.input) + w_axis.start[ow]
                    comptime if offsets:
                        first_place = (
                            d_axis.first_tap[od] * Int(p.h.window)
                            + h_axis.first_tap[oh]
                        ) * Int(p.w.window) + w_axis.first_tap[ow]
                    var place = SIMD[DType.int32, V](Int32(first_place))
                    for a in range(d_axis.count[od]):
                        for b in range(h_axis.count[oh]):
                            var pixel = (
                                (d_axis.start[od] + a * d_step)
                                * Int(p.h.input)
                                + h_axis.start[oh]
                                + b * h_step
                            ) * Int(p.w.input) + w_axis.start[ow]
                            var tap = (
                                (d_axis.first_tap[od] + a) * Int(p.h.window)
                                + h_axis.first_tap[oh]
                                + b
                            ) * Int(p.w.window) + w_axis.first_tap[ow]
                            for k in range(w_axis.count[ow]):
                                var value = load_part[V](
                                    plane.unsafe_offset(pixel * channels),
                                    c,
                                    channels,
                                ).cast[Acc]()
                                var wins = value.gt(best) | _is_nan(value)
                                best = wins.select(value, best)
                                place = wins.select(
                                    SIMD[DType.int32, V](
                                        Int32(
                                            tap + k if offsets else pixel
                                        )
                                    ),
                                    place,
                                )
                                pixel += w_step
                    comptime if store_values:
                        store_part(y_pixel, c, channels, best.cast[dtype]())
                    store_part(
                        indices_pixel, c, channels, place.cast[index]()
                    )
                    c += V

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def max_pool_dgrad_vectors[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    """The gathering form for C > 1."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var d_axis = AxisTables(p.d, adaptive=adaptive)
    var h_axis = AxisTables(p.h, adaptive=adaptive)
    var w_axis = AxisTables(p.w, adaptive=adaptive)
    var d_dilation = Int(p.d.dilation)
    var h_dilation = Int(p.h.dilation)
    var w_dilation = Int(p.w.dilation)
    var dilated = d_dilation * h_dilation * w_dilation != 1

    def share(first: Int, end: Int) {imm}:
        # The windows above a pixel: where their channels start, and what they must hold for this pixel.
        var above = List[Int]()
        var wanted = List[Scalar[index]]()
        for unit in range(first, end):
            var slab = unit // Int(p.h.input)
            var h = unit - slab * Int(p.h.input)
            var n = slab // Int(p.d.input)
            var d = slab - n * Int(p.d.input)
            for w in range(Int(p.w.input)):
                above.clear()
                wanted.clear()
                for od in range(d_axis.above_first[d], d_axis.above_end[d]):
                    for oh in range(
                        h_axis.above_first[h], h_axis.above_end[h]
                    ):
                        for ow in range(
                            w_axis.above_first[w], w_axis.above_end[w]
                        ):
                            var want = (d * Int(p.h.input) + h) * Int(
                                p.w.input
                            ) + w
                            comptime if offsets:
                                var kd = (
                                    d
                                    + Int(p.d.padding)
                                    - od * Int(p.d.stride)
                                )
                                var kh = (
                                    h
                                    + Int(p.h.padding)
                                    - oh * Int(p.h.stride)
                                )
                                var kw = (
                                    w
                                    + Int(p.w.padding)
                                    - ow * Int(p.w.stride)
                                )
                                if dilated:
                                    if (
                                        kd % d_dilation
                                        + kh % h_dilation
                                        + kw % w_dilation
                                    ) != 0:
                                        continue
                                    kd //= d_dilation
                                    kh //= h_dilation
                                    kw //= w_dilation
                                want = (kd * Int(p.h.window) + kh) * Int(
                                    p.w.window
                                ) + kw
                            above.append(
                                (
                                    (
                                        (n * Int(p.d.output) + od)
                                        * Int(p.h.output)
                                        + oh
                                    )
                                    * Int(p.w.output)
                                    + ow
                                )
                                * channels
                            )
                            wanted.append(Scalar[index](want))
                var pixel = dx.unsafe_offset(
                    (unit * Int(p.w.input) + w) * channels
                )
                var c = 0
                while c < channels:
                    var total = SIMD[Acc, V](0)
                    for i in range(len(above)):
                        var found = load_part[V](
                            indices.unsafe_offset(above[i]), c, channels
                        )
                        var gradient = load_part[V](
                            dy.unsafe_offset(above[i]), c, channels
                        ).cast[Acc]()
                        total += found.eq(
                            SIMD[index, V](wanted[i])
                        ).select(gradient, SIMD[Acc, V](0))
                    store_part(pixel, c, channels, total.cast[dtype]())
                    c += V

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))


comptime BLOCK = 32
"""Channels that are scattered together: a plane of them should stay in the cache."""


@no_inline
def max_pool_dgrad_scatter[
    dtype: DType, index: DType, *, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    """The scattering form, one plane (C = 1) or one block of channels at a time."""
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    comptime in_place = dtype == Acc
    var channels = Int(p.channels)
    var blocks = (channels + BLOCK - 1) // BLOCK
    var plane = p.input_plane()
    var height = Int(p.h.input)
    var width = Int(p.w.input)
    # How far each tap lies from its window's origin.
    var taps = List[Int]()
    comptime if offsets:
        for kd in range(Int(p.d.window)):
            for kh in range(Int(p.h.window)):
                for kw in range(Int(p.w.window)):
                    taps.append(
                        (
                            kd * Int(p.d.dilation) * height
                            + kh * Int(p.h.dilation)
                        )
                        * width
                        + kw * Int(p.w.dilation)
                    )

    def share(first: Int, end: Int) {imm}:
        # Half-precision sums are kept in float32 and rounded once.
        var storage = List[Scalar[Acc]]()
        comptime if not in_place:
            storage.resize(plane * min(BLOCK, channels) + V, 0)
        for unit in range(first, end):
            var n = unit // blocks
            var c0 = (unit - n * blocks) * BLOCK
            var depth = min(BLOCK, channels - c0)
            var dx_block = dx.unsafe_offset(n * plane * channels + c0)
            var sums: Data[Acc]
            var pitch: Int
            comptime if in_place:
                sums = rebind[Data[Acc]](dx_block)
                pitch = channels
                if channels == 1:
                    _clear(sums, plane)
                else:
                    for i in range(plane):
                        _clear(sums.unsafe_offset(i * pitch), depth)
            else:
                sums = rebind[Data[Acc]](storage.unsafe_ptr())
                pitch = depth
                _clear(sums, plane * depth)
            var o = n * p.output_plane() * channels + c0
            for od in range(Int(p.d.output)):
                for oh in range(Int(p.h.output)):
                    var origin = (
                        (od * Int(p.d.stride) - Int(p.d.padding)) * height
                        + oh * Int(p.h.stride)
                        - Int(p.h.padding)
                    ) * width - Int(p.w.padding)
                    if channels == 1:
                        for _ in range(Int(p.w.output)):
                            _send[offsets=offsets](
                                sums,
                                dy[unsafe_offset=o].cast[Acc](),
                                indices[unsafe_offset=o],
                                taps,
                                origin,
                                plane,
                                1,
                                0,
                            )
                            o += 1
                            origin += Int(p.w.stride)
                    else:
                        for _ in range(Int(p.w.output)):
                            for c in range(depth):
                                _send[offsets=offsets](
                                    sums,
                                    dy[unsafe_offset=o + c].cast[Acc](),
                                    indices[unsafe_offset=o + c],
                                    taps,
                                    origin,
                                    plane,
                                    pitch,
                                    c,
                                )
                            o += channels
                            origin += Int(p.w.stride)
            comptime if not in_place:
                if channels == 1:
                    _round(dx_block, sums, plane)
                else:
                    for i in range(plane):
                        _round(
                            dx_block.unsafe_offset(i * channels),
                            sums.unsafe_offset(i * depth),
                            depth,
                        )

    var units = Int(p.batch) * blocks
    for_each_share(share, units, smallest_share(p.input_size(), units))


@always_inline
def _send[
    Acc: DType, index: DType, //, *, offsets: Bool
](
    sums: Data[Acc],
    gradient: Scalar[Acc],
    found: Scalar[index],
    taps: List[Int],
    origin: Int,
    plane: Int,
    pitch: Int,
    c: Int,
):
    var pixel = Int(found)
    comptime if offsets:
        if UInt(pixel) >= UInt(len(taps)):
            return
        pixel = origin + taps[pixel]
    # As an unsigned number, a negative place is past the plane too.
    if UInt(pixel) < UInt(plane):
        sums[unsafe_offset=pixel * pitch + c] += gradient


@always_inline
def _clear[dtype: DType, //](data: Data[dtype], length: Int):
    comptime V = lanes[dtype]
    var at = 0
    while at < length:
        store_part(data, at, length, SIMD[dtype, V](0))
        at += V


@always_inline
def _round[
    dtype: DType, Acc: DType, //
](dx: Data[dtype], sums: Data[Acc], length: Int):
    comptime V = lanes[dtype]
    var at = 0
    while at < length:
        store_part(
            dx, at, length, load_part[V](sums, at, length).cast[dtype]()
        )
        at += V
