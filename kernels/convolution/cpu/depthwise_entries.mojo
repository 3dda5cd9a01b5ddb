"""Depthwise convolutions' entries in libraries for a CPU; `operands.mojo` says what they take.

They have one channel in each group, in and out; any other problem goes to the always-right kernel.
"""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from ..analytic import convolution_analytic_cpu
from ..passes import DGRAD, FPROP, WGRAD
from ..finish import finish_result
from ..operands import ConvolutionOperands, finish_of
from ..rewrite import rewritten
from .depthwise import depthwise_cpu


def _convolve[
    dtype: DType, pass_: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    var problem = rewritten[pass_](given.problem)
    var finish = finish_of(given.geometry)
    var result = given.result.data
    var a = given.a.data
    var b = given.b.data
    if not depthwise_cpu[dtype, pass_](result, a, b, problem, finish):
        convolution_analytic_cpu[dtype, pass_](result, a, b, problem)
        finish_result[pass_](problem, finish)


def conv_fprop_depthwise[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The forward pass, y = x * w."""
    _convolve[dtype, FPROP](arguments, ctx)


def conv_dgrad_depthwise[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of x; input pixels that no window covers get zero."""
    _convolve[dtype, DGRAD](arguments, ctx)


def conv_wgrad_depthwise[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of w, reduced over N, O, P and Q."""
    _convolve[dtype, WGRAD](arguments, ctx)
