"""Windows on a CPU over many planes with short rows, by a table."""

from ..common.plane_tables import (
    MIN_PLANES,
    MAX_TABLE_ENTRIES,
    OffsetTable,
    take_planes,
)
from ..common.pointer import Ptr
from ..common.vectors import for_each_share, lanes, smallest_share, store_part
from .problem import Hits, WindowAxis, WindowsProblem

comptime SPARSE = 3
"""Elements of a plane for each that columns lie over, from which on the others are only set to zero."""


def _columns_plane(p: WindowsProblem) -> Int:
    return p.columns_size() // Int(p.batch)


def lay_out_takes[dtype: DType](p: WindowsProblem) -> Bool:
    """Returns whether lay_out_by_table is faster than runs along W."""
    return (
        Int(p.batch) >= MIN_PLANES
        and Int(p.w.windows) < lanes[dtype]
        and _columns_plane(p) <= MAX_TABLE_ENTRIES
    )


def _elements(p: WindowsProblem, vector: Int) -> OffsetTable:
    """Returns the element of x under each element of a plane's columns, taps first.
    """
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
    take_planes(columns, x, table, plane, Int(p.batch))
    _ = table^


def _most_hits(axis: WindowAxis) -> Int:
    var most = 0
    for element in range(axis.extent):
        most = max(most, Int(axis.hits(element).count))
    return most


def add_up_takes[dtype: DType](p: WindowsProblem) -> Bool:
    """Returns whether add_up_by_table is faster than runs along W."""
    if Int(p.batch) < MIN_PLANES:
        return False
    var along = _most_hits(p.w)
    var is_short = Int(p.w.extent) < lanes[dtype] or (
        along <= 1 and p.w.stride > 1
    )
    var plane = Int(p.h.extent) * Int(p.w.extent)
    var entries = along * _most_hits(p.h) * plane
    # Where stride and dilation have a common divisor most elements have none.
    var are_used = entries <= 2 * _columns_plane(p) + plane
    return is_short and are_used and entries <= MAX_TABLE_ENTRIES


def _scatter[
    dtype: DType, //
](x: Ptr[dtype], columns: Ptr[dtype], p: WindowsProblem):
    """Does the work of add_up_by_table for columns that lie over few elements, each over one of its own.
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
    """Adds up columns, taps first: each element of x is the sum of its elements in the columns.
    """
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
    take_planes(x, columns, table, _columns_plane(p), Int(p.batch))
    _ = table^
