"""Which kernel runs which problem: one readable table for each device."""

from max.gpu.host import DeviceBuffer, DeviceContext

from .analytic import convolution_analytic_cpu, convolution_analytic_gpu
from .common import DGRAD, FPROP, WGRAD, Ptr
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
