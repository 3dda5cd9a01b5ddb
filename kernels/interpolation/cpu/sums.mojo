"""What the CPU kernels share: weighted sums of rows, and of a row's elements.

A row of [W, C] is contiguous in either layout: rows are summed as vectors whatever the layout. Within a row vectors hold
channels, or, where there is one, single elements.
"""

from ...common.pointer import Ptr
from ...common.vectors import lanes, load_part, store_part
from ..problem import Axis


@fieldwise_init
struct Row[Acc: DType](TrivialRegisterPassable):
    """A row to be added, and its weight."""

    var begin: Int
    var weight: Scalar[Self.Acc]


comptime TOGETHER = 4
"""Rows that are read side by side: more would be more streams than a core follows."""


@always_inline
def _add[
    dtype: DType, result: DType, Acc: DType, //, count: Int, first: Bool
](
    sums: Ptr[result],
    data: Ptr[dtype],
    rows: List[Row[Acc]],
    begin: Int,
    length: Int,
):
    """Adds `count` rows to the sums, or stores theirs; `first` if there are none yet.
    """
    comptime V = lanes[dtype]
    var from_ = Array[Ptr[dtype], count](fill=data)
    var weights = Array[SIMD[Acc, V], count](fill=SIMD[Acc, V](0))
    comptime for r in range(count):
        from_[r] = data.unsafe_offset(rows[begin + r].begin)
        weights[r] = SIMD[Acc, V](rows[begin + r].weight)
    for at in range(0, length, V):
        var total = load_part[V](from_[0], at, length).cast[Acc]() * weights[0]
        comptime for r in range(1, count):
            total += load_part[V](from_[r], at, length).cast[Acc]() * weights[r]
        comptime if not first:
            total += load_part[V](sums, at, length).cast[Acc]()
        store_part(sums, at, length, total.cast[result]())


@always_inline
def sum_rows[
    dtype: DType, result: DType, Acc: DType, //
](sums: Ptr[result], data: Ptr[dtype], rows: List[Row[Acc]], length: Int,):
    """sums = the sum of the rows of `length` elements of `data`, each times its weight. Several passes over the sums, which
    stay in the cache, where there are many rows: `result` is Acc then."""
    var count = len(rows)
    if count == 0:
        comptime V = lanes[dtype]
        for at in range(0, length, V):
            store_part(sums, at, length, SIMD[result, V](0))
        return
    var begin = count % TOGETHER
    if begin == 0:
        begin = TOGETHER
    comptime for n in range(1, TOGETHER + 1):
        if begin == n:
            _add[n, True](sums, data, rows, 0, length)
    while begin < count:
        _add[TOGETHER, False](sums, data, rows, begin, length)
        begin += TOGETHER


@always_inline
def sum_columns[
    dtype: DType, Acc: DType, //
](
    results: Ptr[Acc],
    row: Ptr[dtype],
    axis: Axis[Acc],
    channels: Int,
    readable: Int,
):
    """results [W, C] = the sums along W that the axis names, of a row of [W, C].

    Args:
        results: with room for a vector behind them, which is written.
        row: of the source.
        axis: W.
        channels: C.
        readable: elements from the row's beginning on that may be read.
    """
    if channels == 1:
        if axis.most == 1:
            for w in range(axis.results):
                results[unsafe_offset=Int(w)] = (
                    row[unsafe_offset=Int(axis.first(w))].cast[Acc]()
                    * axis.weights[unsafe_offset=Int(w)]
                    * Scalar[Acc](axis.count(w))
                )
        elif axis.most == 2:
            _pairs(results, row, axis)
        elif axis.most <= 8:
            _singly(results, row, axis, 0)
        else:
            _many_elements(results, row, axis)
        return
    comptime V = lanes[dtype]
    for w in range(axis.results):
        var pixel = results.unsafe_offset(Int(w) * channels)
        var begin = Int(axis.first(w)) * channels
        var weights = axis.weights.unsafe_offset(Int(w) * Int(axis.most))
        var count = Int(axis.count(w))
        for c in range(0, channels, V):
            var total = SIMD[Acc, V](0)
            for k in range(count):
                total += (
                    load_part[V](row, begin + k * channels + c, readable).cast[
                        Acc
                    ]()
                    * weights[unsafe_offset=k]
                )
            # What belongs to the next pixel is written again with that.
            pixel.unsafe_store[alignment=1](c, total)


@always_inline
def _pairs[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], axis: Axis[Acc]):
    """Up to two elements for each result: a vector of results at once."""
    comptime V = lanes[dtype]
    var whole = 0
    comptime if dtype == Acc:
        whole = Int(axis.results) // V * V
        for w in range(0, whole, V):
            var places = axis.places.unsafe_load[width=2 * V, alignment=4](
                2 * w
            ).deinterleave()
            var weights = axis.weights.unsafe_load[width=2 * V, alignment=4](
                2 * w
            ).deinterleave()
            var total = SIMD[Acc, V](0)
            comptime for k in range(2):
                var there = rebind[SIMD[DType.int32, V]](places[1]).gt(
                    SIMD[DType.int32, V](Int32(k))
                )
                var first = rebind[SIMD[DType.int32, V]](places[0])
                var offsets = there.select(first + Int32(k), first)
                var value = row.gather(offsets).cast[Acc]()
                var weight = rebind[SIMD[Acc, V]](weights[k])
                total += there.select(value * weight, SIMD[Acc, V](0))
            results.unsafe_store[alignment=4](w, total)
    _singly(results, row, axis, whole)


@always_inline
def _singly[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], axis: Axis[Acc], begin: Int):
    """Results from `begin` on, one by one."""
    for w in range(Int32(begin), axis.results):
        var from_ = row.unsafe_offset(Int(axis.first(w)))
        var weights = axis.weights.unsafe_offset(Int(w) * Int(axis.most))
        var total = Scalar[Acc](0)
        for k in range(Int(axis.count(w))):
            total += (
                from_[unsafe_offset=k].cast[Acc]() * weights[unsafe_offset=k]
            )
        results[unsafe_offset=Int(w)] = total


@always_inline
def _many_elements[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], axis: Axis[Acc]):
    comptime V = lanes[dtype]
    for w in range(axis.results):
        var from_ = row.unsafe_offset(Int(axis.first(w)))
        var weights = axis.weights.unsafe_offset(Int(w) * Int(axis.most))
        var count = Int(axis.count(w))
        var total = SIMD[Acc, V](0)
        for k in range(0, count, V):
            total += load_part[V](from_, k, count).cast[Acc]() * load_part[V](
                weights, k, count
            )
        results[unsafe_offset=Int(w)] = total.reduce_add()


@fieldwise_init
struct Line(TrivialRegisterPassable):
    """Where a row of results lies."""

    var n: Int
    var d: Int32
    var h: Int32


@always_inline
def line_of(unit: Int, depth: Int32, height: Int32) -> Line:
    """Of row number `unit` of [N, depth, height] rows."""
    var slab = unit // Int(height)
    return Line(
        slab // Int(depth),
        Int32(slab % Int(depth)),
        Int32(unit % Int(height)),
    )
