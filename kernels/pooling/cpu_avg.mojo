"""Average pooling on the CPU, forward and backward, for any number of channels.

Separable. A row of [W, C] is contiguous in either layout, so the rows that a result row needs are first summed as
whole vectors into one row of sums; then each result takes what lies under, or above, it on W. With C = 1 neighbouring
results share vectors too for strides 1 and 2; other strides finish one by one.
"""

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


@always_inline
def _sum_rows[
    dtype: DType, Acc: DType, //, weighted: Bool
](
    sums: Data[Acc],
    data: Data[dtype],
    rows: List[Int],
    weights: List[Scalar[Acc]],
    length: Int,
):
    """The sum of `length` elements from each of `rows` on, each row times its weight.
    """
    comptime V = lanes[dtype]
    var at = 0
    while at < length:
        var total = SIMD[Acc, V](0)
        for r in range(len(rows)):
            var part = load_part[V](
                data.unsafe_offset(rows[r]), at, length
            ).cast[Acc]()
            comptime if weighted:
                total += part * weights[r]
            else:
                total += part
        sums.unsafe_store[alignment=1](at, total)
        at += V


@no_inline
def avg_pool_fprop_rows[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var length = Int(p.w.input) * channels
    var out_length = Int(p.w.output) * channels
    var include = p.count_include_pad != 0
    var d_axis = AxisTables(p.d, adaptive=adaptive, include_pad=include)
    var h_axis = AxisTables(p.h, adaptive=adaptive, include_pad=include)
    var tables = AxisTables(p.w, adaptive=adaptive, include_pad=include)
    var override = not adaptive and p.divisor_override != 0
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
    var vectors = channels == 1 and not adaptive and stride <= 2

    def share(first: Int, end: Int) {imm}:
        var storage = List[Scalar[Acc]](length=room, fill=0)
        var padded = rebind[Data[Acc]](storage.unsafe_ptr())
        var sums = padded.unsafe_offset(padding if vectors else 0)
        var divisors = List[Scalar[Acc]](length=Int(p.w.output) + V, fill=1)
        if not override:
            for ow in range(Int(p.w.output)):
                divisors[ow] = Scalar[Acc](tables.divisor[ow])
        var by = rebind[Data[Acc]](divisors.unsafe_ptr())
        var rows = List[Int]()
        var unweighted = List[Scalar[Acc]]()
        for unit in range(first, end):
            var slab = unit // Int(p.h.output)
            var oh = unit - slab * Int(p.h.output)
            var n = slab // Int(p.d.output)
            var od = slab - n * Int(p.d.output)
            rows.clear()
            for a in range(d_axis.count[od]):
                var above = (n * Int(p.d.input) + d_axis.start[od] + a) * Int(
                    p.h.input
                ) + h_axis.start[oh]
                for b in range(h_axis.count[oh]):
                    rows.append((above + b) * length)
            _sum_rows[False](sums, x, rows, unweighted, length)
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

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def avg_pool_dgrad_rows[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var length = Int(p.w.input) * channels
    var out_length = Int(p.w.output) * channels
    var include = p.count_include_pad != 0
    var d_axis = AxisTables(p.d, adaptive=adaptive, include_pad=include)
    var h_axis = AxisTables(p.h, adaptive=adaptive, include_pad=include)
    var tables = AxisTables(p.w, adaptive=adaptive, include_pad=include)
    var override = not adaptive and p.divisor_override != 0
    var stride = Int(p.w.stride)
    var window = Int(p.w.window)
    var padding = Int(p.w.padding)
    var vectors = channels == 1 and not adaptive and stride <= 2
    # Windows before the first are zeros.
    var front = window if vectors else 0
    var room = out_length + front + 4 * V + length + padding

    def share(first: Int, end: Int) {imm}:
        var storage = List[Scalar[Acc]](length=room, fill=0)
        var sums = rebind[Data[Acc]](storage.unsafe_ptr().unsafe_offset(front))
        var spread = List[Scalar[Acc]](
            length=length + 2 * padding + 2 * V + window + stride, fill=0
        )
        var line = rebind[Data[Acc]](spread.unsafe_ptr())
        var scales = List[Scalar[Acc]](length=Int(p.w.output), fill=1)
        if not override:
            for ow in range(Int(p.w.output)):
                scales[ow] = 1 / Scalar[Acc](tables.divisor[ow])
        var rows = List[Int]()
        var weights = List[Scalar[Acc]]()
        for unit in range(first, end):
            var slab = unit // Int(p.h.input)
            var h = unit - slab * Int(p.h.input)
            var n = slab // Int(p.d.input)
            var d = slab - n * Int(p.d.input)
            rows.clear()
            weights.clear()
            for od in range(d_axis.above_first[d], d_axis.above_end[d]):
                for oh in range(h_axis.above_first[h], h_axis.above_end[h]):
                    rows.append(
                        ((n * Int(p.d.output) + od) * Int(p.h.output) + oh)
                        * out_length
                    )
                    var divisor = Int(p.divisor_override)
                    if not override:
                        divisor = d_axis.divisor[od] * h_axis.divisor[oh]
                    weights.append(1 / Scalar[Acc](divisor))
            _sum_rows[True](sums, dy, rows, weights, out_length)
            var out = dx.unsafe_offset(unit * length)
            if channels > 1:
                for w in range(Int(p.w.input)):
                    var pixel = out.unsafe_offset(w * channels)
                    var c = 0
                    while c < channels:
                        var total = SIMD[Acc, V](0)
                        for ow in range(
                            tables.above_first[w], tables.above_end[w]
                        ):
                            total += (
                                sums.unsafe_load[width=V, alignment=1](
                                    ow * channels + c
                                )
                                * scales[ow]
                            )
                        store_part(pixel, c, channels, total.cast[dtype]())
                        c += V
                continue
            for ow in range(Int(p.w.output)):
                sums[unsafe_offset=ow] *= scales[ow]
            if vectors:
                for j in range(out_length, out_length + 2 * V):
                    sums[unsafe_offset=j] = 0
                if stride == 1:
                    var w = 0
                    while w < length:
                        var total = SIMD[Acc, V](0)
                        for k in range(window):
                            total += sums.unsafe_load[width=V, alignment=1](
                                w + padding - k
                            )
                        store_part(out, w, length, total.cast[dtype]())
                        w += V
                else:
                    _spread_by_two(line, sums, length + padding, window)
                    var w = 0
                    while w < length:
                        var total = line.unsafe_load[width=V, alignment=1](
                            w + padding
                        )
                        store_part(out, w, length, total.cast[dtype]())
                        w += V
            elif p.w.output == 1 and not tables.some_uncovered:
                var w = 0
                while w < length:
                    store_part(
                        out,
                        w,
                        length,
                        SIMD[dtype, V](sums[unsafe_offset=0].cast[dtype]()),
                    )
                    w += V
            else:
                for w in range(length):
                    var total = Scalar[Acc](0)
                    for ow in range(tables.above_first[w], tables.above_end[w]):
                        total += sums[unsafe_offset=ow]
                    out[unsafe_offset=w] = total.cast[dtype]()

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@always_inline
def _spread_by_two[
    Acc: DType
](line: Data[Acc], sums: Data[Acc], length: Int, window: Int):
    """Stride 2: line[2 q + r] is the sum of the windows q, q - 1, ... whose taps r, r + 2, ... exist.
    """
    comptime V = lanes[Acc]
    var q = 0
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
