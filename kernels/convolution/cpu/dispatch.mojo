"""Which kernel runs which problem on a CPU: one readable table.

Each row asks its kernel `can_implement`, which answers None or the reason why not in words; the first None wins, and
the always-right kernel ends the table.
"""

from std.memory.alloc import unsafe_alloc

from ...common.pointer import Ptr
from ..analytic import convolution_analytic_cpu
from ..passes import ANY_GROUPS, DGRAD, FPROP, ONE_GROUP, WGRAD
from ..finish import NOTHING, Finish, finish_result
from ..problem import ConvolutionProblem
from ..rewrite import is_channels_last_better, rewritten
from .channelwise import channelwise_can_implement, channelwise_cpu
from .channelwise_wgrad import channelwise_wgrad_cpu
from .depthwise import depthwise_cpu
from .grouped_wgrad import grouped_wgrad_can_implement, grouped_wgrad_cpu
from .implicit_gemm import implicit_gemm_can_implement, implicit_gemm_cpu
from .joined_taps import joined_taps_can_implement, joined_taps_cpu
from .joined_taps_wgrad import (
    joined_taps_wgrad_can_implement,
    joined_taps_wgrad_cpu,
)
from .pack import swap_filter
from .panel_gemm import panel_gemm_can_implement, panel_gemm_cpu
from .resident_wgrad import resident_wgrad_can_implement, resident_wgrad_cpu
from .wgrad import wgrad_gemm_can_implement, wgrad_gemm_cpu


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
        run_cpu[dtype, pass_, ONE_GROUP](copy, a, b, g)
        swap_filter(result, copy, g.k, g.taps(), g.c)
    else:
        swap_filter(copy, b, g.k, g.c, g.taps())
        run_cpu[dtype, pass_, ONE_GROUP](result, a, copy, g, finish)
    copy.unsafe_free()


@no_inline
def run_cpu[
    dtype: DType, pass_: Int, grouping: Int = ANY_GROUPS
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    given: ConvolutionProblem,
    finish: Finish = NOTHING,
) raises:
    """Writes y from (x, w), dx from (dy, w) or dw from (x, dy) on the CPU; `finish` is called for what of y or dx has been
    stored.

    Kernels that `grouping` does not need are left out; the others take any problem.
    """
    if is_channels_last_better(given):
        _run_channels_last[dtype, pass_](result, a, b, given, finish)
        return
    var problem = rewritten[pass_](given)
    comptime if grouping == ANY_GROUPS:
        if depthwise_cpu[dtype, pass_](result, a, b, problem, finish):
            return
    comptime if pass_ == FPROP or pass_ == DGRAD:
        comptime if grouping != ONE_GROUP:
            comptime for group in [4, 8]:
                if not channelwise_can_implement[dtype, group](problem):
                    channelwise_cpu[dtype, pass_, group](result, a, b, problem)
                    finish_result[pass_](problem, finish)
                    return
        comptime if pass_ == FPROP:
            if not joined_taps_can_implement[dtype](problem):
                joined_taps_cpu[dtype](result, a, b, problem, finish)
                return
        if not panel_gemm_can_implement[dtype, pass_](problem):
            panel_gemm_cpu[dtype, pass_](result, a, b, problem)
            finish_result[pass_](problem, finish)
            return
        if not implicit_gemm_can_implement[dtype, pass_](problem):
            implicit_gemm_cpu[dtype, pass_](
                result, a, b, problem, finish=finish
            )
            return
    else:
        comptime if grouping != ONE_GROUP:
            comptime for group in [4, 8]:
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
    finish_result[pass_](problem, finish)
