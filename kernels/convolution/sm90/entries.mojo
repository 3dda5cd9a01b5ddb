"""The convolutions' entries in libraries for Hopper; `operands.mojo` says what they take.

What Hopper's kernels do not take goes to the library function `rest`, that for any GPU (gpu/entries.mojo): the two are
compiled side by side. `grouping` says which kernels are compiled (passes.mojo).
"""

from std.sys import size_of

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from ..passes import DGRAD, FPROP, ONE_GROUP, WGRAD
from ..operands import ConvolutionOperands
from ..rewrite import rewritten
from .dispatch import are_aligned, can_implement, run
from .grouped import grouped_can_implement, run_grouped


def _convolve[
    dtype: DType, pass_: Int, grouping: Int, rest: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var given = ConvolutionOperands[dtype, pass_](arguments)
    given.check_order()
    var problem = rewritten[pass_](given.problem)
    var result = given.result.data
    var a = given.a.data
    var b = given.b.data
    if are_aligned[dtype](result, a, b):
        if not can_implement[dtype, pass_](problem):
            run[dtype, pass_](result, a, b, problem, ctx)
            return
        comptime if grouping != ONE_GROUP and size_of[dtype]() == 2:
            if not grouped_can_implement[dtype, pass_](problem):
                run_grouped[dtype, pass_](result, a, b, problem, ctx)
                return
    given.call[rest](ctx)


def conv_fprop_sm90[
    target: StaticString, dtype: DType, grouping: Int, rest: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The forward pass, y = x * w."""
    _convolve[dtype, FPROP, grouping, rest](arguments, ctx)


def conv_dgrad_sm90[
    target: StaticString, dtype: DType, grouping: Int, rest: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of x; input pixels that no window covers get zero."""
    _convolve[dtype, DGRAD, grouping, rest](arguments, ctx)


def conv_wgrad_sm90[
    target: StaticString, dtype: DType, grouping: Int, rest: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of w, reduced over N, O, P and Q."""
    _convolve[dtype, WGRAD, grouping, rest](arguments, ctx)
