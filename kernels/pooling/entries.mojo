"""The pooling family's entries in its libraries: check the operands, then choose an implementation.

`geometry` is the rank-1 int64 host tensor that problem.mojo describes; adaptive pooling needs none.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..library import Arguments, Operand
from . import dispatch
from .problem import (
    Data,
    PoolingProblem,
    adaptive_problem,
    check_equal,
    pooling_problem,
)
from .scatter import (
    ScatterSizes,
    scatter_add_cpu,
    scatter_add_gpu,
    unpool_cpu,
    unpool_gather_cpu,
    unpool_gather_gpu,
    unpool_gpu,
)


@always_inline
def _data[
    dtype: DType, rank: Int
](operand: Operand[dtype, rank]) -> Data[dtype]:
    return rebind[Data[dtype]](operand.data)


def _check_same_shape(
    name: String, shape: IndexList[5], wanted: IndexList[5], rule: String
) raises:
    for a in range(5):
        check_equal(String(name, ".shape[", a, "]"), shape[a], wanted[a], rule)


def _scatter_sizes(
    small: IndexList[5], large: IndexList[5]
) raises -> ScatterSizes:
    check_equal("output.N", large[0], small[0], "the input's N")
    check_equal("output.C", large[4], small[4], "the input's C")
    return ScatterSizes(
        small[0],
        small[1] * small[2] * small[3],
        large[1] * large[2] * large[3],
        small[4],
    )


def _check_offset_type[offset: DType](p: PoolingProblem) raises:
    comptime if offset == DType.uint8:
        if p.window_size() > 255:
            raise Error(
                "offsets are uint8: the window has ",
                p.window_size(),
                " taps, one byte holds at most 255",
            )


def _check_undilated(p: PoolingProblem) raises:
    if p.d.dilation != 1 or p.h.dilation != 1 or p.w.dilation != 1:
        raise Error(
            "dilation=(",
            p.d.dilation,
            ", ",
            p.h.dilation,
            ", ",
            p.w.dilation,
            "): average pooling has none",
        )


def max_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y, indices = the maxima of x and where they are, flat in the unpadded plane.
    """
    var y = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var x = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), x.shape(), y.shape()
    )
    _check_same_shape("indices", indices.shape(), y.shape(), "the extent of y")
    dispatch.max_pool_fprop[target](_data(y), _data(indices), _data(x), p, ctx)


def max_pool_fprop_offsets[
    target: StaticString, dtype: DType, offset: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """As max_pool_fprop, with the number of the winning tap within its window in place of the index.
    """
    var y = arguments.take[dtype, 5]()
    var offsets = arguments.take[offset, 5]()
    var x = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), x.shape(), y.shape()
    )
    _check_same_shape("offsets", offsets.shape(), y.shape(), "the extent of y")
    _check_offset_type[offset](p)
    dispatch.max_pool_fprop[target, offsets=True](
        _data(y), _data(offsets), _data(x), p, ctx
    )


def max_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose index names it. Deterministic; an index
    that names no pixel under its window is ignored."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
    )
    _check_same_shape(
        "indices", indices.shape(), dy.shape(), "the extent of dy"
    )
    dispatch.max_pool_dgrad[target](
        _data(dx), _data(dy), _data(indices), p, ctx
    )


def max_pool_dgrad_offsets[
    target: StaticString, dtype: DType, offset: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """As max_pool_dgrad, from the numbers of the winning taps."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var offsets = arguments.take[offset, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
    )
    _check_same_shape(
        "offsets", offsets.shape(), dy.shape(), "the extent of dy"
    )
    _check_offset_type[offset](p)
    dispatch.max_pool_dgrad[target, offsets=True](
        _data(dx), _data(dy), _data(offsets), p, ctx
    )


def max_pool_dgrad_scatter[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx scatters dy to where the indices point, whatever produced them. Atomic on a GPU, so not deterministic
    there; an index outside the plane is ignored."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _scatter_sizes(dy.shape(), dx.shape())
    _check_same_shape(
        "indices", indices.shape(), dy.shape(), "the extent of dy"
    )
    if s.large() == 0:
        return
    comptime if is_cpu[target]():
        scatter_add_cpu(_data(dx), _data(dy), _data(indices), s)
    else:
        scatter_add_gpu(
            ctx, dx.to_device_buffer(ctx), _data(dy), _data(indices), s
        )


def max_unpool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y is zero but for x at the indices; an index outside the plane is ignored.
    """
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _scatter_sizes(x.shape(), y.shape())
    _check_same_shape("indices", indices.shape(), x.shape(), "the extent of x")
    if s.large() == 0:
        return
    comptime if is_cpu[target]():
        unpool_cpu(_data(y), _data(x), _data(indices), s)
    else:
        unpool_gpu(ctx, y.to_device_buffer(ctx), _data(x), _data(indices), s)


def max_unpool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx takes dy at the indices; an index outside the plane gives zero."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _scatter_sizes(dx.shape(), dy.shape())
    _check_same_shape(
        "indices", indices.shape(), dx.shape(), "the extent of dx"
    )
    if s.small() == 0:
        return
    comptime if is_cpu[target]():
        unpool_gather_cpu(_data(dx), _data(dy), _data(indices), s)
    else:
        unpool_gather_gpu(ctx, _data(dx), _data(dy), _data(indices), s)


def avg_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the averages of x."""
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), x.shape(), y.shape()
    )
    _check_undilated(p)
    dispatch.avg_pool_fprop[target, adaptive=False](_data(y), _data(x), p, ctx)


def avg_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor. Deterministic.
    """
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = pooling_problem(
        _data(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
    )
    _check_undilated(p)
    dispatch.avg_pool_dgrad[target, adaptive=False](
        _data(dx), _data(dy), p, ctx
    )


def adaptive_max_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var y = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var x = arguments.take[dtype, 5]()
    var p = adaptive_problem(x.shape(), y.shape())
    _check_same_shape("indices", indices.shape(), y.shape(), "the extent of y")
    dispatch.max_pool_fprop[target, adaptive=True](
        _data(y), _data(indices), _data(x), p, ctx
    )


def adaptive_max_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var p = adaptive_problem(dx.shape(), dy.shape())
    _check_same_shape(
        "indices", indices.shape(), dy.shape(), "the extent of dy"
    )
    dispatch.max_pool_dgrad[target, adaptive=True](
        _data(dx), _data(dy), _data(indices), p, ctx
    )


def adaptive_avg_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var p = adaptive_problem(x.shape(), y.shape())
    dispatch.avg_pool_fprop[target, adaptive=True](_data(y), _data(x), p, ctx)


def adaptive_avg_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var p = adaptive_problem(dx.shape(), dy.shape())
    dispatch.avg_pool_dgrad[target, adaptive=True](_data(dx), _data(dy), p, ctx)
