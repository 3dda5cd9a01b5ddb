"""Always-right kernels: one output element at a time, for any device, geometry and dtype.

They are slow. Every faster kernel is checked against them, and a table comes back to them when nothing else fits.
"""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr, accumulation_type
from .epilogue_callback import run_epilogue
from .kernel import ConvolutionKernel, ConvolutionTensors
from .passes import DGRAD, FPROP
from .problem import ConvolutionProblem

comptime THREADS = 256


@always_inline
def fprop_element[
    dtype: DType
](x: Ptr[dtype], w: Ptr[dtype], g: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    """Returns element `index` of y [N, O, P, Q, K]."""
    comptime acc_type = accumulation_type[dtype]
    var k = index % g.k
    var rest = index // g.k
    var q = rest % g.q
    rest //= g.q
    var p = rest % g.p
    rest //= g.p
    var o = rest % g.o
    var n = rest // g.o
    var cg = g.group_c()
    var c0 = (k // g.group_k()) * cg
    var pitch = g.channel_pitch()
    var acc = Scalar[acc_type](0)
    for t in range(g.t):
        var d = o * g.stride_d + t * g.dilation_d - g.pad_d
        if d < 0 or d >= g.d:
            continue
        for r in range(g.r):
            var h = p * g.stride_h + r * g.dilation_h - g.pad_h
            if h < 0 or h >= g.h:
                continue
            for s in range(g.s):
                var col = q * g.stride_w + s * g.dilation_w - g.pad_w
                if col < 0 or col >= g.w:
                    continue
                var xi = (((n * g.d + d) * g.h + h) * g.w + col) * g.c + c0
                var tap = (t * g.r + r) * g.s + s
                var wi = k * g.taps() * cg + tap * g.tap_pitch()
                for c in range(cg):
                    acc += (
                        x[unsafe_offset=xi + c].cast[acc_type]()
                        * w[unsafe_offset=wi + c * pitch].cast[acc_type]()
                    )
    return acc.cast[dtype]()


@always_inline
def dgrad_element[
    dtype: DType
](dy: Ptr[dtype], w: Ptr[dtype], g: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    """Returns element `index` of dx [N, D, H, W, C]: a gather over the outputs that read this pixel.
    """
    comptime acc_type = accumulation_type[dtype]
    var c = index % g.c
    var rest = index // g.c
    var col = rest % g.w
    rest //= g.w
    var h = rest % g.h
    rest //= g.h
    var d = rest % g.d
    var n = rest // g.d
    var cg = g.group_c()
    var kg = g.group_k()
    var k0 = (c // cg) * kg
    var acc = Scalar[acc_type](0)
    for t in range(g.t):
        var od = d + g.pad_d - t * g.dilation_d
        if od < 0 or od % g.stride_d != 0 or od // g.stride_d >= g.o:
            continue
        for r in range(g.r):
            var ph = h + g.pad_h - r * g.dilation_h
            if ph < 0 or ph % g.stride_h != 0 or ph // g.stride_h >= g.p:
                continue
            for s in range(g.s):
                var qw = col + g.pad_w - s * g.dilation_w
                if qw < 0 or qw % g.stride_w != 0 or qw // g.stride_w >= g.q:
                    continue
                var pixel = (
                    n * g.o + od // g.stride_d
                ) * g.p + ph // g.stride_h
                var yi = (pixel * g.q + qw // g.stride_w) * g.k + k0
                var tap = (t * g.r + r) * g.s + s
                for j in range(kg):
                    var wi = (
                        (k0 + j) * g.taps() * cg
                        + tap * g.tap_pitch()
                        + c % cg * g.channel_pitch()
                    )
                    acc += (
                        dy[unsafe_offset=yi + j].cast[acc_type]()
                        * w[unsafe_offset=wi].cast[acc_type]()
                    )
    return acc.cast[dtype]()


@always_inline
def wgrad_element[
    dtype: DType
](x: Ptr[dtype], dy: Ptr[dtype], g: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    """Returns element `index` of dw, in its order in memory: a reduction over N, O, P and Q.
    """
    comptime acc_type = accumulation_type[dtype]
    var cg = g.group_c()
    var k = index // (g.taps() * cg)
    var inner = index % (g.taps() * cg)
    var c = inner // g.channel_pitch() % cg
    var tap = inner // g.tap_pitch() % g.taps()
    var s = tap % g.s
    var r = tap // g.s % g.r
    var t = tap // g.s // g.r
    var xc = (k // g.group_k()) * cg + c
    var acc = Scalar[acc_type](0)
    for n in range(g.n):
        for o in range(g.o):
            var d = o * g.stride_d + t * g.dilation_d - g.pad_d
            if d < 0 or d >= g.d:
                continue
            for p in range(g.p):
                var h = p * g.stride_h + r * g.dilation_h - g.pad_h
                if h < 0 or h >= g.h:
                    continue
                # One partial sum for each row keeps float32 rounding small over long reductions.
                var row = Scalar[acc_type](0)
                for q in range(g.q):
                    var col = q * g.stride_w + s * g.dilation_w - g.pad_w
                    if col < 0 or col >= g.w:
                        continue
                    var xi = (((n * g.d + d) * g.h + h) * g.w + col) * g.c + xc
                    var yi = (((n * g.o + o) * g.p + p) * g.q + q) * g.k + k
                    row += (
                        x[unsafe_offset=xi].cast[acc_type]()
                        * dy[unsafe_offset=yi].cast[acc_type]()
                    )
                acc += row
    return acc.cast[dtype]()


@always_inline
def _element[
    dtype: DType, pass_: Int
](a: Ptr[dtype], b: Ptr[dtype], g: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    comptime if pass_ == FPROP:
        return fprop_element(a, b, g, index)
    elif pass_ == DGRAD:
        return dgrad_element(a, b, g, index)
    else:
        return wgrad_element(a, b, g, index)


def _output_size[pass_: Int](g: ConvolutionProblem) -> Int:
    comptime if pass_ == FPROP:
        return g.y_size()
    elif pass_ == DGRAD:
        return g.x_size()
    else:
        return g.w_size()


@no_inline
def convolution_analytic_cpu[
    dtype: DType, pass_: Int
](result: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], g: ConvolutionProblem,):
    """Writes y, dx or dw; operands a and b are (x, w), (dy, w) or (x, dy)."""
    var size = _output_size[pass_](g)
    var workers = worker_count()

    @always_inline
    def task(worker: Int) {imm}:
        for i in range(
            size * worker // workers, size * (worker + 1) // workers
        ):
            result[unsafe_offset=i] = _element[dtype, pass_](a, b, g, i)

    sync_parallelize(task, workers)


@__name(t"conv_analytic_{dtype}_p{pass_}")
def convolution_analytic_kernel[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    g: ConvolutionProblem,
    size: Int64,
):
    var i = global_idx.x
    if i < Int(size):
        result[unsafe_offset=i] = _element[dtype, pass_](a, b, g, i)


struct Analytic[target: StaticString](ConvolutionKernel):
    comptime NAME: StaticString = "analytic"

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if is_cpu[Self.target]():
            convolution_analytic_cpu[dtype, pass_](t.result, t.a, t.b, p)
            run_epilogue[pass_](p, t.epilogue)
        else:
            var size = _output_size[pass_](p)
            if size == 0:
                return
            ctx.enqueue_function[convolution_analytic_kernel[dtype, pass_]](
                t.result,
                t.a,
                t.b,
                p,
                Int64(size),
                grid_dim=ceildiv(size, THREADS),
                block_dim=THREADS,
            )
