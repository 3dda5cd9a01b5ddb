"""Running sums: y [outer, count, inner], y[o, i, n] = the sum of x[o, 0 .. i, n].

Halves add up in float32. On the CPU cores share the columns, of which each is walked from its beginning. On a GPU a
block walks a row, BLOCK elements at a time, whose running sums it takes in shared memory; a column of a tensor with an
inner extent belongs to one thread.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from .values import Extents

comptime THREADS = 256


@always_inline
def _column[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], first: Int, extents: Extents):
    var total = Scalar[acc](0)
    for i in range(extents.reduced):
        var at = first + i * extents.inner
        total += x[unsafe_offset=at].cast[acc]()
        y[unsafe_offset=at] = total.cast[dtype]()


@no_inline
def cumsum_cpu[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], extents: Extents):
    var columns = extents.outputs()
    var workers = workers_for(extents.size(), columns)

    @always_inline
    def task(worker: Int) {imm}:
        for column in range(
            columns * worker // workers, columns * (worker + 1) // workers
        ):
            var o = column // extents.inner
            var first = o * extents.reduced * extents.inner
            _column[dtype, acc](y, x, first + column % extents.inner, extents)

    sync_parallelize(task, workers)


@__name(t"cumsum_columns_{dtype}_{acc}")
def cumsum_columns_kernel[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], outer: Int64, count: Int64, inner: Int64):
    var column = global_idx.x
    if column < Int(outer) * Int(inner):
        var o = column // Int(inner)
        _column[dtype, acc](
            y,
            x,
            o * Int(count) * Int(inner) + column % Int(inner),
            Extents(Int(outer), Int(count), Int(inner)),
        )


@__name(t"cumsum_rows_{dtype}_{acc}")
def cumsum_rows_kernel[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], count: Int64):
    var shared = stack_allocation[
        THREADS, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var lane = Int(thread_idx.x)
    var row = Int(block_idx.x) * Int(count)
    var before = Scalar[acc](0)
    for first in range(0, Int(count), THREADS):
        var i = first + lane
        var value = Scalar[acc](0)
        if i < Int(count):
            value = x[unsafe_offset=row + i].cast[acc]()
        shared[unsafe_offset=lane] = value
        barrier()
        var distance = 1
        while distance < THREADS:
            var other = Scalar[acc](0)
            if lane >= distance:
                other = shared[unsafe_offset=lane - distance]
            barrier()
            value += other
            shared[unsafe_offset=lane] = value
            barrier()
            distance *= 2
        if i < Int(count):
            y[unsafe_offset=row + i] = (before + value).cast[dtype]()
        before += shared[unsafe_offset=THREADS - 1]
        barrier()


@no_inline
def cumsum_rows_gpu[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], extents: Extents, ctx: DeviceContext) raises:
    """A block for each row; `inner` is 1."""
    ctx.enqueue_function[cumsum_rows_kernel[dtype, acc]](
        y,
        x,
        Int64(extents.reduced),
        grid_dim=extents.outer,
        block_dim=THREADS,
    )


@no_inline
def cumsum_columns_gpu[
    dtype: DType, acc: DType
](y: Ptr[dtype], x: Ptr[dtype], extents: Extents, ctx: DeviceContext) raises:
    """A thread for each column."""
    ctx.enqueue_function[cumsum_columns_kernel[dtype, acc]](
        y,
        x,
        Int64(extents.outer),
        Int64(extents.reduced),
        Int64(extents.inner),
        grid_dim=ceildiv(extents.outputs(), THREADS),
        block_dim=THREADS,
    )
