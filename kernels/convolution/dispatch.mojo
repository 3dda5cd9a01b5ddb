"""Which kernel runs which problem: one readable table for each device.

Each row asks its kernel `can_implement`, which answers None or the reason why not in words; the first None wins, and
the always-right kernel ends every table.
"""

from std.memory.alloc import unsafe_alloc
from std.sys import size_of

from max.gpu.host import DeviceBuffer, DeviceContext

from .analytic import convolution_analytic_cpu, convolution_analytic_gpu
from .common import DGRAD, FPROP, WGRAD, Ptr
from .cpu.channelwise import channelwise_can_implement, channelwise_cpu
from .cpu.channelwise_wgrad import channelwise_wgrad_cpu
from .cpu.grouped_wgrad import (
    grouped_wgrad_can_implement,
    grouped_wgrad_cpu,
)
from .cpu.implicit_gemm import implicit_gemm_can_implement, implicit_gemm_cpu
from .cpu.joined_taps import joined_taps_can_implement, joined_taps_cpu
from .cpu.joined_taps_wgrad import (
    joined_taps_wgrad_can_implement,
    joined_taps_wgrad_cpu,
)
from .cpu.pack import swap_filter
from .cpu.panel_gemm import panel_gemm_can_implement, panel_gemm_cpu
from .cpu.resident_wgrad import (
    resident_wgrad_can_implement,
    resident_wgrad_cpu,
)
from .cpu.wgrad import wgrad_gemm_can_implement, wgrad_gemm_cpu
from .finish import NOTHING, Finish
from .gpu.band import FEW_TAPS, band_can_implement, is_better_by_bands
from .gpu.depthwise import (
    depthwise_gather_gpu,
    depthwise_gpu_can_implement,
)
from .gpu.depthwise_band import depthwise_band_gpu
from .gpu.depthwise_band_wgrad import (
    band_wgrad_can_implement,
    depthwise_band_wgrad_gpu,
)
from .gpu.depthwise_wgrad import depthwise_wgrad_gpu
from .gpu.few_channels import (
    few_channels_can_implement,
    few_channels_dgrad_gpu,
)
from .gpu.halo_gather import halo_gather_can_implement, halo_gather_gpu
from .gpu.halo_wgrad import halo_wgrad_can_implement, halo_wgrad_gpu
from .gpu.pipeline import block_can_implement, blocks_compile, pairs_compile
from .gpu.products import gather_product_gpu, wgrad_product_gpu
from .gpu.small_groups import small_groups_can_implement, small_groups_gpu
from .gpu.tiled import tiled_can_implement, tiled_gather_gpu, tiled_wgrad_gpu
from .problem import ConvolutionProblem
from .rewrite import is_channels_last_better, rewritten
from .sm90 import dispatch as sm90
from .sm90.grouped import grouped_can_implement, run_grouped


@no_inline
def _run_channels_last[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    given: ConvolutionProblem,
    finish: Finish,
) raises:
    """A problem with one group whose filter, or its gradient, is copied into the other order.
    """
    var g = given
    g.taps_inside = False
    var copy = unsafe_alloc[Scalar[dtype]](g.w_size(), alignment=64)
    comptime if pass_ == WGRAD:
        run_cpu[dtype, pass_, False](copy, a, b, g)
        swap_filter(result, copy, g.k, g.taps(), g.c)
    else:
        swap_filter(copy, b, g.k, g.c, g.taps())
        run_cpu[dtype, pass_, False](result, a, copy, g, finish)
    copy.unsafe_free()


@no_inline
def run_cpu[
    dtype: DType, pass_: Int, grouped: Bool = True
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    given: ConvolutionProblem,
    finish: Finish = NOTHING,
) raises:
    """Writes y from (x, w), dx from (dy, w) or dw from (x, dy) on the CPU; `finish` is called for what of y or dx has been
    stored.

    Without `grouped` the kernels for many groups are left out; the others take any problem.
    """
    if is_channels_last_better(given):
        _run_channels_last[dtype, pass_](result, a, b, given, finish)
        return
    var problem = rewritten[pass_](given)
    comptime if pass_ == FPROP or pass_ == DGRAD:
        comptime if grouped:
            comptime for group in [1, 4, 8]:
                if not channelwise_can_implement[dtype, group](problem):
                    channelwise_cpu[dtype, pass_, group](result, a, b, problem)
                    _finish_all[pass_](problem, finish)
                    return
        comptime if pass_ == FPROP:
            if not joined_taps_can_implement[dtype](problem):
                joined_taps_cpu[dtype](result, a, b, problem, finish)
                return
        if not panel_gemm_can_implement[dtype, pass_](problem):
            panel_gemm_cpu[dtype, pass_](result, a, b, problem)
            _finish_all[pass_](problem, finish)
            return
        if not implicit_gemm_can_implement[dtype, pass_](problem):
            implicit_gemm_cpu[dtype, pass_](
                result, a, b, problem, finish=finish
            )
            return
    else:
        comptime if grouped:
            comptime for group in [1, 4, 8]:
                if not channelwise_can_implement[dtype, group](problem):
                    channelwise_wgrad_cpu[dtype, group](result, a, b, problem)
                    return
            if not grouped_wgrad_can_implement[dtype](problem):
                grouped_wgrad_cpu[dtype](result, a, b, problem)
                return
        if not joined_taps_wgrad_can_implement[dtype](problem):
            joined_taps_wgrad_cpu[dtype](result, a, b, problem)
            return
        if not resident_wgrad_can_implement[dtype](problem):
            resident_wgrad_cpu[dtype](result, a, b, problem)
            return
        if not wgrad_gemm_can_implement[dtype](problem):
            wgrad_gemm_cpu[dtype](result, a, b, problem)
            return
    convolution_analytic_cpu[dtype, pass_](result, a, b, problem)
    _finish_all[pass_](problem, finish)


@no_inline
def _finish_all[pass_: Int](problem: ConvolutionProblem, finish: Finish):
    """Behind a kernel that does not call `finish` itself."""
    if finish.is_wanted():
        finish.run_all(problem.y_size() if pass_ == FPROP else problem.x_size())


def _device_pointer[dtype: DType](buffer: DeviceBuffer[dtype]) -> Ptr[dtype]:
    return Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr()))


@no_inline
def run_gpu[
    dtype: DType, pass_: Int, grouped: Bool = True
](
    result: DeviceBuffer[dtype],
    a: DeviceBuffer[dtype],
    b: DeviceBuffer[dtype],
    given: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Enqueues y from (x, w), dx from (dy, w) or dw from (x, dy) on a GPU.

    Without `grouped` the kernels for many groups are left out; the others take any problem.
    """
    var problem = rewritten[pass_](given)
    var to = _device_pointer(result)
    var left = _device_pointer(a)
    var right = _device_pointer(b)
    comptime if sm90.compiles_for[dtype, pass_]():
        if not sm90.can_implement[dtype, pass_](problem) and sm90.are_aligned[
            dtype
        ](to, left, right):
            sm90.run[dtype, pass_](to, left, right, problem, ctx)
            return
        comptime if grouped and size_of[dtype]() == 2:
            if not grouped_can_implement[dtype, pass_](
                problem
            ) and sm90.are_aligned[dtype](to, left, right):
                run_grouped[dtype, pass_](to, left, right, problem, ctx)
                return
    # Sums are float32 in these kernels.
    comptime if dtype != DType.float64:
        comptime if grouped:
            comptime if pairs_compile[dtype]():
                comptime if pass_ == WGRAD:
                    if (
                        problem.r * problem.s > FEW_TAPS
                        and not band_wgrad_can_implement(problem, left, right)
                    ):
                        depthwise_band_wgrad_gpu[dtype](
                            result, a, b, problem, ctx
                        )
                        return
                else:
                    comptime forward = pass_ == FPROP
                    if is_better_by_bands(
                        problem, forward
                    ) and not band_can_implement(problem, forward, to, left):
                        depthwise_band_gpu[dtype, pass_](
                            to, left, right, problem, ctx
                        )
                        return
            if not depthwise_gpu_can_implement(problem):
                comptime if pass_ == WGRAD:
                    depthwise_wgrad_gpu[dtype](result, a, b, problem, ctx)
                else:
                    depthwise_gather_gpu[dtype, pass_](
                        result, a, b, problem, ctx
                    )
                return
        comptime if blocks_compile():
            if not block_can_implement[pass_](problem):
                comptime if pass_ == WGRAD:
                    comptime if grouped and size_of[dtype]() == 2:
                        if not halo_wgrad_can_implement[dtype](
                            problem, to, left, right
                        ):
                            halo_wgrad_gpu[dtype](
                                result, left, right, problem, ctx
                            )
                            return
                    wgrad_product_gpu[dtype](result, a, b, problem, ctx)
                else:
                    comptime if grouped and size_of[dtype]() == 2:
                        if not halo_gather_can_implement[dtype, pass_](
                            problem, to, left, right
                        ):
                            halo_gather_gpu[dtype, pass_](
                                to, left, right, problem, ctx
                            )
                            return
                    comptime if grouped:
                        if not small_groups_can_implement[dtype, pass_](
                            problem, to, left
                        ):
                            small_groups_gpu[dtype, pass_](
                                to, left, right, problem, ctx
                            )
                            return
                    comptime if pass_ == DGRAD and dtype == DType.float32:
                        comptime F32 = Ptr[DType.float32]
                        var dy = rebind[F32](left)
                        if not few_channels_can_implement(problem, dy):
                            few_channels_dgrad_gpu(
                                rebind[F32](to),
                                dy,
                                rebind[F32](right),
                                problem,
                                ctx,
                            )
                            return
                    gather_product_gpu[dtype, pass_](
                        to, left, right, problem, ctx
                    )
                return
        if not tiled_can_implement[dtype, pass_](problem):
            comptime if pass_ == WGRAD:
                tiled_wgrad_gpu[dtype](result, a, b, problem, ctx)
            else:
                tiled_gather_gpu[dtype, pass_](result, a, b, problem, ctx)
            return
    convolution_analytic_gpu[dtype, pass_](result, a, b, problem, ctx)
