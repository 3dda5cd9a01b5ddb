"""The pooling family's entries in its libraries: check the operands, then let the tables choose (dispatch.mojo).

`geometry` is the rank-1 int64 host tensor that problem.mojo describes; `adaptive` windows follow from the extents alone.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..library import Arguments, Operand
from . import dispatch
from .kernel import OFFSET, Operands, averages
from .problem import (
    Data,
    PoolingProblem,
    adaptive_problem,
    check_equal,
    pooling_problem,
)
from .unpool import (
    STORE,
    TAKE,
    UnpoolSizes,
    by_index_gpu,
    scatter_add_cpu,
    scatter_add_gpu,
    unpool_cpu,
    unpool_dgrad_cpu,
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


def _problem[
    adaptive: Bool
](
    geometry: Operand[DType.int64, 1],
    x_shape: IndexList[5],
    y_shape: IndexList[5],
) raises -> PoolingProblem:
    comptime if adaptive:
        return adaptive_problem(x_shape, y_shape)
    return pooling_problem(
        _data(geometry), geometry.dim_size(0), x_shape, y_shape
    )


def _check_entries[
    entry: DType
](
    entries: IndexList[5],
    wanted: IndexList[5],
    rule: String,
    p: PoolingProblem,
) raises:
    comptime by_offset = entry == OFFSET
    var name = "offsets" if by_offset else "indices"
    _check_same_shape(name, entries, wanted, rule)
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


def max_pool_fprop[
    target: StaticString, dtype: DType, entry: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y, entries = the maxima of x and where they are."""
    var y = arguments.take[dtype, 5]()
    var entries = arguments.take[entry, 5]()
    var x = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[adaptive](geometry, x.shape(), y.shape())
    _check_entries[entry](entries.shape(), y.shape(), "the extent of y", p)
    var t = Operands(_data(y), _data(x), _data(entries))
    dispatch.fprop[target, adaptive](t, p, ctx)


def max_pool_dgrad[
    target: StaticString, dtype: DType, entry: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose entry names it. Deterministic; an entry
    that names no pixel under its window is ignored."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var entries = arguments.take[entry, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[adaptive](geometry, dx.shape(), dy.shape())
    _check_entries[entry](entries.shape(), dy.shape(), "the extent of dy", p)
    var t = Operands(_data(dx), _data(dy), _data(entries))
    dispatch.dgrad[target, adaptive](t, p, ctx)


def avg_pool_fprop[
    target: StaticString, dtype: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the averages of x."""
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[adaptive](geometry, x.shape(), y.shape())
    _check_undilated(p)
    dispatch.fprop[target, adaptive](averages(_data(y), _data(x)), p, ctx)


def avg_pool_dgrad[
    target: StaticString, dtype: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor. Deterministic.
    """
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[adaptive](geometry, dx.shape(), dy.shape())
    _check_undilated(p)
    dispatch.dgrad[target, adaptive](averages(_data(dx), _data(dy)), p, ctx)


def _unpool_sizes(
    small: IndexList[5], indices: IndexList[5], large: IndexList[5]
) raises -> UnpoolSizes:
    """Checks and sizes of tensors of which the small one has indices into the large one.
    """
    check_equal("output.N", large[0], small[0], "the input's N")
    check_equal("output.C", large[4], small[4], "the input's C")
    _check_same_shape("indices", indices, small, "the extent of what they move")
    return UnpoolSizes(
        Int64(small[0]),
        Int64(small[1] * small[2] * small[3]),
        Int64(large[1] * large[2] * large[3]),
        Int64(small[4]),
    )


def max_pool_dgrad_scatter[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx scatters dy to where the indices point, whatever produced them. Atomic on a GPU, so not deterministic
    there; an index outside the plane is ignored."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _unpool_sizes(dy.shape(), indices.shape(), dx.shape())
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
    var s = _unpool_sizes(x.shape(), indices.shape(), y.shape())
    if s.large() == 0:
        return
    comptime if is_cpu[target]():
        unpool_cpu(_data(y), _data(x), _data(indices), s)
    else:
        ctx.enqueue_memset(y.to_device_buffer(ctx), 0)
        by_index_gpu[STORE](ctx, _data(y), _data(x), _data(indices), s)


def max_unpool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx takes dy at the indices; an index outside the plane gives zero."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _unpool_sizes(dx.shape(), indices.shape(), dy.shape())
    if s.small() == 0:
        return
    comptime if is_cpu[target]():
        unpool_dgrad_cpu(_data(dx), _data(dy), _data(indices), s)
    else:
        by_index_gpu[TAKE](ctx, _data(dy), _data(dx), _data(indices), s)
