"""Code that the CPU kernels share: weighted sums of rows, and of a row's elements.

A row of [W, C] is contiguous in either layout: rows are summed as vectors whatever the layout. Within a row vectors
hold channels, or, where there is one, single elements.
"""

from std.math import ceildiv

from ...common.pointer import Ptr
from ...common.vectors import lanes, load_part, store_part
from ..problem import Axis, InterpolationProblem


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
    """sums = the sum of the rows of `length` elements of `data`, each times its weight. Several passes over the sums,
    which stay in the cache, where there are many rows: `result` is Acc then."""
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


comptime SPARSE = 4
"""Results for each that reads something from which on the others are not looked at."""

comptime FEW_LEFT = 4
"""Results that are computed one by one rather than as a vector."""


struct Columns[Acc: DType](Movable):
    """The axis W, with properties of all its results."""

    var axis: Axis[Self.Acc]
    var channels: Int
    var is_identity: Bool
    """Whether every result equals the element in its place."""
    var is_copy: Bool
    """Whether every result equals one element."""
    var reading: List[Int32]
    """The results that read something, where these are few; else none."""
    var first: List[Int32]
    """First elements as the axis has them, padded to whole vectors, where no result reads more than two elements of a
    row of its own; likewise `count` and `weights`, with the weights of one tap behind those of the other."""
    var count: List[Int32]
    var weights: List[Scalar[Self.Acc]]

    def __init__(out self, axis: Axis[Self.Acc], channels: Int):
        self.axis = axis
        self.channels = channels
        self.is_identity = axis.results == axis.extent
        self.is_copy = axis.most == 1
        var count = 0
        for w in range(axis.results):
            if axis.count(w) > 0:
                count += 1
            if axis.count(w) != 1 or axis.weight(w, 0) != 1:
                self.is_copy = False
            if axis.first(w) != w:
                self.is_identity = False
        self.is_identity = self.is_identity and self.is_copy
        self.reading = List[Int32]()
        if SPARSE * count <= Int(axis.results):
            for w in range(axis.results):
                if axis.count(w) > 0:
                    self.reading.append(w)
        self.first = List[Int32]()
        self.count = List[Int32]()
        self.weights = List[Scalar[Self.Acc]]()
        if channels != 1 or axis.most > 2 or len(self.reading) > 0:
            return
        comptime V = lanes[Self.Acc]
        var padded = ceildiv(Int(axis.results), V) * V
        for i in range(padded):
            var w = min(Int32(i), axis.results - 1)
            self.first.append(axis.first(w))
            self.count.append(axis.count(w))
        for k in range(axis.most):
            for i in range(padded):
                self.weights.append(
                    axis.weight(min(Int32(i), axis.results - 1), k)
                )

    def are_few(self) -> Bool:
        return len(self.reading) > 0

    def stays_inside[V: Int](self) -> Bool:
        """Returns whether sum_columns writes no more than its results."""
        return self.channels == 1 or self.channels % V == 0 or self.are_few()


@always_inline
def sum_columns[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], columns: Columns[Acc], readable: Int,):
    """results [W, C] = the sums along W that the axis names, of a row of [W, C].

    Args:
        results: with room for a vector behind them, which is written, unless `columns` stay inside.
        row: of the source.
        columns: W and C.
        readable: elements from the row's beginning on that may be read.
    """
    comptime V = lanes[dtype]
    var axis = columns.axis
    var channels = columns.channels
    if columns.are_few():
        var count = Int(axis.results) * channels
        for at in range(0, count, V):
            store_part(results, at, count, SIMD[Acc, V](0))
        for w in columns.reading:
            if channels == 1:
                _one(results, row, axis, w)
            else:
                _pixel[True](results, row, axis, w, channels, readable)
    elif channels > 1:
        for w in range(axis.results):
            _pixel[False](results, row, axis, w, channels, readable)
    elif dtype == Acc and columns.is_copy:
        _copies(results, row, columns)
    elif dtype == Acc and axis.most == 1:
        _few[1](results, row, columns)
    elif dtype == Acc and axis.most == 2:
        _few[2](results, row, columns)
    elif axis.most <= 8:
        for w in range(axis.results):
            _one(results, row, axis, w)
    else:
        _many_elements(results, row, axis)


@always_inline
def _pixel[
    dtype: DType, Acc: DType, //, alone: Bool
](
    results: Ptr[Acc],
    row: Ptr[dtype],
    axis: Axis[Acc],
    w: Int32,
    channels: Int,
    readable: Int,
):
    """Computes all channels of result `w`. Elements of the next result, which is computed after it, are overwritten
    unless `alone`."""
    comptime V = lanes[dtype]
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
        comptime if alone:
            store_part(pixel, c, channels, total)
        else:
            pixel.unsafe_store[alignment=1](c, total)


@always_inline
def _copies[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], columns: Columns[Acc]):
    """Copies one element for each result."""
    comptime V = lanes[Acc]
    var end = Int(columns.axis.results)
    var firsts = columns.first.unsafe_ptr()
    for w in range(0, end, V):
        if end - w <= FEW_LEFT:
            for last in range(Int32(w), Int32(end)):
                _one(results, row, columns.axis, last)
            return
        var first = firsts.unsafe_load[width=V, alignment=4](w)
        store_part(results, w, end, row.gather(first).cast[Acc]())


@always_inline
def _few[
    dtype: DType, Acc: DType, //, most: Int
](results: Ptr[Acc], row: Ptr[dtype], columns: Columns[Acc]):
    """Sums up to `most` elements for each result, where `most` is 1 or 2: a vector of results at once.
    """
    comptime V = lanes[Acc]
    var end = Int(columns.axis.results)
    var padded = len(columns.first)
    var firsts = columns.first.unsafe_ptr()
    var counts = columns.count.unsafe_ptr()
    var weights = columns.weights.unsafe_ptr()
    for w in range(0, end, V):
        if end - w <= FEW_LEFT:
            for last in range(Int32(w), Int32(end)):
                _one(results, row, columns.axis, last)
            return
        var first = firsts.unsafe_load[width=V, alignment=4](w)
        var count = counts.unsafe_load[width=V, alignment=4](w)
        var total = SIMD[Acc, V](0)
        comptime for k in range(most):
            var there = count.gt(SIMD[DType.int32, V](Int32(k)))
            var offsets = there.select(first + Int32(k), first)
            var value = row.gather(offsets).cast[Acc]()
            var weight = weights.unsafe_load[width=V, alignment=4](
                k * padded + w
            )
            total += there.select(value * weight, SIMD[Acc, V](0))
        store_part(results, w, end, total)


@always_inline
def _one[
    dtype: DType, Acc: DType, //
](results: Ptr[Acc], row: Ptr[dtype], axis: Axis[Acc], w: Int32):
    """Result `w`."""
    var from_ = row.unsafe_offset(Int(axis.first(w)))
    var weights = axis.weights.unsafe_offset(Int(w) * Int(axis.most))
    var total = Scalar[Acc](0)
    for k in range(Int(axis.count(w))):
        total += from_[unsafe_offset=k].cast[Acc]() * weights[unsafe_offset=k]
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
    """The position of a row of results."""

    var n: Int
    var d: Int32
    var h: Int32


@always_inline
def line_of(unit: Int, depth: Int32, height: Int32) -> Line:
    """Returns the position of row number `unit` of [N, depth, height] rows."""
    var slab = unit // Int(height)
    return Line(
        slab // Int(depth),
        Int32(slab % Int(depth)),
        Int32(unit % Int(height)),
    )


@always_inline
def read_rows[
    Acc: DType, //
](
    mut rows: List[Row[Acc]],
    p: InterpolationProblem[Acc],
    line: Line,
    source_length: Int,
):
    """rows = the rows of x that a row of results reads."""
    rows.clear()
    for a in range(p.d.count(line.d)):
        var d = Int(p.d.first(line.d) + a)
        for b in range(p.h.count(line.h)):
            var h = Int(p.h.first(line.h) + b)
            var source = (line.n * Int(p.d.extent) + d) * Int(p.h.extent) + h
            var weight = p.d.weight(line.d, a) * p.h.weight(line.h, b)
            rows.append(Row[Acc](source * source_length, weight))
