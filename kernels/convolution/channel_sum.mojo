"""Bias gradient: the sum of y [N, O, P, Q, K] over every axis but the last.

Two stages in a fixed order, so the same input gives the same bits: rows are split into slices, each slice has its own
partial sums, and the second stage adds the slices one after the other.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace
from std.memory import stack_allocation

from ..library import scratch
from ..parallel import sync_parallelize
from .common import Ptr, accumulation_type, worker_count

comptime COLUMNS = 32
comptime ROWS = 8
comptime MAX_SLICES = 128
# Slices are flushed to the partial sums in chunks of this many rows: pairwise-like rounding for long sums.
comptime CHUNK_ROWS = 512


@always_inline
def _add_columns[
    dtype: DType, width: Int
](
    partial: Ptr[accumulation_type[dtype]],
    y: Ptr[dtype],
    k: Int,
    column: Int,
    first: Int,
    last: Int,
):
    var total = SIMD[accumulation_type[dtype], width](0)
    var row = first
    while row < last:
        var stop = min(row + CHUNK_ROWS, last)
        var chunk = SIMD[accumulation_type[dtype], width](0)
        for i in range(row, stop):
            chunk += (
                y.unsafe_offset(i * k + column)
                .unsafe_load[width=width]()
                .cast[accumulation_type[dtype]]()
            )
        total += chunk
        row = stop
    partial.unsafe_offset(column).unsafe_store(total)


@no_inline
def channel_sum_cpu[
    dtype: DType
](result: Ptr[dtype], y: Ptr[dtype], rows: Int, k: Int):
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var workers = worker_count()
    var partials = unsafe_alloc[Scalar[acc_type]](
        max(1, workers * k), alignment=64
    )

    @always_inline
    def task(worker: Int) {imm}:
        var mine = partials.unsafe_offset(worker * k)
        var first = rows * worker // workers
        var last = rows * (worker + 1) // workers
        var column = 0
        while column + 4 * width <= k:
            _add_columns[dtype, 4 * width](mine, y, k, column, first, last)
            column += 4 * width
        while column + width <= k:
            _add_columns[dtype, width](mine, y, k, column, first, last)
            column += width
        while column < k:
            _add_columns[dtype, 1](mine, y, k, column, first, last)
            column += 1

    sync_parallelize(task, workers)
    for column in range(k):
        var total = Scalar[acc_type](0)
        for worker in range(workers):
            total += partials[unsafe_offset=worker * k + column]
        result[unsafe_offset=column] = total.cast[dtype]()
    partials.unsafe_free()


def channel_sum_partial_kernel[
    dtype: DType
](
    partials: Ptr[accumulation_type[dtype]],
    y: Ptr[dtype],
    rows: Int64,
    k: Int64,
    slice_rows: Int64,
):
    """One block sums COLUMNS channels of one slice of rows; ROWS threads share a channel.
    """
    comptime acc_type = accumulation_type[dtype]
    var shared = stack_allocation[
        COLUMNS * ROWS,
        Scalar[acc_type],
        address_space=AddressSpace.SHARED,
    ]()
    var column = block_idx.x * COLUMNS + thread_idx.x
    var first = block_idx.y * Int(slice_rows)
    var last = min(first + Int(slice_rows), Int(rows))
    var total = Scalar[acc_type](0)
    if column < Int(k):
        for row in range(first + thread_idx.y, last, ROWS):
            total += y[unsafe_offset=row * Int(k) + column].cast[acc_type]()
    shared[unsafe_offset=thread_idx.y * COLUMNS + thread_idx.x] = total
    barrier()
    if thread_idx.y == 0 and column < Int(k):
        total = 0
        for i in range(ROWS):
            total += shared[unsafe_offset=i * COLUMNS + thread_idx.x]
        partials[unsafe_offset=block_idx.y * Int(k) + column] = total


def channel_sum_final_kernel[
    dtype: DType
](
    result: Ptr[dtype],
    partials: Ptr[accumulation_type[dtype]],
    k: Int64,
    slices: Int64,
):
    var column = global_idx.x
    if column >= Int(k):
        return
    var total = Scalar[accumulation_type[dtype]](0)
    for i in range(Int(slices)):
        total += partials[unsafe_offset=i * Int(k) + column]
    result[unsafe_offset=column] = total.cast[dtype]()


@no_inline
def channel_sum_gpu[
    dtype: DType
](
    result: DeviceBuffer[dtype],
    y: DeviceBuffer[dtype],
    rows: Int,
    k: Int,
    ctx: DeviceContext,
) raises:
    if k == 0:
        return
    var slices = max(1, min(MAX_SLICES, ceildiv(rows, 8 * ROWS)))
    var slice_rows = ceildiv(rows, slices)
    var partials = scratch[accumulation_type[dtype]](ctx, slices * k)
    ctx.enqueue_function[channel_sum_partial_kernel[dtype]](
        partials,
        y,
        Int64(rows),
        Int64(k),
        Int64(slice_rows),
        grid_dim=(ceildiv(k, COLUMNS), slices),
        block_dim=(COLUMNS, ROWS),
    )
    ctx.enqueue_function[channel_sum_final_kernel[dtype]](
        result,
        partials,
        Int64(k),
        Int64(slices),
        grid_dim=ceildiv(k, 256),
        block_dim=256,
    )
