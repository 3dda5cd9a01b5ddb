"""One result at a time, with 64-bit numbers: correct on every device and for every problem, and the reference for the
fast kernels."""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.math import ceildiv

from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import SMALLEST_SHARE, for_each_share
from .kernel import InterpolationKernel, InterpolationTensors
from .problem import InterpolationProblem, Spans

comptime THREADS = 256


@always_inline
def _result[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: InterpolationProblem[accumulation_type[dtype]],
    at: Int,
):
    comptime Acc = accumulation_type[dtype]
    var c = at % Int(p.channels)
    var pixel = at // Int(p.channels)
    var w = Int32(pixel % Int(p.w.results))
    var row = pixel // Int(p.w.results)
    var h = Int32(row % Int(p.h.results))
    var slab = row // Int(p.h.results)
    var d = Int32(slab % Int(p.d.results))
    var x_n = x.unsafe_offset(slab // Int(p.d.results) * p.sources() + c)
    var total = Scalar[Acc](0)
    for a in range(p.d.count(d)):
        for b in range(p.h.count(h)):
            var above = Int(p.d.first(d) + a) * Int(p.h.extent) + Int(
                p.h.first(h) + b
            )
            var part = Scalar[Acc](0)
            for k in range(p.w.count(w)):
                var at = above * Int(p.w.extent) + Int(p.w.first(w) + k)
                part += (
                    p.w.weight(w, k)
                    * x_n[unsafe_offset=at * Int(p.channels)].cast[Acc]()
                )
            total += part * p.d.weight(d, a) * p.h.weight(h, b)
    y[unsafe_offset=at] = total.cast[dtype]()


@__name(t"interpolate_direct_{dtype}")
def interpolate_direct[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: InterpolationProblem[accumulation_type[dtype]],
):
    var at = Int(global_idx.x)
    if at < p.size():
        _result(y, x, p, at)


struct Direct[target: StaticString](InterpolationKernel):
    comptime NAME: StaticString = "direct"

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        comptime if is_cpu[Self.target]():

            def share(first: Int, end: Int) {imm}:
                for at in range(first, end):
                    _result(t.y, t.x, p, at)

            for_each_share(share, p.size(), SMALLEST_SHARE)
        else:
            ctx.enqueue_function[interpolate_direct[dtype]](
                t.y,
                t.x,
                p,
                grid_dim=ceildiv(p.size(), THREADS),
                block_dim=THREADS,
            )
