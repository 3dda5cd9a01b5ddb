"""Depthwise convolution on a CPU: the channelwise kernels with one channel in each group.
"""

from ...common.pointer import Ptr
from ..passes import WGRAD
from ..finish import Finish, finish_result
from ..problem import ConvolutionProblem
from .channelwise import channelwise_can_implement, channelwise_cpu
from .channelwise_wgrad import channelwise_wgrad_cpu


@no_inline
def depthwise_cpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
    finish: Finish,
) raises -> Bool:
    """Writes y from (x, w), dx from (dy, w) or dw from (x, dy) and answers True, or answers False where the kernels do
    not take the problem.
    """
    if channelwise_can_implement[dtype, 1](problem):
        return False
    comptime if pass_ == WGRAD:
        channelwise_wgrad_cpu[dtype, 1](result, a, b, problem)
    else:
        channelwise_cpu[dtype, pass_, 1](result, a, b, problem)
        finish_result[pass_](problem, finish)
    return True
