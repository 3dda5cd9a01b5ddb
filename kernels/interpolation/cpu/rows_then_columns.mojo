"""Interpolation on the CPU where there are no more rows of results than of elements: rows first.

The rows that a row of results reads are summed as vectors, then the sum's elements along W.
"""

from max.gpu.host import DeviceContext

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    apart,
    for_each_share,
    lanes,
    own_lines,
    pointer_inside,
    smallest_share,
)
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import InterpolationProblem, Spans
from .sums import (
    TOGETHER,
    Columns,
    Row,
    line_of,
    read_rows,
    sum_columns,
    sum_rows,
)


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
    var most_rows = Int(p.d.most) * Int(p.h.most)
    var columns = Columns(p.w, channels)
    var is_direct = dtype == Acc and columns.stays_inside[V]()

    def share(first: Int, end: Int) {imm}:
        var storage = own_lines[Acc](source_length + V)
        var sums = pointer_inside(storage)
        var result_storage = own_lines[Acc](length + V)
        var results = pointer_inside(result_storage)
        var rows = List[Row[Acc]](capacity=apart(2 * most_rows))
        var one: List[Row[Acc]] = [Row[Acc](0, 1)]
        for unit in range(first, end):
            var line = line_of(unit, p.d.results, p.h.results)
            read_rows(rows, p, line, source_length)
            var result = y.unsafe_offset(unit * length)
            var is_once = len(rows) <= TOGETHER or dtype == Acc
            if len(rows) == 0 or (columns.is_identity and is_once):
                sum_rows(result, x, rows, length)
                continue
            var to = results
            comptime if dtype == Acc:
                if is_direct:
                    to = rebind[Ptr[Acc]](result)
            if len(rows) == 1 and rows[0].weight == 1:
                var begin = rows[0].begin
                sum_columns(
                    to, x.unsafe_offset(begin), columns, all_sources - begin
                )
            else:
                sum_rows(sums, x, rows, source_length)
                sum_columns(to, sums, columns, source_length + V)
            if not is_direct:
                sum_rows(result, results, one, length)
        _ = storage^
        _ = result_storage^

    var units = Int(p.batch) * Int(p.d.results) * Int(p.h.results)
    var work = max(p.size(), Int(p.batch) * p.sources())
    for_each_share(share, units, smallest_share(work, units))


struct RowsThenColumns(InterpolationKernel):
    comptime NAME: StaticString = "rows_then_columns"

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
