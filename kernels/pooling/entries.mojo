"""The entries, in libraries, of pooling and its gradients: they take and check operands, then a table chooses the
kernel.

`Kernels` is the table of a device and a pass (fprop_dispatch.mojo, dgrad_dispatch.mojo). `adaptive` windows follow from
the extents alone.
"""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.check import check_equal
from ..common.library import Arguments
from .kernel import OFFSET, KernelChoice, PoolingTensors, averages
from .problem import (
    PoolingNumbers,
    PoolingProblem,
    adaptive_problem,
    check_same_shape,
    pooling_problem,
)


def _problem[
    adaptive: Bool
](
    numbers: PoolingNumbers, x_shape: IndexList[5], y_shape: IndexList[5]
) raises -> PoolingProblem:
    comptime if adaptive:
        return adaptive_problem(x_shape, y_shape)
    return pooling_problem(numbers, x_shape, y_shape)


def _check_argmaxes[
    argmax: DType
](
    argmaxes: IndexList[5],
    wanted: IndexList[5],
    rule: String,
    p: PoolingProblem,
) raises:
    comptime by_offset = argmax == OFFSET
    var name = "offsets" if by_offset else "indices"
    check_same_shape(name, argmaxes, wanted, rule)
    if by_offset and p.window_size() > 255:
        raise Error(
            "offsets are uint8: the window has ",
            p.window_size(),
            " taps, one byte holds at most 255",
        )


def _check_undilated(p: PoolingProblem) raises:
    check_equal("dilation[D]", Int(p.d.dilation), 1, "average pooling's")
    check_equal("dilation[H]", Int(p.h.dilation), 1, "average pooling's")
    check_equal("dilation[W]", Int(p.w.dilation), 1, "average pooling's")


def _fprop[
    dtype: DType, argmax: DType, //, adaptive: Bool, Kernels: KernelChoice
](
    ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
) raises:
    """y = the maxima of x, and where they are as `argmax` says, or its averages.
    """
    if p.output_size() != 0:
        Kernels.launch[adaptive=adaptive](ctx, t, p)


def _dgrad[
    dtype: DType, argmax: DType, //, adaptive: Bool, Kernels: KernelChoice
](
    ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
) raises:
    """dx = for each pixel the sum over the windows above it of dy where the window's argmax names the pixel, or of its
    share of dy."""
    if p.input_size() != 0:
        Kernels.launch[adaptive=adaptive](ctx, t, p)


def max_pool_fprop[
    target: StaticString,
    dtype: DType,
    argmax: DType,
    adaptive: Bool,
    Kernels: KernelChoice,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y, argmaxes = the maxima of x and where they are."""
    var numbers = PoolingNumbers.take(arguments)
    var y = arguments.take[dtype, 5]()
    var argmaxes = arguments.take[argmax, 5]()
    var x = arguments.take[dtype, 5]()
    var p = _problem[adaptive](numbers, x.shape(), y.shape())
    _check_argmaxes[argmax](argmaxes.shape(), y.shape(), "the extent of y", p)
    var t = PoolingTensors(y.data, x.data, argmaxes.data)
    _fprop[adaptive, Kernels](ctx, t, p)


def max_pool_dgrad[
    target: StaticString,
    dtype: DType,
    argmax: DType,
    adaptive: Bool,
    Kernels: KernelChoice,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose argmax names it. Deterministic; an argmax
    that names no pixel under its window is ignored."""
    var numbers = PoolingNumbers.take(arguments)
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var argmaxes = arguments.take[argmax, 5]()
    var p = _problem[adaptive](numbers, dx.shape(), dy.shape())
    _check_argmaxes[argmax](argmaxes.shape(), dy.shape(), "the extent of dy", p)
    var t = PoolingTensors(dx.data, dy.data, argmaxes.data)
    _dgrad[adaptive, Kernels](ctx, t, p)


def avg_pool_fprop[
    target: StaticString, dtype: DType, Kernels: KernelChoice
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the averages of x."""
    var numbers = PoolingNumbers.take(arguments)
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var p = _problem[False](numbers, x.shape(), y.shape())
    _check_undilated(p)
    _fprop[False, Kernels](ctx, averages(y.data, x.data), p)


def avg_pool_dgrad[
    target: StaticString, dtype: DType, Kernels: KernelChoice
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor. Deterministic.
    """
    var numbers = PoolingNumbers.take(arguments)
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var p = _problem[False](numbers, dx.shape(), dy.shape())
    _check_undilated(p)
    _dgrad[False, Kernels](ctx, averages(dx.data, dy.data), p)
