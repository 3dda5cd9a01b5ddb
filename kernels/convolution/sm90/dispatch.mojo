"""Entry to the Hopper kernels: what they take, and the launch with the chosen tile."""

from std.math import ceildiv
from std.sys.info import _accelerator_arch

from max.gpu.host import DeviceAttribute, DeviceContext

from ..common import DGRAD, FPROP, WGRAD, Ptr
from ..problem import ConvolutionProblem
from .choice import (
    TILE_SHAPES,
    WGRAD_SHAPES,
    Product,
    choose_tile,
    choose_wgrad,
)
from .launch import launch_dgrad, launch_fprop, launch_wgrad
from .plan import BLOCK_K, dgrad_axis, fprop_axis

comptime AUTOMATIC = -1
comptime _MAX_TRAVERSAL_STRIDE = 8
comptime MAX_PHASES = 16


def compiling_for_hopper() -> Bool:
    """Whether the accelerator that this compilation is for has these kernels' instructions.
    """
    comptime arch = _accelerator_arch()
    comptime if "90a" in arch and "gfx" not in arch:
        return True
    else:
        return False


def can_implement[
    dtype: DType, pass_: Int
](problem: ConvolutionProblem) -> Optional[String]:
    """None, or the reason why these kernels don't take the problem."""
    var p = problem
    comptime if not compiling_for_hopper():
        return String("needs sm_90a: tensor copies and wgmma")
    comptime if dtype != DType.bfloat16 and dtype != DType.float16:
        return String(t"takes bfloat16 and float16, not {dtype}")
    if p.groups != 1:
        return String(t"takes groups = 1, not {p.groups}")
    if p.d != 1 or p.t != 1 or p.o != 1:
        return String("takes two spatial axes, not three")
    if p.c % 8 != 0:
        return String(
            t"C = {p.c} is not a multiple of 8, which 16-byte rows need"
        )
    if p.k % 8 != 0:
        return String(
            t"K = {p.k} is not a multiple of 8, which 16-byte rows need"
        )
    if p.x_size() == 0 or p.y_size() == 0 or p.w_size() == 0:
        return String("a tensor is empty")
    if max(p.input_pixels(), p.output_pixels()) >= 1 << 31:
        return String("more than 2^31 pixels")
    comptime if pass_ == DGRAD:
        if p.stride_h * p.stride_w > MAX_PHASES:
            return String(
                t"stride {p.stride_h}x{p.stride_w} makes more than"
                t" {MAX_PHASES} phases"
            )
        for a in range(p.stride_h):
            for b in range(p.stride_w):
                var h = dgrad_axis(
                    p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h, a
                )
                var w = dgrad_axis(
                    p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w, b
                )
                # A phase without pixels or taps copies nothing.
                if h.extent * w.extent * h.taps * w.taps > 0 and not (
                    h.fits_copy_engine() and w.fits_copy_engine()
                ):
                    return String(
                        "padding or dilation exceeds what the copy engine"
                        " encodes"
                    )
    else:
        if max(p.stride_h, p.stride_w) > _MAX_TRAVERSAL_STRIDE:
            return String(
                t"stride {p.stride_h}x{p.stride_w} exceeds the copy engine's"
                t" {_MAX_TRAVERSAL_STRIDE}"
            )
        var h = fprop_axis(p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h)
        var w = fprop_axis(p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w)
        if not (h.fits_copy_engine() and w.fits_copy_engine()):
            return String(
                "padding or dilation exceeds what the copy engine encodes"
            )
    return None


def _products[pass_: Int](p: ConvolutionProblem) -> List[Product]:
    var products = List[Product]()
    comptime if pass_ == FPROP:
        products.append(
            Product(p.n * p.p * p.q, p.r * p.s * ceildiv(p.c, BLOCK_K))
        )
    else:
        for a in range(p.stride_h):
            for b in range(p.stride_w):
                var h = dgrad_axis(
                    p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h, a
                )
                var w = dgrad_axis(
                    p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w, b
                )
                products.append(
                    Product(
                        p.n * h.extent * w.extent,
                        h.taps * w.taps * ceildiv(p.k, BLOCK_K),
                    )
                )
    return products^


@no_inline
def run[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
    forced_shape: Int = AUTOMATIC,
    forced_splits: Int = AUTOMATIC,
) raises:
    """Writes y from (x, w), dx from (dy, w) or dw from (x, dy). The problem must be one that `can_implement` takes.

    A forced shape is an index into TILE_SHAPES or WGRAD_SHAPES: for measurements.
    """
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    comptime if pass_ == WGRAD:
        var choice = choose_wgrad(problem, processors)
        if forced_shape != AUTOMATIC:
            choice.shape = forced_shape
            choice.splits = forced_splits
        comptime for i in range(len(WGRAD_SHAPES)):
            comptime shape = WGRAD_SHAPES[i]
            if choice.shape == i:
                launch_wgrad[dtype, shape](
                    result, b, a, problem, choice.splits, ctx
                )
    else:
        var columns = problem.k if pass_ == FPROP else problem.c
        var chosen = forced_shape
        if forced_shape == AUTOMATIC:
            chosen = choose_tile(
                _products[pass_](problem), columns, problem, processors
            )
        comptime for i in range(len(TILE_SHAPES)):
            comptime shape = TILE_SHAPES[i]
            if chosen == i:
                comptime if pass_ == FPROP:
                    launch_fprop[dtype, shape](result, a, b, problem, ctx)
                else:
                    var phases = problem.stride_h * problem.stride_w
                    if phases == 1:
                        launch_dgrad[dtype, shape, 1](
                            result, a, b, problem, ctx
                        )
                    elif phases <= 4:
                        launch_dgrad[dtype, shape, 4](
                            result, a, b, problem, ctx
                        )
                    else:
                        # Rare strides: one shape is compiled for them.
                        launch_dgrad[dtype, TILE_SHAPES[2], MAX_PHASES](
                            result, a, b, problem, ctx
                        )
