"""Interpolation on the CPU where there are more rows of results than of elements: W first.

The rows that a row of results reads are summed along W, each once for all results that read it, and kept in as many
places as a result reads rows. The remaining work is a sum of a few rows, as vectors.
"""

from max.gpu.host import DeviceContext
from std.ffi import external_call
from std.sys import size_of

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    apart,
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import Axis, InterpolationProblem, Spans
from .sums import (
    TOGETHER,
    Columns,
    Row,
    line_of,
    read_rows,
    sum_columns,
    sum_rows,
)

comptime LONG_COPY = 512
"""Bytes from which on the C library copies faster."""


def _repeats[Acc: DType, //](axis: Axis[Acc]) -> List[Bool]:
    """Returns for each result whether it reads the same elements as the one before, with the same weights.
    """
    var found = List[Bool](length=Int(axis.results), fill=False)
    for i in range(Int32(1), axis.results):
        var count = axis.count(i)
        if axis.first(i) != axis.first(i - 1) or count != axis.count(i - 1):
            continue
        found[Int(i)] = True
        for k in range(count):
            if axis.weight(i, k) != axis.weight(i - 1, k):
                found[Int(i)] = False
    return found^


def _places[Acc: DType, //](axis: Axis[Acc]) -> List[Int]:
    """Returns for each result in which of `most` places its first element is kept.
    """
    var found = List[Int](capacity=Int(axis.results))
    for i in range(axis.results):
        found.append(Int(axis.first(i) % axis.most))
    return found^


@always_inline
def _copy[
    dtype: DType, //
](result: Ptr[dtype], source: Ptr[dtype], length: Int):
    if length * size_of[dtype]() >= LONG_COPY:
        _ = external_call["memcpy", Ptr[dtype]](
            result, source, length * size_of[dtype]()
        )
        return
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(result, at, length, load_part[V](source, at, length))


@no_inline
def _interpolate[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: InterpolationProblem[accumulation_type[dtype]],
):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var length = Int(p.w.results) * channels
    var source_length = Int(p.w.extent) * channels
    var all_sources = Int(p.batch) * p.sources()
    var depth = Int(p.d.most)
    var height = Int(p.h.most)
    var room = length + V
    var h_repeats = _repeats(p.h)
    var d_repeats = _repeats(p.d)
    var d_places = _places(p.d)
    var h_places = _places(p.h)
    var rows_of_slab = Int(p.h.results)
    var columns = Columns(p.w, channels)
    # A row of results is a sum of few rows as they lie, or the columns of one.
    var reads_rows = columns.is_identity and (
        dtype == Acc or depth * height <= TOGETHER
    )
    var is_direct = (
        dtype == Acc and depth * height == 1 and columns.stays_inside[V]()
    )

    def share(first: Int, end: Int) {imm}:
        var storage = own_lines[Acc](depth * height * room)
        var kept = pointer_inside(storage)
        # Which row of x lies in each place.
        var held = List[Int](capacity=apart(depth * height))
        for _ in range(depth * height):
            held.append(-1)
        var rows = List[Row[Acc]](capacity=apart(2 * depth * height))
        # Short rows have no time for divisions: one row on for each unit.
        var line = line_of(first, p.d.results, p.h.results)
        line.h -= 1
        for unit in range(first, end):
            line.h += 1
            if line.h == p.h.results:
                line.h = 0
                line.d += 1
                if line.d == p.d.results:
                    line.d = 0
                    line.n += 1
            var result = y.unsafe_offset(unit * length)
            var back = 0
            if h_repeats[Int(line.h)]:
                back = 1
            elif d_repeats[Int(line.d)]:
                back = rows_of_slab
            if back > 0 and unit - back >= first:
                _copy(result, y.unsafe_offset((unit - back) * length), length)
                continue
            if reads_rows or is_direct:
                read_rows(rows, p, line, source_length)
                if reads_rows or len(rows) == 0:
                    sum_rows(result, x, rows, length)
                    continue
                if rows[0].weight == 1:
                    comptime if dtype == Acc:
                        var begin = rows[0].begin
                        sum_columns(
                            rebind[Ptr[Acc]](result),
                            x.unsafe_offset(begin),
                            columns,
                            all_sources - begin,
                        )
                    continue
            rows.clear()
            var h_first = Int(p.h.first(line.h))
            var slab_place = d_places[Int(line.d)]
            for a in range(p.d.count(line.d)):
                var d = Int(p.d.first(line.d) + a)
                var slab = (line.n * Int(p.d.extent) + d) * Int(p.h.extent)
                var row_place = h_places[Int(line.h)]
                for b in range(p.h.count(line.h)):
                    var source = slab + h_first + Int(b)
                    var place = slab_place * height + row_place
                    row_place = row_place + 1 if row_place + 1 < height else 0
                    if held[place] != source:
                        held[place] = source
                        var begin = source * source_length
                        sum_columns(
                            kept.unsafe_offset(place * room),
                            x.unsafe_offset(begin),
                            columns,
                            all_sources - begin,
                        )
                    var weight = p.d.weight(line.d, a) * p.h.weight(line.h, b)
                    rows.append(Row[Acc](place * room, weight))
                slab_place = slab_place + 1 if slab_place + 1 < depth else 0
            if len(rows) <= 4 or dtype == Acc:
                sum_rows(result, kept, rows, length)
            else:
                _in_parts(result, kept, rows, length)
        _ = storage^

    var units = Int(p.batch) * Int(p.d.results) * Int(p.h.results)
    for_each_share(share, units, smallest_share(p.size(), units))


@no_inline
def _in_parts[
    dtype: DType, Acc: DType, //
](result: Ptr[dtype], kept: Ptr[Acc], rows: List[Row[Acc]], length: Int,):
    """The sum of more rows than are added at once is kept in its own dtype until it is rounded.
    """
    comptime PART = 1024
    var storage = own_lines[Acc](PART)
    var sums = pointer_inside(storage)
    var one: List[Row[Acc]] = [Row[Acc](0, 1)]
    for begin in range(0, length, PART):
        var count = min(PART, length - begin)
        sum_rows(sums, kept.unsafe_offset(begin), rows, count)
        sum_rows(result.unsafe_offset(begin), sums, one, count)
    _ = storage^


struct ColumnsThenRows(InterpolationKernel):
    comptime NAME: StaticString = "columns_then_rows"

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        _interpolate(t.y, t.x, p)
