"""Windows on a CPU over many planes with short rows: a table, made once, says for each element of a plane where it lies.

Runs along W would be shorter than a vector; a vector's elements are gathered instead, wherever they lie in the plane.
"""

from std.math import ceildiv

from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import (
    for_each_share,
    lanes,
    smallest_share,
    store_part,
)
from .problem import Hits, WindowAxis, WindowsProblem

comptime FEWEST = 32
"""Planes that pay for a table."""
comptime SPARSE = 3
"""Elements of a plane for each that columns lie over, from which on the others are only set to zero."""
comptime LONGEST = 1 << 15
"""Entries that the cache holds beside a plane."""


@fieldwise_init
struct OffsetTable(Movable):
    """`depth` places in a plane for each of `count` elements, -1 for none."""

    var offsets: List[Int32]
    """[depth, count], each part of whole vectors."""
    var count: Int
    var padded: Int
    var depth: Int

    def __init__(out self, count: Int, depth: Int, vector: Int):
        self.count = count
        self.depth = depth
        self.padded = ceildiv(count, vector) * vector
        self.offsets = List[Int32](length=self.padded * depth, fill=-1)


@always_inline
def _taken[
    dtype: DType, //, V: Int
](plane: Ptr[dtype], table: OffsetTable, at: Int) -> SIMD[dtype, V]:
    """V elements of the plane, zeros where there is none."""
    var places = table.offsets.unsafe_ptr().unsafe_load[width=V, alignment=4](
        at
    )
    var there = places.ge(SIMD[DType.int32, V](0))
    var inside = there.select(places, SIMD[DType.int32, V](0))
    comptime if dtype == accumulation_type[dtype]:
        return there.select(plane.gather(inside), SIMD[dtype, V](0))
    else:
        # The processor gathers whole words alone.
        var values = SIMD[dtype, V](0)
        comptime for lane in range(V):
            values[lane] = plane[unsafe_offset=Int(inside[lane])]
        return there.select(values, SIMD[dtype, V](0))


@no_inline
def _planes[
    dtype: DType
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    table: OffsetTable,
    source_plane: Int,
    units: Int,
):
    """Each element of a result's plane = the sum of those that the table names.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            var plane = source.unsafe_offset(n * source_plane)
            var to = result.unsafe_offset(n * table.count)
            for at in range(0, table.count, V):
                var total = _taken[V](plane, table, at)
                if table.depth > 1:
                    var sum = total.cast[Acc]()
                    for k in range(1, table.depth):
                        sum += _taken[V](
                            plane, table, k * table.padded + at
                        ).cast[Acc]()
                    total = sum.cast[dtype]()
                store_part(to, at, table.count, total)

    var work = max(table.count * table.depth, source_plane) * units
    for_each_share(share, units, smallest_share(work, units))


def _columns_plane(p: WindowsProblem) -> Int:
    return p.columns_size() // Int(p.batch)


def lay_out_takes[dtype: DType](p: WindowsProblem) -> Bool:
    """Whether lay_out_by_table is faster than runs along W."""
    return (
        Int(p.batch) >= FEWEST
        and Int(p.w.windows) < lanes[dtype]
        and _columns_plane(p) <= LONGEST
    )


def _elements(p: WindowsProblem, vector: Int) -> OffsetTable:
    """Of a plane's columns, taps first: the element of x under each."""
    var table = OffsetTable(_columns_plane(p), 1, vector)
    var i = 0
    for r in range(p.h.taps):
        for s in range(p.w.taps):
            for window in range(p.h.windows):
                var h = p.h.element(window, r)
                for q in range(p.w.windows):
                    var w = p.w.element(q, s)
                    if p.h.is_inside(h) and p.w.is_inside(w):
                        table.offsets[i] = h * p.w.extent + w
                    i += 1
    return table^


def lay_out_by_table[
    dtype: DType, //
](columns: Ptr[dtype], x: Ptr[dtype], p: WindowsProblem):
    """Columns of x, taps first."""
    var table = _elements(p, lanes[dtype])
    var plane = Int(p.h.extent) * Int(p.w.extent)
    _planes(columns, x, table, plane, Int(p.batch))
    _ = table^


def _most_hits(axis: WindowAxis) -> Int:
    var most = 0
    for element in range(axis.extent):
        most = max(most, Int(axis.hits(element).count))
    return most


def add_up_takes[dtype: DType](p: WindowsProblem) -> Bool:
    """Whether add_up_by_table is faster than runs along W."""
    if Int(p.batch) < FEWEST:
        return False
    var along = _most_hits(p.w)
    var is_short = Int(p.w.extent) < lanes[dtype] or (
        along <= 1 and p.w.stride > 1
    )
    var plane = Int(p.h.extent) * Int(p.w.extent)
    var entries = along * _most_hits(p.h) * plane
    # Where stride and dilation have a common divisor most elements have none.
    var are_used = entries <= 2 * _columns_plane(p) + plane
    return is_short and are_used and entries <= LONGEST


def _scatter[
    dtype: DType, //
](x: Ptr[dtype], columns: Ptr[dtype], p: WindowsProblem):
    """As add_up_by_table, for columns that lie over few elements, each over one of its own.
    """
    comptime V = lanes[dtype]
    var plane = Int(p.h.extent) * Int(p.w.extent)
    var source = _columns_plane(p)
    var table = _elements(p, V)

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            var to = x.unsafe_offset(n * plane)
            var from_ = columns.unsafe_offset(n * source)
            for at in range(0, plane, V):
                store_part(to, at, plane, SIMD[dtype, V](0))
            for i in range(source):
                var element = Int(table.offsets[i])
                if element >= 0:
                    to[unsafe_offset=element] = from_[unsafe_offset=i]

    for_each_share(share, Int(p.batch), smallest_share(p.size(), Int(p.batch)))
    _ = table^


def add_up_by_table[
    dtype: DType, //
](x: Ptr[dtype], columns: Ptr[dtype], p: WindowsProblem):
    """Each element of x is the sum of what columns, taps first, have for it."""
    var plane = Int(p.h.extent) * Int(p.w.extent)
    var depth = max(_most_hits(p.h) * _most_hits(p.w), 1)
    if depth == 1 and SPARSE * _columns_plane(p) <= plane:
        _scatter(x, columns, p)
        return
    var table = OffsetTable(plane, depth, lanes[dtype])
    var all_along = List[Hits](capacity=Int(p.w.extent))
    for w in range(p.w.extent):
        all_along.append(p.w.hits(w))
    for h in range(p.h.extent):
        var above = p.h.hits(h)
        for w in range(p.w.extent):
            var along = all_along[Int(w)]
            var at = Int(h * p.w.extent + w)
            for a in range(above.count):
                for b in range(along.count):
                    table.offsets[at] = Int32(
                        p.at_taps_first(
                            0,
                            above.tap + a * p.h.every(),
                            along.tap + b * p.w.every(),
                            above.window - a * p.h.drop(),
                            along.window - b * p.w.drop(),
                        )
                    )
                    at += table.padded
    _planes(x, columns, table, _columns_plane(p), Int(p.batch))
    _ = table^
