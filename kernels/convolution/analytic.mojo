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
](
    x: Ptr[dtype], w: Ptr[dtype], problem: ConvolutionProblem, index: Int
) -> Scalar[dtype]:
    """Returns element `index` of y [N, O, P, Q, K]."""
    comptime acc_type = accumulation_type[dtype]
    var k = index % problem.k
    var rest = index // problem.k
    var q = rest % problem.q
    rest //= problem.q
    var p = rest % problem.p
    rest //= problem.p
    var o = rest % problem.o
    var n = rest // problem.o
    var cg = problem.group_c()
    var c0 = (k // problem.group_k()) * cg
    var pitch = problem.channel_pitch()
    var acc = Scalar[acc_type](0)
    for t in range(problem.t):
        var d = o * problem.stride_d + t * problem.dilation_d - problem.pad_d
        if d < 0 or d >= problem.d:
            continue
        for r in range(problem.r):
            var h = (
                p * problem.stride_h + r * problem.dilation_h - problem.pad_h
            )
            if h < 0 or h >= problem.h:
                continue
            for s in range(problem.s):
                var col = (
                    q * problem.stride_w
                    + s * problem.dilation_w
                    - problem.pad_w
                )
                if col < 0 or col >= problem.w:
                    continue
                var xi = (
                    ((n * problem.d + d) * problem.h + h) * problem.w + col
                ) * problem.c + c0
                var tap = (t * problem.r + r) * problem.s + s
                var wi = k * problem.taps() * cg + tap * problem.tap_pitch()
                for c in range(cg):
                    acc += (
                        x[unsafe_offset=xi + c].cast[acc_type]()
                        * w[unsafe_offset=wi + c * pitch].cast[acc_type]()
                    )
    return acc.cast[dtype]()


@always_inline
def dgrad_element[
    dtype: DType
](dy: Ptr[dtype], w: Ptr[dtype], p: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    """Returns element `index` of dx [N, D, H, W, C]: a gather over the outputs that read this pixel.
    """
    comptime acc_type = accumulation_type[dtype]
    var c = index % p.c
    var rest = index // p.c
    var col = rest % p.w
    rest //= p.w
    var h = rest % p.h
    rest //= p.h
    var d = rest % p.d
    var n = rest // p.d
    var cg = p.group_c()
    var kg = p.group_k()
    var k0 = (c // cg) * kg
    var acc = Scalar[acc_type](0)
    for t in range(p.t):
        var od = d + p.pad_d - t * p.dilation_d
        if od < 0 or od % p.stride_d != 0 or od // p.stride_d >= p.o:
            continue
        for r in range(p.r):
            var ph = h + p.pad_h - r * p.dilation_h
            if ph < 0 or ph % p.stride_h != 0 or ph // p.stride_h >= p.p:
                continue
            for s in range(p.s):
                var qw = col + p.pad_w - s * p.dilation_w
                if qw < 0 or qw % p.stride_w != 0 or qw // p.stride_w >= p.q:
                    continue
                var pixel = (
                    n * p.o + od // p.stride_d
                ) * p.p + ph // p.stride_h
                var yi = (pixel * p.q + qw // p.stride_w) * p.k + k0
                var tap = (t * p.r + r) * p.s + s
                for j in range(kg):
                    var wi = (
                        (k0 + j) * p.taps() * cg
                        + tap * p.tap_pitch()
                        + c % cg * p.channel_pitch()
                    )
                    acc += (
                        dy[unsafe_offset=yi + j].cast[acc_type]()
                        * w[unsafe_offset=wi].cast[acc_type]()
                    )
    return acc.cast[dtype]()


@always_inline
def wgrad_element[
    dtype: DType
](
    x: Ptr[dtype], dy: Ptr[dtype], problem: ConvolutionProblem, index: Int
) -> Scalar[dtype]:
    """Returns element `index` of dw, in its order in memory: a reduction over N, O, P and Q.
    """
    comptime acc_type = accumulation_type[dtype]
    var cg = problem.group_c()
    var k = index // (problem.taps() * cg)
    var inner = index % (problem.taps() * cg)
    var c = inner // problem.channel_pitch() % cg
    var tap = inner // problem.tap_pitch() % problem.taps()
    var s = tap % problem.s
    var r = tap // problem.s % problem.r
    var t = tap // problem.s // problem.r
    var xc = (k // problem.group_k()) * cg + c
    var acc = Scalar[acc_type](0)
    for n in range(problem.n):
        for o in range(problem.o):
            var d = (
                o * problem.stride_d + t * problem.dilation_d - problem.pad_d
            )
            if d < 0 or d >= problem.d:
                continue
            for p in range(problem.p):
                var h = (
                    p * problem.stride_h
                    + r * problem.dilation_h
                    - problem.pad_h
                )
                if h < 0 or h >= problem.h:
                    continue
                # One partial sum for each row keeps float32 rounding small over long reductions.
                var row = Scalar[acc_type](0)
                for q in range(problem.q):
                    var col = (
                        q * problem.stride_w
                        + s * problem.dilation_w
                        - problem.pad_w
                    )
                    if col < 0 or col >= problem.w:
                        continue
                    var xi = (
                        ((n * problem.d + d) * problem.h + h) * problem.w + col
                    ) * problem.c + xc
                    var yi = (
                        ((n * problem.o + o) * problem.p + p) * problem.q + q
                    ) * problem.k + k
                    row += (
                        x[unsafe_offset=xi].cast[acc_type]()
                        * dy[unsafe_offset=yi].cast[acc_type]()
                    )
                acc += row
    return acc.cast[dtype]()


@always_inline
def _element[
    dtype: DType, pass_: Int
](a: Ptr[dtype], b: Ptr[dtype], p: ConvolutionProblem, index: Int) -> Scalar[
    dtype
]:
    comptime if pass_ == FPROP:
        return fprop_element(a, b, p, index)
    elif pass_ == DGRAD:
        return dgrad_element(a, b, p, index)
    else:
        return wgrad_element(a, b, p, index)


def _output_size[pass_: Int](p: ConvolutionProblem) -> Int:
    comptime if pass_ == FPROP:
        return p.y_size()
    elif pass_ == DGRAD:
        return p.x_size()
    else:
        return p.w_size()


@no_inline
def convolution_analytic_cpu[
    dtype: DType, pass_: Int
](result: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: ConvolutionProblem,):
    """Writes y, dx or dw; operands a and b are (x, w), (dy, w) or (x, dy)."""
    var size = _output_size[pass_](p)
    var workers = worker_count()

    @always_inline
    def task(worker: Int) {imm}:
        for i in range(
            size * worker // workers, size * (worker + 1) // workers
        ):
            result[unsafe_offset=i] = _element[dtype, pass_](a, b, p, i)

    sync_parallelize(task, workers)


@__name(t"conv_analytic_{dtype}_p{pass_}")
def convolution_analytic_kernel[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: ConvolutionProblem,
    size: Int64,
):
    var i = global_idx.x
    if i < Int(size):
        result[unsafe_offset=i] = _element[dtype, pass_](a, b, p, i)


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
