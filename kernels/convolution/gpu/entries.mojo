"""The convolutions' entries in libraries for any GPU; `operands.mojo` says what they take.

`grouping` says which kernels are compiled (passes.mojo).
"""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from ..passes import DGRAD, FPROP, WGRAD
from ..operands import ConvolutionOperands
from .dispatch import run_gpu


def _convolve[
    dtype: DType, pass_: Int, grouping: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    given.check_order()
    run_gpu[dtype, pass_, grouping](
        given.result.to_device_buffer(ctx),
        given.a.to_device_buffer(ctx),
        given.b.to_device_buffer(ctx),
        given.problem,
        ctx,
    )


def conv_fprop[
    target: StaticString, dtype: DType, grouping: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The forward pass, y = x * w."""
    _convolve[dtype, FPROP, grouping](arguments, ctx)


def conv_dgrad[
    target: StaticString, dtype: DType, grouping: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of x; input pixels that no window covers get zero."""
    _convolve[dtype, DGRAD, grouping](arguments, ctx)


def conv_wgrad[
    target: StaticString, dtype: DType, grouping: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of w, reduced over N, O, P and Q."""
    _convolve[dtype, WGRAD, grouping](arguments, ctx)
