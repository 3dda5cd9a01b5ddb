"""The convolutions' entries in libraries; `operands.mojo` has their operands.

`grouping` says which kernels are compiled (passes.mojo), and `Kernels` is the table of a device (its dispatch.mojo).
What that does not take goes to the library function `rest`: Hopper's kernels and those for any GPU are compiled side by
side.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.library import Arguments
from .kernel import KernelChoice, ConvolutionTensors
from .operands import ConvolutionOperands
from .passes import DGRAD, FPROP, WGRAD
from .rewrite import rewritten


def _convolve[
    target: StaticString,
    dtype: DType,
    grouping: Int,
    pass_: Int,
    Kernels: KernelChoice,
    rest: StaticString,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    comptime if not is_cpu[target]():
        given.check_order()
    var tensors = ConvolutionTensors(
        given.result.data,
        given.a.data,
        given.b.data,
        given.geometry.epilogue,
    )
    var problem = rewritten[pass_](given.problem)
    if Kernels.launch[dtype, pass_, grouping](ctx, tensors, problem):
        return
    comptime if rest:
        given.call[rest](ctx)
    else:
        raise Error(t"convolution: no kernel takes {problem}")


comptime conv_fprop[
    target: StaticString,
    dtype: DType,
    grouping: Int,
    Kernels: KernelChoice,
    rest: StaticString = "",
] = _convolve[target, dtype, grouping, FPROP, Kernels, rest]
"""The forward pass, y = x * w."""

comptime conv_dgrad[
    target: StaticString,
    dtype: DType,
    grouping: Int,
    Kernels: KernelChoice,
    rest: StaticString = "",
] = _convolve[target, dtype, grouping, DGRAD, Kernels, rest]
"""The data gradient; input pixels that no window covers get zero."""

comptime conv_wgrad[
    target: StaticString,
    dtype: DType,
    grouping: Int,
    Kernels: KernelChoice,
    rest: StaticString = "",
] = _convolve[target, dtype, grouping, WGRAD, Kernels, rest]
"""The weight gradient, reduced over N, O, P and Q."""
