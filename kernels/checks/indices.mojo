"""A check of indices for operators whose kernels compare them but do not read memory there, such as the classes of a
loss."""

from std.math import ceildiv

from max.gpu import global_idx, grid_dim
from max.gpu.host import DeviceContext

from ..common.bounds import Bounds, current_bounds
from ..common.pointer import Ptr

comptime THREADS = 256
comptime MAX_BLOCKS = 1024
"""Blocks of a launch, at most: threads take several indices where there are more."""


@no_inline
def check_indices_cpu(
    index: Ptr[DType.int64], count: Int, size: Int, ignored: Int, bounds: Bounds
) raises:
    for i in range(count):
        var at = index[unsafe_offset=i]
        if at != Int64(ignored) and not bounds.holds(at, Int64(size)):
            raise Error(t"index out of range: {at} in a dimension of {size}")


@always_inline
def check_share(
    index: Ptr[DType.int64],
    count: Int64,
    size: Int64,
    ignored: Int64,
    bounds: Bounds,
    thread: Int,
    threads: Int,
):
    """Checks every index whose number is `thread` plus a multiple of `threads`.
    """
    for i in range(thread, Int(count), threads):
        var at = index[unsafe_offset=i]
        if at != ignored:
            _ = bounds.holds(at, size)


@__name("check_indices")
def check_indices_kernel(
    result: Ptr[DType.bool],
    index: Ptr[DType.int64],
    count: Int64,
    size: Int64,
    ignored: Int64,
    bounds: Bounds,
):
    var thread = Int(global_idx.x)
    if thread == 0:
        result[unsafe_offset=0] = True
    check_share(
        index, count, size, ignored, bounds, thread, Int(grid_dim.x) * THREADS
    )


@no_inline
def check_indices_gpu(
    result: Ptr[DType.bool],
    index: Ptr[DType.int64],
    count: Int,
    size: Int,
    ignored: Int,
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[check_indices_kernel](
        result,
        index,
        Int64(count),
        Int64(size),
        Int64(ignored),
        current_bounds(),
        grid_dim=max(1, min(ceildiv(count, THREADS), MAX_BLOCKS)),
        block_dim=THREADS,
    )
