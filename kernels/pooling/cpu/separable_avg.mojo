"""Average pooling on the CPU, forward and backward, for any number of channels.

Separable. A row of [W, C] is contiguous in either layout, so the rows that a result row needs are first summed as whole
vectors into one row of sums; then each result adds up the sums under, or above, it on W. With C = 1 neighbouring
results share vectors too for strides 1 and 2; other strides finish one by one.
"""

from max.gpu.host import DeviceContext

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    ClearedAhead,
    apart,
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
from .axis_tables import AboveTable, WindowTable
from ..kernel import NO_ARGMAX, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem


@always_inline
def _sum_rows[
    dtype: DType, Acc: DType, //, weighted: Bool, scaled: Bool = False
](
    sums: Ptr[Acc],
    data: Ptr[dtype],
    rows: List[Int],
    weights: List[Scalar[Acc]],
    length: Int,
    scales: Ptr[Acc],
):
    """The sum of `length` elements from each of `rows` on, each row times its weight and each element times its scale.
    """
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        var total = SIMD[Acc, V](0)
        for r in range(len(rows)):
            ask_ahead[V](data.unsafe_offset(rows[r]), at)
            var part = load_part[V](
                data.unsafe_offset(rows[r]), at, length
            ).cast[Acc]()
            comptime if weighted:
                total += part * weights[r]
            else:
                total += part
        comptime if scaled:
            total *= scales.unsafe_load[width=V, alignment=1](at)
        sums.unsafe_store[alignment=1](at, total)


@no_inline
def _avg_pool_fprop_separable[
    dtype: DType, //
](y: Ptr[dtype], x: Ptr[dtype], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var length = Int(p.w.input) * channels
    var out_length = Int(p.w.output) * channels
    var include = p.count_include_pad != 0
    var d_axis = WindowTable(p.d, include_pad=include)
    var h_axis = WindowTable(p.h, include_pad=include)
    var tables = WindowTable(p.w, include_pad=include)
    var override = p.divisor_override != 0
    var stride = Int(p.w.stride)
    var padding = Int(p.w.padding)
    # Padding in front of the sums, and room behind for the last window and for whole vectors.
    var room = (
        max(
            length + 2 * V,
            (Int(p.w.output) + 2 * V) * stride + Int(p.w.window),
        )
        + padding
    )
    var vectors = channels == 1 and stride <= 2

    def share(first: Int, end: Int) {imm}:
        var storage = own_lines[Acc](room)
        var padded = pointer_inside(storage)
        var sums = padded.unsafe_offset(padding if vectors else 0)
        var divisors = own_lines[Acc](Int(p.w.output) + V, fill=1)
        var by = pointer_inside(divisors)
        if not override:
            for ow in range(Int(p.w.output)):
                by[unsafe_offset=ow] = Scalar[Acc](tables.divisor[ow])
        var rows = List[Int](capacity=apart(0))
        var unweighted = List[Scalar[Acc]]()
        for unit in range(first, end):
            var row = p.output_row(unit)
            var oh = row.h
            var od = row.d
            rows.clear()
            for a in range(d_axis.count[od]):
                var above = (
                    row.n * Int(p.d.input) + d_axis.start[od] + a
                ) * Int(p.h.input) + h_axis.start[oh]
                for b in range(h_axis.count[oh]):
                    rows.append((above + b) * length)
            _sum_rows[False](sums, x, rows, unweighted, length, by)
            var factor = Scalar[Acc](Int(p.divisor_override))
            if not override:
                factor = Scalar[Acc](d_axis.divisor[od] * h_axis.divisor[oh])
            var out = y.unsafe_offset(unit * out_length)
            if vectors:
                # The vectors of the sum wrote past the row: what they left behind counts as padding.
                for j in range(length, length + V):
                    sums[unsafe_offset=j] = 0
                var ow = 0
                while ow < Int(p.w.output):
                    var total = SIMD[Acc, V](0)
                    if stride == 1:
                        for k in range(Int(p.w.window)):
                            total += padded.unsafe_load[width=V, alignment=1](
                                ow + k
                            )
                    else:
                        for k in range(Int(p.w.window)):
                            total += load_even[V](padded, 2 * ow + k)
                    total /= factor * by.unsafe_load[width=V, alignment=1](ow)
                    store_part(out, ow, Int(p.w.output), total.cast[dtype]())
                    ow += V
            elif channels == 1:
                for ow in range(Int(p.w.output)):
                    var total = Scalar[Acc](0)
                    var start = tables.start[ow]
                    for k in range(tables.count[ow]):
                        total += sums[unsafe_offset=start + k]
                    out[unsafe_offset=ow] = (
                        total / (factor * by[unsafe_offset=ow])
                    ).cast[dtype]()
            else:
                for ow in range(Int(p.w.output)):
                    var divisor = factor * by[unsafe_offset=ow]
                    var under = sums.unsafe_offset(tables.start[ow] * channels)
                    var pixel = out.unsafe_offset(ow * channels)
                    var c = 0
                    while c < channels:
                        var total = SIMD[Acc, V](0)
                        for k in range(tables.count[ow]):
                            total += under.unsafe_load[width=V, alignment=1](
                                k * channels + c
                            )
                        store_part(
                            pixel,
                            c,
                            channels,
                            (total / divisor).cast[dtype](),
                        )
                        c += V
        _ = storage^
        _ = divisors^

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def _avg_pool_dgrad_separable[
    dtype: DType, //
](dx: Ptr[dtype], dy: Ptr[dtype], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var include = p.count_include_pad != 0
    var d_axis = WindowTable(p.d, include_pad=include)
    var h_axis = WindowTable(p.h, include_pad=include)
    var w_axis = WindowTable(p.w, include_pad=include)
    var d_above = AboveTable(p.d)
    var h_above = AboveTable(p.h)
    var w_above = AboveTable(p.w)
    var most_rows = d_above.most * h_above.most
    var override = p.divisor_override != 0

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var width = Int(p.w.input)
        var out_width = Int(p.w.output)
        var length = width * channels
        var out_length = out_width * channels
        var stride = Int(p.w.stride)
        var window = Int(p.w.window)
        var padding = Int(p.w.padding)
        var shared = channels == 1
        var slides = stride == 1 and window > 1
        # Windows before the first are zeros, and so are those behind the last.
        var front = window
        var storage = own_lines[Acc](
            front + out_length + length + padding + 4 * V
        )
        var sums = pointer_inside(storage).unsafe_offset(front)
        var spread = own_lines[Acc](length + padding + (2 * V + 1) * stride + V)
        var line = pointer_inside(spread)
        # Behind the last window zeros: vectors write past the row of sums.
        var scale_list = own_lines[Acc](out_width + V)
        var scales = pointer_inside(scale_list)
        for ow in range(out_width):
            var divisor = 1 if override else w_axis.divisor[ow]
            scales[unsafe_offset=ow] = 1 / Scalar[Acc](divisor)
        var rows = List[Int](capacity=apart(most_rows))
        var weights = List[Scalar[Acc]](capacity=apart(most_rows))
        var last_windows = (-1, -1)
        var last_divisor = 0
        var weight = Scalar[Acc](0)
        var dx_share = dx.unsafe_offset(first * length)
        var cleared = ClearedAhead((end - first) * length, 0)
        # One row on for each unit: short rows have no time for divisions.
        var h = first % Int(p.h.input) - 1
        var d = first // Int(p.h.input) % Int(p.d.input)
        var n = first // (Int(p.h.input) * Int(p.d.input))
        for unit in range(first, end):
            h += 1
            if h == Int(p.h.input):
                h = 0
                d += 1
                last_windows = (-1, -1)
                if d == Int(p.d.input):
                    d = 0
                    n += 1
            var out = dx.unsafe_offset(unit * length)
            cleared.reach(dx_share, (unit + 1 - first) * length)
            # Rows of a slab under the same windows are equal.
            if (
                shared
                and not slides
                and h_above.first[h] == last_windows[0]
                and h_above.end[h] == last_windows[1]
            ):
                _store_row(out, line.unsafe_offset(padding), length)
                continue
            last_windows = (h_above.first[h], h_above.end[h])
            rows.clear()
            weights.clear()
            for od in range(d_above.first[d], d_above.end[d]):
                for oh in range(last_windows[0], last_windows[1]):
                    rows.append(
                        ((n * Int(p.d.output) + od) * Int(p.h.output) + oh)
                        * out_length
                    )
                    var divisor = Int(p.divisor_override)
                    if not override:
                        divisor = d_axis.divisor[od] * h_axis.divisor[oh]
                    if divisor != last_divisor:
                        last_divisor = divisor
                        weight = 1 / Scalar[Acc](divisor)
                    weights.append(weight)
            if shared:
                _sum_rows[True, True](
                    sums, dy, rows, weights, out_length, scales
                )
                if slides:
                    _slide(out, sums.unsafe_offset(padding), length, window)
                    continue
                _spread(line, sums, length + padding, window, stride)
                _store_row(out, line.unsafe_offset(padding), length)
                continue
            _sum_rows[True](sums, dy, rows, weights, out_length, scales)
            for w in range(width):
                var pixel = out.unsafe_offset(w * channels)
                var above_first = w_above.first[w]
                var above_end = w_above.end[w]
                var c = 0
                while c < channels:
                    var total = SIMD[Acc, V](0)
                    for ow in range(above_first, above_end):
                        total += (
                            sums.unsafe_load[width=V, alignment=1](
                                ow * channels + c
                            )
                            * scales[unsafe_offset=ow]
                        )
                    store_part(pixel, c, channels, total.cast[dtype]())
                    c += V
        _ = storage^
        _ = spread^
        _ = scale_list^

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@always_inline
def _store_row[
    dtype: DType, Acc: DType, //
](row: Ptr[dtype], line: Ptr[Acc], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(
            row,
            at,
            length,
            line.unsafe_load[width=V, alignment=1](at).cast[dtype](),
        )


@always_inline
def _slide[
    dtype: DType, Acc: DType, //
](row: Ptr[dtype], sums: Ptr[Acc], length: Int, window: Int):
    """Position q of the row is the sum of windows q, q - 1, ..., q - window + 1, which move by one.
    """
    comptime V = lanes[dtype]
    for q in range(0, length, V):
        var total = sums.unsafe_load[width=V, alignment=1](q)
        for k in range(1, window):
            total += sums.unsafe_load[width=V, alignment=1](q - k)
        store_part(row, q, length, total.cast[dtype]())


@always_inline
def _spread[
    Acc: DType, //
](line: Ptr[Acc], sums: Ptr[Acc], length: Int, window: Int, stride: Int):
    """Computes the line for strides of 2 and more, where position stride * q + r is the sum of windows q, q - 1, ... as
    far as their taps r, r + stride, ... exist."""
    comptime V = lanes[Acc]
    var q = 0
    if stride == 2:
        while 2 * q < length:
            var even = SIMD[Acc, V](0)
            var odd = SIMD[Acc, V](0)
            for m in range((window + 1) // 2):
                var row = sums.unsafe_load[width=V, alignment=1](q - m)
                even += row
                if 2 * m + 1 < window:
                    odd += row
            line.unsafe_store[alignment=1](2 * q, even.interleave(odd))
            q += V
    else:
        while stride * q < length:
            for r in range(stride):
                var total = SIMD[Acc, V](0)
                var k = r
                var at = q
                while k < window:
                    total += sums.unsafe_load[width=V, alignment=1](at)
                    at -= 1
                    k += stride
                comptime for j in range(V):
                    line[unsafe_offset=(q + j) * stride + r] = total[j]
            q += V


@no_inline
def _avg_pool_global[
    dtype: DType, //, *, forward: Bool
](result: Ptr[dtype], source: Ptr[dtype], p: PoolingProblem, divisor: Int):
    """Pools planes under one window each, C = 1, forward or backward: a plane is one run.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var plane = p.input_plane()
    var planes = Int(p.batch)

    def share(first: Int, end: Int) {imm}:
        var by = Scalar[Acc](divisor)
        for n in range(first, end):
            comptime if forward:
                var run = source.unsafe_offset(n * plane)
                var total = SIMD[Acc, V](0)
                for at in range(0, plane, V):
                    ask_ahead[V](run, at)
                    total += load_part[V](run, at, plane).cast[Acc]()
                result[unsafe_offset=n] = (total.reduce_add() / by).cast[
                    dtype
                ]()
            else:
                var value = SIMD[dtype, V](
                    (source[unsafe_offset=n].cast[Acc]() / by).cast[dtype]()
                )
                for at in range(0, plane, V):
                    store_part(
                        result.unsafe_offset(n * plane), at, plane, value
                    )

    for_each_share(share, planes, smallest_share(plane * planes, planes))


struct SeparableAvg[forward: Bool](PoolingKernel):
    comptime NAME: StaticString = "separable_avg"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax == NO_ARGMAX and not adaptive

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime if Self.forward:
            _avg_pool_fprop_separable(t.result, t.source, p)
        else:
            _avg_pool_dgrad_separable(t.result, t.source, p)


struct GlobalAvg[forward: Bool](PoolingKernel):
    comptime NAME: StaticString = "global_avg"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax == NO_ARGMAX and not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if not p.is_global():
            return String("no window covers a plane")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _avg_pool_global[forward=Self.forward](
            t.result, t.source, p, p.divisor[False](0, 0, 0)
        )
