"""The convolutions' entries in libraries for any GPU; `operands.mojo` says what they take.

Without `grouped` the kernels that only grouped problems need are not compiled.
"""

from max.gpu.host import DeviceContext

from ...library import Arguments
from ..common import DGRAD, FPROP, WGRAD
from ..operands import ConvolutionOperands
from .dispatch import run_gpu


def _convolve[
    dtype: DType, pass_: Int, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    given.check_order()
    run_gpu[dtype, pass_, grouped](
        given.result.to_device_buffer(ctx),
        given.a.to_device_buffer(ctx),
        given.b.to_device_buffer(ctx),
        given.problem,
        ctx,
    )


def conv_fprop[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The forward pass, y = x * w."""
    _convolve[dtype, FPROP, grouped](arguments, ctx)


def conv_dgrad[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of x; input pixels that no window covers get zero."""
    _convolve[dtype, DGRAD, grouped](arguments, ctx)


def conv_wgrad[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of w, reduced over N, O, P and Q."""
    _convolve[dtype, WGRAD, grouped](arguments, ctx)
