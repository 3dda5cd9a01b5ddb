"""Depthwise convolutions' entries in libraries for any GPU; `operands.mojo` says what they take.

They have one channel in each group, in and out; any other problem goes to the always-right kernel.
"""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from ..analytic import convolution_analytic_gpu
from ..passes import DGRAD, FPROP, WGRAD
from ..operands import ConvolutionOperands
from ..rewrite import rewritten
from .depthwise_dispatch import run_depthwise_gpu


def _convolve[
    dtype: DType, pass_: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    given.check_order()
    var problem = rewritten[pass_](given.problem)
    var result = given.result.to_device_buffer(ctx)
    var a = given.a.to_device_buffer(ctx)
    var b = given.b.to_device_buffer(ctx)
    # Sums are float32 in the kernels.
    comptime if dtype != DType.float64:
        if run_depthwise_gpu[dtype, pass_](result, a, b, problem, ctx):
            return
    convolution_analytic_gpu[dtype, pass_](result, a, b, problem, ctx)


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
