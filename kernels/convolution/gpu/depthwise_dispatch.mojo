"""Which kernel runs which depthwise problem on any GPU: the rows of dispatch.mojo's table for one channel in each group.
"""

from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.pointer import device_pointer
from ...common.tensor_cores import pairs_compile
from ..passes import FPROP, WGRAD
from ..problem import ConvolutionProblem
from .band import FEW_TAPS, band_can_implement, is_better_by_bands
from .depthwise_launch import (
    depthwise_gather_gpu,
    depthwise_gpu_can_implement,
    marches,
)
from .depthwise_band import depthwise_band_gpu
from .depthwise_band_wgrad import (
    band_wgrad_can_implement,
    depthwise_band_wgrad_gpu,
)
from .depthwise_wgrad import depthwise_wgrad_gpu


@no_inline
def run_depthwise_gpu[
    dtype: DType, pass_: Int
](
    result: DeviceBuffer[dtype],
    a: DeviceBuffer[dtype],
    b: DeviceBuffer[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
) raises -> Bool:
    """Enqueues y from (x, w), dx from (dy, w) or dw from (x, dy) and answers True, or answers False where the kernels do
    not take the problem.
    """
    var to = device_pointer(result)
    var left = device_pointer(a)
    var right = device_pointer(b)
    comptime if pairs_compile[dtype]():
        comptime if pass_ == WGRAD:
            if (
                problem.r * problem.s > FEW_TAPS
                and not band_wgrad_can_implement(problem, left, right)
            ):
                depthwise_band_wgrad_gpu[dtype](result, a, b, problem, ctx)
                return True
        else:
            comptime forward = pass_ == FPROP
            if is_better_by_bands(
                problem, forward, marches(problem)
            ) and not band_can_implement(problem, forward, to, left):
                depthwise_band_gpu[dtype, pass_](to, left, right, problem, ctx)
                return True
    if depthwise_gpu_can_implement(problem):
        return False
    comptime if pass_ == WGRAD:
        depthwise_wgrad_gpu[dtype](result, a, b, problem, ctx)
    else:
        depthwise_gather_gpu[dtype, pass_](result, a, b, problem, ctx)
    return True
