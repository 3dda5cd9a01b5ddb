"""The data gradient of an image's few channels in float32: a product, then col2im.

A product with a column for each channel would multiply a whole tile of columns to keep three, and read dy once for
every tap. Here rows are (tap, channel) pairs instead:

    z[(tap, c), pixel of dy] = sum over k  w[k, tap, c] * dy[pixel, k]
    dx[h, w, c]              = sum over taps  z[(tap, c), the pixel that the tap connects]

z is made for so many images at a time as the cache holds, within the workspace limit.

convolution_by_kernel.json has times beside cuDNN's for drawn problems.
"""

from std.math import ceildiv

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.arithmetic import divide, gcd
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.tensor_cores import QUAD, blocks_compile
from ..passes import DGRAD, FPROP, ONE_GROUP
from ..epilogue_callback import NO_EPILOGUE
from ..kernel import (
    ConvolutionKernel,
    AlwaysWorthwhile,
    Table,
    ConvolutionTensors,
)
from ..problem import ConvolutionProblem
from .block_gather import BlockGather
from .pipeline import block_refusal
from .warpgroup_gather import WarpgroupGather

comptime MAX_CHANNELS = 4
"""Most channels of dx: a thread has a pixel's channels as one vector."""
comptime _Products = Table[AlwaysWorthwhile, WarpgroupGather, BlockGather]
comptime _THREADS = 256
# Of z at a time: about half of a large GPU's cache.
comptime _CACHED_BYTES = 32 << 20


@__name("conv_gemm_col2im_filter")
def transpose_kernel(
    target: Ptr[DType.float32],
    source: Ptr[DType.float32],
    rows: Int32,
    columns: Int32,
):
    """Writes target [columns][rows], the transpose of source [rows][columns].
    """
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at < rows * columns:
        var column, row = divide(at, rows)
        target[unsafe_offset=Int(at)] = source[
            unsafe_offset=Int(row) * Int(columns) + Int(column)
        ]


@always_inline
def _first_tap(
    pixel: Int32, stride: Int32, dilation: Int32, pad: Int32, taps: Int32
) -> Int32:
    """Returns the first tap that connects the pixel to any of dy's, or `taps`.
    """
    var tap = Int32(0)
    while tap < taps and (pixel + pad - tap * dilation) % stride != 0:
        tap += 1
    return tap


@__name("conv_gemm_col2im_sums")
def col2im_kernel(
    dx: Ptr[DType.float32],
    z: Ptr[DType.float32],
    problem: ConvolutionProblem,
    tap_step_d: Int32,
    tap_step_h: Int32,
    tap_step_w: Int32,
    chunk_pixels: Int32,
):
    """Sums one pixel of dx for each thread; z is [taps * C][chunk_pixels]. Neighbouring threads have pixels one stride
    apart: they read neighbouring pixels of dy."""
    var index = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    var width = Int32(problem.w)
    var stride = Int32(problem.stride_w)
    var across = ceildiv(width, stride)
    var line, i = divide(index, across * stride)
    var phase, step = divide(i, across)
    var w = step * stride + phase
    var plane, h = divide(line, Int32(problem.h))
    var n, d = divide(plane, Int32(problem.d))
    if w >= width or Int(n) * problem.o * problem.p * problem.q >= Int(
        chunk_pixels
    ):
        return
    var first_t = _first_tap(
        d,
        Int32(problem.stride_d),
        Int32(problem.dilation_d),
        Int32(problem.pad_d),
        Int32(problem.t),
    )
    var first_r = _first_tap(
        h,
        Int32(problem.stride_h),
        Int32(problem.dilation_h),
        Int32(problem.pad_h),
        Int32(problem.r),
    )
    var first_s = _first_tap(
        w,
        Int32(problem.stride_w),
        Int32(problem.dilation_w),
        Int32(problem.pad_w),
        Int32(problem.s),
    )
    var channels = Int32(problem.c)
    var sums = SIMD[DType.float32, MAX_CHANNELS](0)
    for t in range(first_t, Int32(problem.t), tap_step_d):
        # Where it divides; a negative quotient is rounded down, below zero.
        var o = (
            d + Int32(problem.pad_d) - t * Int32(problem.dilation_d)
        ) // Int32(problem.stride_d)
        if UInt32(o) >= UInt32(problem.o):
            continue
        for r in range(first_r, Int32(problem.r), tap_step_h):
            var p = (
                h + Int32(problem.pad_h) - r * Int32(problem.dilation_h)
            ) // Int32(problem.stride_h)
            if UInt32(p) >= UInt32(problem.p):
                continue
            var tap_row = (t * Int32(problem.r) + r) * Int32(problem.s)
            var pixel_row = (
                (n * Int32(problem.o) + o) * Int32(problem.p) + p
            ) * Int32(problem.q)
            for s in range(first_s, Int32(problem.s), tap_step_w):
                var q = (
                    w + Int32(problem.pad_w) - s * Int32(problem.dilation_w)
                ) // stride
                if UInt32(q) < UInt32(problem.q):
                    var at = z.unsafe_offset(
                        Int((tap_row + s) * channels) * Int(chunk_pixels)
                        + Int(pixel_row + q)
                    )
                    comptime for c in range(MAX_CHANNELS):
                        if Int32(c) < channels:
                            sums[c] += at[unsafe_offset=c * Int(chunk_pixels)]
    var target = dx.unsafe_offset(
        ((Int(plane) * problem.h + Int(h)) * problem.w + Int(w)) * problem.c
    )
    comptime for c in range(MAX_CHANNELS):
        if Int32(c) < channels:
            target[unsafe_offset=c] = sums[c]


def _chunk_images(p: ConvolutionProblem) -> Int:
    """Returns the number of images whose z is made at a time, 0 if not even one fits.
    """
    var image = 4 * p.taps() * p.c * p.o * p.p * p.q
    var filter = 4 * p.w_size()
    var most = (p.workspace_limit - filter) // image
    return max(0, min(min(p.n, most), max(1, _CACHED_BYTES // image)))


@no_inline
def gemm_col2im(
    dx: Ptr[DType.float32],
    dy: Ptr[DType.float32],
    w: Ptr[DType.float32],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Computes the data gradient; in TF32 where `p.allow_tf32`."""
    var rows = p.taps() * p.c
    var images = _chunk_images(p)
    var image_pixels = p.o * p.p * p.q
    var filter = scratch[DType.float32](ctx, p.w_size())
    var z = scratch[DType.float32](ctx, rows * images * image_pixels)
    var filter_at = Ptr[DType.float32](
        unsafe_from_address=Int(filter.unsafe_ptr())
    )
    var z_at = Ptr[DType.float32](unsafe_from_address=Int(z.unsafe_ptr()))
    ctx.enqueue_function[transpose_kernel](
        filter_at,
        w,
        Int32(p.k),
        Int32(rows),
        grid_dim=ceildiv(p.w_size(), _THREADS),
        block_dim=_THREADS,
    )
    for first in range(0, p.n, images):
        var count = min(images, p.n - first)
        var pixels = count * image_pixels
        # Its pixels are the rows of w, its output channels the pixels of dy.
        var product = ConvolutionProblem(
            n=rows,
            c=p.k,
            k=pixels,
            groups=1,
            d=1,
            h=1,
            w=1,
            t=1,
            r=1,
            s=1,
            o=1,
            p=1,
            q=1,
            stride_d=1,
            stride_h=1,
            stride_w=1,
            dilation_d=1,
            dilation_h=1,
            dilation_w=1,
            pad_d=0,
            pad_h=0,
            pad_w=0,
            workspace_limit=p.workspace_limit,
            allow_tf32=p.allow_tf32,
            taps_inside=False,
        )
        var operands = ConvolutionTensors(
            z_at,
            filter_at,
            dy.unsafe_offset(first * image_pixels * p.k),
            NO_EPILOGUE,
        )
        _ = _Products.launch[DType.float32, FPROP, ONE_GROUP](
            ctx, operands, product
        )
        var threads = count * p.d * p.h * ceildiv(p.w, p.stride_w) * p.stride_w
        ctx.enqueue_function[col2im_kernel](
            dx.unsafe_offset(first * p.d * p.h * p.w * p.c),
            z_at,
            p,
            Int32(p.stride_d // gcd(p.stride_d, p.dilation_d)),
            Int32(p.stride_h // gcd(p.stride_h, p.dilation_h)),
            Int32(p.stride_w // gcd(p.stride_w, p.dilation_w)),
            Int32(pixels),
            grid_dim=ceildiv(threads, _THREADS),
            block_dim=_THREADS,
        )
    # Both live until their last use is enqueued.
    _ = filter^
    _ = z^


struct GemmCol2im(ConvolutionKernel):
    comptime NAME: StaticString = "gemm_col2im"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return blocks_compile() and pass_ == DGRAD and dtype == DType.float32

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = block_refusal[pass_](p)
        if reason:
            return reason
        if p.groups != 1 or p.c > MAX_CHANNELS:
            return String(
                t"C = {p.c} in {p.groups} groups; takes up to 4 in one"
            )
        if p.k % QUAD != 0 or Int(t.a) % (4 * QUAD) != 0:
            return String(
                t"K = {p.k} is no multiple of 4, or dy lies unaligned"
            )
        if p.taps() * p.c > 1 << 16:
            return String(t"{p.taps()} taps")
        if _chunk_images(p) == 0:
            return String("an image's products exceed the workspace limit")
        # Pixels of a chunk are counted in 32 bits.
        var chunk = _chunk_images(p)
        if (
            chunk * max(p.o * p.p * p.q, p.d * p.h * (p.w + p.stride_w))
            >= 1 << 31
        ):
            return String("more than 2^31 pixels in a chunk")
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime F32 = Ptr[DType.float32]
        gemm_col2im(
            rebind[F32](t.result), rebind[F32](t.a), rebind[F32](t.b), p, ctx
        )
