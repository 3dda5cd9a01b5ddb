"""Windows on a CPU: runs of neighbours are copied, or added up, as vectors."""

from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import (
    apart,
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from .cpu_tables import (
    add_up_by_table,
    add_up_takes,
    lay_out_by_table,
    lay_out_takes,
)
from .problem import WindowsProblem


@fieldwise_init
struct WindowSpan(TrivialRegisterPassable):
    """Windows of a row that have an element under one tap."""

    var begin: Int
    var count: Int
    var element: Int
    """Under the first of them."""


@always_inline
def _copy[dtype: DType, //](run: Ptr[dtype], source: Ptr[dtype], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(run, at, length, load_part[V](source, at, length))


@always_inline
def _add[
    dtype: DType, Acc: DType, //
](sums: Ptr[Acc], source: Ptr[dtype], length: Int):
    """Adds `source` to `sums`, which have room for a vector behind them: sums stored as whole vectors are loaded again
    sooner than sums stored in parts."""
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        var old = sums.unsafe_load[width=V, alignment=1](at)
        var new = load_part[V](source, at, length).cast[Acc]()
        sums.unsafe_store[alignment=1](at, old + new)


@always_inline
def _clear[dtype: DType, //](run: Ptr[dtype], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(run, at, length, SIMD[dtype, V](0))


@no_inline
def lay_out_cpu[
    dtype: DType, //, *, taps_first: Bool
](columns: Ptr[dtype], x: Ptr[dtype], p: WindowsProblem):
    """Columns of x."""
    comptime if taps_first:
        if lay_out_takes[dtype](p):
            lay_out_by_table(columns, x, p)
        else:
            _lay_out_taps_first(columns, x, p)
    else:
        _lay_out_windows_first(columns, x, p)


@always_inline
def _lay_out_taps_first[
    dtype: DType, //
](columns: Ptr[dtype], x: Ptr[dtype], p: WindowsProblem):
    comptime V = lanes[dtype]
    var windows = Int(p.w.windows)
    var units = Int(p.batch) * Int(p.h.taps) * Int(p.w.taps)
    var plane = Int(p.h.windows) * windows

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var s = Int32(unit % Int(p.w.taps))
            var r = Int32(unit // Int(p.w.taps) % Int(p.h.taps))
            var n = unit // (Int(p.w.taps) * Int(p.h.taps))
            var begin = Int(p.w.first_inside(s))
            var end = max(Int(p.w.end_inside(s)), begin)
            var stride = Int(p.w.stride)
            for window in range(Int(p.h.windows)):
                var h = p.h.element(Int32(window), r)
                var result = columns.unsafe_offset(
                    unit * plane + window * windows
                )
                if not p.h.is_inside(h):
                    _clear(result, windows)
                    continue
                var row = x.unsafe_offset(
                    (n * Int(p.h.extent) + Int(h)) * Int(p.w.extent)
                )
                if windows < V:
                    # Short rows, which several calls would cost more than their elements.
                    var w = p.w.element(0, s)
                    for q in range(windows):
                        var value = Scalar[dtype](0)
                        if p.w.is_inside(w):
                            value = row[unsafe_offset=Int(w)]
                        result[unsafe_offset=q] = value
                        w += p.w.stride
                    continue
                var from_ = row.unsafe_offset(Int(p.w.element(Int32(begin), s)))
                _clear(result, begin)
                if stride == 1:
                    _copy(result.unsafe_offset(begin), from_, end - begin)
                else:
                    for k in range(end - begin):
                        result[unsafe_offset=begin + k] = from_[
                            unsafe_offset=k * stride
                        ]
                _clear(result.unsafe_offset(end), windows - end)

    for_each_share(share, units, smallest_share(p.columns_size(), units))


@always_inline
def _lay_out_windows_first[
    dtype: DType, //
](columns: Ptr[dtype], x: Ptr[dtype], p: WindowsProblem):
    var channels = Int(p.channels)
    var units = Int(p.batch) * Int(p.h.windows)
    var joined = p.w.dilation == 1

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // Int(p.h.windows)
            var window = Int32(unit % Int(p.h.windows))
            var result = columns.unsafe_offset(
                p.at_windows_first(n, window, 0, 0, 0)
            )
            for q in range(p.w.windows):
                for r in range(p.h.taps):
                    var h = p.h.element(window, r)
                    var taps = Int(p.w.taps)
                    if not p.h.is_inside(h):
                        _clear(result, taps * channels)
                        result = result.unsafe_offset(taps * channels)
                        continue
                    var row = x.unsafe_offset(
                        (n * Int(p.h.extent) + Int(h)) * p.row_length()
                    )
                    if joined:
                        # The taps of a row are neighbours.
                        var w = Int(p.w.element(q, 0))
                        var begin = min(max(-w, 0), taps)
                        var end = max(min(Int(p.w.extent) - w, taps), begin)
                        _clear(result, begin * channels)
                        _copy(
                            result.unsafe_offset(begin * channels),
                            row.unsafe_offset((w + begin) * channels),
                            (end - begin) * channels,
                        )
                        _clear(
                            result.unsafe_offset(end * channels),
                            (taps - end) * channels,
                        )
                        result = result.unsafe_offset(taps * channels)
                        continue
                    for s in range(p.w.taps):
                        var w = p.w.element(q, s)
                        if p.w.is_inside(w):
                            _copy(
                                result,
                                row.unsafe_offset(Int(w) * channels),
                                channels,
                            )
                        else:
                            _clear(result, channels)
                        result = result.unsafe_offset(channels)

    for_each_share(share, units, smallest_share(p.columns_size(), units))


@no_inline
def add_up_cpu[
    dtype: DType, //, *, taps_first: Bool
](x: Ptr[dtype], columns: Ptr[dtype], p: WindowsProblem):
    """Adds up columns: each element of x is the sum of its elements in the columns, always in the same order.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    comptime if taps_first:
        if add_up_takes[dtype](p):
            add_up_by_table(x, columns, p)
            return
    var length = p.row_length()
    var units = Int(p.batch) * Int(p.h.extent)

    def share(first: Int, last: Int) {imm}:
        var storage = own_lines[Acc](length + V)
        var sums = pointer_inside(storage)
        # Of a row of windows, for each tap: the first that is inside, how many are, and the element under the first.
        var spans = List[WindowSpan](capacity=apart(Int(p.w.taps)))
        for s in range(p.w.taps):
            var begin = p.w.first_inside(s)
            var count = max(p.w.end_inside(s) - begin, 0)
            spans.append(
                WindowSpan(Int(begin), Int(count), Int(p.w.element(begin, s)))
            )
        for unit in range(first, last):
            var n = unit // Int(p.h.extent)
            var h = Int32(unit % Int(p.h.extent))
            for at in range(0, length, V):
                sums.unsafe_store[alignment=1](at, SIMD[Acc, V](0))
            var hits = p.h.hits(h)
            for k in range(hits.count):
                var r = hits.tap + k * p.h.every()
                var window = hits.window - k * p.h.drop()
                comptime if taps_first:
                    var run = columns.unsafe_offset(
                        p.at_taps_first(n, r, 0, window, 0)
                    )
                    for span in spans:
                        _add_taps_first(sums, run, span, Int(p.w.stride))
                        run = run.unsafe_offset(
                            Int(p.h.windows) * Int(p.w.windows)
                        )
                else:
                    _add_windows_first(sums, columns, p, n, r, window)
            var result = x.unsafe_offset(unit * length)
            for at in range(0, length, V):
                store_part(
                    result,
                    at,
                    length,
                    sums.unsafe_load[width=V, alignment=1](at).cast[dtype](),
                )
        _ = storage^

    for_each_share(share, units, smallest_share(p.columns_size(), units))


@always_inline
def _add_taps_first[
    dtype: DType, Acc: DType, //
](sums: Ptr[Acc], run: Ptr[dtype], span: WindowSpan, stride: Int):
    """A row of windows, one tap."""
    var row = run.unsafe_offset(span.begin)
    var to = sums.unsafe_offset(span.element)
    if stride == 1:
        _add(to, row, span.count)
        return
    for k in range(span.count):
        to[unsafe_offset=k * stride] += row[unsafe_offset=k].cast[Acc]()


@always_inline
def _add_windows_first[
    dtype: DType, Acc: DType, //
](
    sums: Ptr[Acc],
    columns: Ptr[dtype],
    p: WindowsProblem,
    n: Int,
    r: Int32,
    window: Int32,
):
    """A row of windows, row r of their taps."""
    var channels = Int(p.channels)
    var taps = Int(p.w.taps)
    for q in range(p.w.windows):
        var run = columns.unsafe_offset(p.at_windows_first(n, window, q, r, 0))
        if p.w.dilation == 1:
            var w = Int(p.w.element(q, 0))
            var begin = min(max(-w, 0), taps)
            var end = max(min(Int(p.w.extent) - w, taps), begin)
            _add(
                sums.unsafe_offset((w + begin) * channels),
                run.unsafe_offset(begin * channels),
                (end - begin) * channels,
            )
            continue
        for s in range(p.w.taps):
            var w = p.w.element(q, s)
            if p.w.is_inside(w):
                _add(
                    sums.unsafe_offset(Int(w) * channels),
                    run.unsafe_offset(Int(s) * channels),
                    channels,
                )
