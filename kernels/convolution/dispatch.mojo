"""Which kernel runs which problem: one readable table for each device.

Each row asks its kernel `can_implement`, which answers None or the reason why not in words; the first None wins, and
the always-right kernel ends every table.
"""

from max.gpu.host import DeviceBuffer, DeviceContext

from .analytic import convolution_analytic_cpu, convolution_analytic_gpu
from .common import DGRAD, FPROP, WGRAD, Ptr
from .cpu.depthwise import (
    depthwise_can_implement,
    depthwise_cpu,
    depthwise_wgrad_cpu,
)
from .cpu.implicit_gemm import implicit_gemm_can_implement, implicit_gemm_cpu
from .cpu.wgrad import wgrad_gemm_can_implement, wgrad_gemm_cpu
from .problem import ConvolutionProblem


@no_inline
def run_cpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
) raises:
    """Writes y from (x, w), dx from (dy, w) or dw from (x, dy) on the CPU."""
    comptime if pass_ == FPROP or pass_ == DGRAD:
        if not depthwise_can_implement[dtype](problem):
            depthwise_cpu[dtype, pass_](result, a, b, problem)
            return
        if not implicit_gemm_can_implement[dtype, pass_](problem):
            implicit_gemm_cpu[dtype, pass_](result, a, b, problem)
            return
    else:
        if not depthwise_can_implement[dtype](problem):
            depthwise_wgrad_cpu[dtype](result, a, b, problem)
            return
        if not wgrad_gemm_can_implement[dtype](problem):
            wgrad_gemm_cpu[dtype](result, a, b, problem)
            return
    convolution_analytic_cpu[dtype, pass_](result, a, b, problem)


@no_inline
def run_gpu[
    dtype: DType, pass_: Int
](
    result: DeviceBuffer[dtype],
    a: DeviceBuffer[dtype],
    b: DeviceBuffer[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Enqueues y from (x, w), dx from (dy, w) or dw from (x, dy) on a GPU."""
    convolution_analytic_gpu[dtype, pass_](result, a, b, problem, ctx)
