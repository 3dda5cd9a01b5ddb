"""Interpolation on the CPU where rows of results have few vectors: along H a sample's rows take the part that channels
have along W."""

from max.gpu.host import DeviceContext

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    for_each_share,
    lanes,
    own_lines,
    pointer_inside,
    smallest_share,
)
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import InterpolationProblem, Spans
from .sums import Columns, Row, sum_columns, sum_rows


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
    var heights = Int(p.h.extent)
    var results = Int(p.h.results) * length
    var along_w = Columns(p.w, channels)
    var along_h = Columns(p.h, length)
    var is_direct = dtype == Acc and along_h.stays_inside[V]()

    def share(first: Int, end: Int) {imm}:
        var storage = own_lines[Acc](heights * length + V)
        var sums = pointer_inside(storage)
        var result_storage = own_lines[Acc](results + V)
        var made = pointer_inside(result_storage)
        var one: List[Row[Acc]] = [Row[Acc](0, 1)]
        for n in range(first, end):
            for h in range(heights):
                var begin = (n * heights + h) * source_length
                sum_columns(
                    sums.unsafe_offset(h * length),
                    x.unsafe_offset(begin),
                    along_w,
                    all_sources - begin,
                )
            var to = made
            comptime if dtype == Acc:
                if is_direct:
                    to = rebind[Ptr[Acc]](y.unsafe_offset(n * results))
            sum_columns(to, sums, along_h, heights * length + V)
            if not is_direct:
                sum_rows(y.unsafe_offset(n * results), made, one, results)
        _ = storage^
        _ = result_storage^

    var units = Int(p.batch)
    for_each_share(share, units, smallest_share(p.size(), units))
    _ = along_w^
    _ = along_h^


struct ShortRows(InterpolationKernel):
    comptime NAME: StaticString = "short_rows"

    @staticmethod
    def refusal[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        if p.d.results != 1 or p.d.extent != 1:
            return String("there are slabs")
        return None

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
