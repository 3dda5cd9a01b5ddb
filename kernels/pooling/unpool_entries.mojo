"""The entries, in libraries for any device, that scatter and gather by stored index."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.bounds import current_bounds
from ..common.check import check_equal
from ..common.library import Arguments
from .problem import check_same_shape
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


def _unpool_sizes(
    small: IndexList[5], indices: IndexList[5], large: IndexList[5]
) raises -> UnpoolSizes:
    """Checks and sizes of tensors of which the small one has indices into the large one.
    """
    check_equal("output.N", large[0], small[0], "the input's N")
    check_equal("output.C", large[4], small[4], "the input's C")
    check_same_shape("indices", indices, small, "the extent of what they move")
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
        scatter_add_cpu(dx.data, dy.data, indices.data, s)
    else:
        scatter_add_gpu(ctx, dx.to_device_buffer(ctx), dy.data, indices.data, s)


def max_unpool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y is zero but for x at the indices; an index outside the plane is ignored, and reported.
    """
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var indices = arguments.take[DType.int64, 5]()
    var s = _unpool_sizes(x.shape(), indices.shape(), y.shape())
    if s.large() == 0:
        return
    comptime if is_cpu[target]():
        unpool_cpu(y.data, x.data, indices.data, s, current_bounds())
    else:
        ctx.enqueue_memset(y.to_device_buffer(ctx), 0)
        by_index_gpu[STORE](
            ctx, y.data, x.data, indices.data, s, current_bounds()
        )


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
        unpool_dgrad_cpu(dx.data, dy.data, indices.data, s)
    else:
        by_index_gpu[TAKE](ctx, dy.data, dx.data, indices.data, s)
