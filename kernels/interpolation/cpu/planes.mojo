"""Interpolation on the CPU of many contiguous samples that are short along W, or of which few results read anything: a
sample's axes are one.

Where a result reads one row at most, its elements are neighbours in the sample: one table for all axes, made once, says
for each result which.
"""

from max.gpu.host import DeviceContext

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import for_each_share, smallest_share
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import Axis, InterpolationProblem, Spans
from .sums import Columns, sum_columns


def _interpolate[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], p: InterpolationProblem[dtype]):
    var most = Int(p.w.most)
    var results = p.results()
    var places = List[Int32](capacity=2 * results)
    var weights = List[Scalar[dtype]](capacity=most * results)
    for d in range(p.d.results):
        for h in range(p.h.results):
            var is_read = p.d.count(d) * p.h.count(h)
            var row = p.d.first(d) * p.h.extent + p.h.first(h)
            var weight = p.d.weight(d, 0) * p.h.weight(h, 0)
            for w in range(p.w.results):
                var count = is_read * p.w.count(w)
                var first = row * p.w.extent + p.w.first(w)
                places.append(first if count > 0 else Int32(0))
                places.append(count)
                for k in range(p.w.most):
                    weights.append(weight * p.w.weight(w, k))
    var extent = p.sources()
    var axis = Axis[dtype](
        Int32(extent),
        Int32(results),
        p.w.most,
        rebind[Ptr[DType.int32]](places.unsafe_ptr()),
        rebind[Ptr[dtype]](weights.unsafe_ptr()),
    )
    var columns = Columns(axis, 1)

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            sum_columns(
                y.unsafe_offset(n * results),
                x.unsafe_offset(n * extent),
                columns,
                extent,
            )

    var units = Int(p.batch)
    for_each_share(share, units, smallest_share(p.size(), units))
    _ = columns^
    _ = places^
    _ = weights^


struct Planes(InterpolationKernel):
    comptime NAME: StaticString = "planes"

    @staticmethod
    def refusal[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        comptime if dtype != accumulation_type[dtype]:
            return String("results are rounded")
        if p.channels != 1 or p.d.most * p.h.most != 1:
            return String("channels lie between elements, or rows are added")
        if max(p.sources(), p.results()) > Int(Int32.MAX):
            return String("a sample is too large for a table of 32-bit numbers")
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
        comptime if dtype == accumulation_type[dtype]:
            _interpolate(t.y, t.x, rebind[InterpolationProblem[dtype]](p))
