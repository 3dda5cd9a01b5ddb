"""Batch normalization's reductions on a GPU, in two stages with a fixed order: no atomics, the same bits every run.

Stage 1: a block of LANES x ROWS threads reduces one slice of rows of LANES vectors of columns, each thread 16 bytes
wide. Stage 2: a block for each channel merges the slices. Partial results lie as [column][slice], so that stage 2
reads them in one piece.
"""

from std.math import ceildiv, sqrt
from std.memory import stack_allocation
from std.sys import size_of

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..library import scratch
from ..convolution.common import Ptr
from .columns import Columns, Moments, Sums, chunk_moments, chunk_sums, folded
from .partials import Partials, Slices, slice_row

comptime LANES = 32
comptime ROWS = 8
# Enough blocks to fill the largest GPU several times over; more would only lengthen stage 2.
comptime BLOCKS = 1024
comptime MAX_SLICES = 512
comptime MERGERS = 128


@always_inline
def _thread_count(first: Int, last: Int, row: Int) -> Int:
    """Rows that thread row `row` of a block reads: every ROWS-th."""
    return max(0, ceildiv(last - first - row, ROWS))


def moments_kernel[
    dtype: DType, acc: DType, V: Int
](
    partials: Ptr[acc],
    x: Ptr[dtype],
    wide_rows: Int64,
    width: Int64,
    slices: Int64,
):
    var shared = stack_allocation[
        2 * LANES * ROWS,
        SIMD[acc, V],
        address_space=AddressSpace.SHARED,
    ]()
    var column = (block_idx.x * LANES + thread_idx.x) * V
    var row = thread_idx.y
    var slice = block_idx.y
    var pitch = Int(width)
    var first = slice_row(Int(wide_rows), Int(slices), slice)
    var last = slice_row(Int(wide_rows), Int(slices), slice + 1)
    var mine = row * LANES + thread_idx.x
    var moments = Moments[acc, V]()
    if column < pitch:
        moments = chunk_moments[dtype, acc, V, aligned=True](
            x.unsafe_offset((first + row) * pitch + column),
            0,
            _thread_count(first, last, row),
            ROWS * pitch,
        )
    shared[unsafe_offset=2 * mine] = moments.mean
    shared[unsafe_offset=2 * mine + 1] = moments.m2
    barrier()
    if row == 0 and column < pitch:
        for other in range(1, ROWS):
            var theirs = 2 * (mine + other * LANES)
            moments.merge(
                Moments[acc, V](
                    _thread_count(first, last, other),
                    shared[unsafe_offset=theirs],
                    shared[unsafe_offset=theirs + 1],
                )
            )
        comptime for lane in range(V):
            var at = (column + lane) * Int(slices) + slice
            partials[unsafe_offset=at] = moments.mean[lane]
            partials[unsafe_offset=pitch * Int(slices) + at] = moments.m2[lane]


def sums_kernel[
    dtype: DType, acc: DType, V: Int
](
    partials: Ptr[acc],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    mean: Ptr[acc],
    wide_rows: Int64,
    width: Int64,
    channels: Int64,
    slices: Int64,
):
    var shared = stack_allocation[
        2 * LANES * ROWS,
        SIMD[acc, V],
        address_space=AddressSpace.SHARED,
    ]()
    var column = (block_idx.x * LANES + thread_idx.x) * V
    var row = thread_idx.y
    var slice = block_idx.y
    var pitch = Int(width)
    var first = slice_row(Int(wide_rows), Int(slices), slice)
    var last = slice_row(Int(wide_rows), Int(slices), slice + 1)
    var mine = row * LANES + thread_idx.x
    var sums = Sums[acc, V](0, 0)
    if column < pitch:
        var means = SIMD[acc, V](0)
        comptime for lane in range(V):
            means[lane] = mean[unsafe_offset=(column + lane) % Int(channels)]
        var offset = (first + row) * pitch + column
        sums = chunk_sums[dtype, acc, V, aligned=True](
            dy.unsafe_offset(offset),
            x.unsafe_offset(offset),
            means,
            0,
            _thread_count(first, last, row),
            ROWS * pitch,
        )
    shared[unsafe_offset=2 * mine] = sums.dy
    shared[unsafe_offset=2 * mine + 1] = sums.product
    barrier()
    if row == 0 and column < pitch:
        for other in range(1, ROWS):
            var theirs = 2 * (mine + other * LANES)
            sums.dy += shared[unsafe_offset=theirs]
            sums.product += shared[unsafe_offset=theirs + 1]
        comptime for lane in range(V):
            var at = (column + lane) * Int(slices) + slice
            partials[unsafe_offset=at] = sums.dy[lane]
            partials[unsafe_offset=pitch * Int(slices) + at] = sums.product[
                lane
            ]


@always_inline
def _block_sum[dtype: DType](value: Scalar[dtype]) -> Scalar[dtype]:
    """The sum over the block's MERGERS threads, in every thread."""
    var shared = stack_allocation[
        MERGERS, Scalar[dtype], address_space=AddressSpace.SHARED
    ]()
    var mine = thread_idx.x
    barrier()
    shared[unsafe_offset=mine] = value
    barrier()
    var half = MERGERS // 2
    while half > 0:
        if mine < half:
            shared[unsafe_offset=mine] += shared[unsafe_offset=mine + half]
        barrier()
        half //= 2
    return shared[unsafe_offset=0]


def merge_moments_kernel[
    dtype: DType, acc: DType, running: Bool, Parts: Partials
](
    mean: Ptr[acc],
    invstd: Ptr[acc],
    new_mean: Ptr[acc],
    new_variance: Ptr[acc],
    partials: Ptr[acc],
    x: Ptr[dtype],
    old_mean: Ptr[acc],
    old_variance: Ptr[acc],
    parts: Parts,
    rows: Int64,
    channels: Int64,
    momentum: Scalar[acc],
    epsilon: Scalar[acc],
):
    """One channel: mean = sum(n_i mean_i) / n, then m2 = sum(m2_i + n_i (mean_i - mean)^2).
    """
    var channel = Int(block_idx.x)
    var tail = parts.tail()
    var plane = parts.plane()
    var n = Scalar[acc](Int(rows))
    var total = Scalar[acc](0)
    for part in range(thread_idx.x, parts.parts(channel), MERGERS):
        total += partials[
            unsafe_offset=parts.place(channel, part)
        ] * parts.count(partials, channel, part)
    for i in range(thread_idx.x, tail, MERGERS):
        total += x[
            unsafe_offset=(Int(rows) - tail + i) * Int(channels) + channel
        ].cast[acc]()
    var center = _block_sum(total) / n
    total = 0
    for part in range(thread_idx.x, parts.parts(channel), MERGERS):
        var at = parts.place(channel, part)
        var delta = partials[unsafe_offset=at] - center
        total += partials[
            unsafe_offset=plane + at
        ] + delta * delta * parts.count(partials, channel, part)
    for i in range(thread_idx.x, tail, MERGERS):
        var delta = (
            x[
                unsafe_offset=(Int(rows) - tail + i) * Int(channels) + channel
            ].cast[acc]()
            - center
        )
        total += delta * delta
    var m2 = _block_sum(total)
    if thread_idx.x == 0:
        mean[unsafe_offset=channel] = center
        invstd[unsafe_offset=channel] = 1 / sqrt(m2 / n + epsilon)
        comptime if running:
            new_mean[unsafe_offset=channel] = (
                momentum * center
                + (1 - momentum) * old_mean[unsafe_offset=channel]
            )
            new_variance[unsafe_offset=channel] = (
                momentum * (m2 / (n - 1))
                + (1 - momentum) * old_variance[unsafe_offset=channel]
            )


def merge_sums_kernel[
    dtype: DType, acc: DType, Parts: Partials
](
    sum_dy: Ptr[acc],
    grad_weight: Ptr[acc],
    mean_dy: Ptr[acc],
    projection: Ptr[acc],
    partials: Ptr[acc],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    mean: Ptr[acc],
    invstd: Ptr[acc],
    parts: Parts,
    rows: Int64,
    channels: Int64,
):
    var channel = Int(block_idx.x)
    var tail = parts.tail()
    var plane = parts.plane()
    var center = mean[unsafe_offset=channel]
    var sum = Scalar[acc](0)
    var product = Scalar[acc](0)
    for part in range(thread_idx.x, parts.parts(channel), MERGERS):
        var at = parts.place(channel, part)
        sum += partials[unsafe_offset=at]
        product += partials[unsafe_offset=plane + at]
    for i in range(thread_idx.x, tail, MERGERS):
        var at = (Int(rows) - tail + i) * Int(channels) + channel
        var grad = dy[unsafe_offset=at].cast[acc]()
        sum += grad
        product += grad * (x[unsafe_offset=at].cast[acc]() - center)
    sum = _block_sum(sum)
    product = _block_sum(product)
    if thread_idx.x == 0:
        var n = Scalar[acc](Int(rows))
        var scale = invstd[unsafe_offset=channel]
        sum_dy[unsafe_offset=channel] = sum
        grad_weight[unsafe_offset=channel] = product * scale
        mean_dy[unsafe_offset=channel] = sum / n
        projection[unsafe_offset=channel] = product * scale * scale / n


def _slices(columns: Columns, vector: Int) -> Int:
    var across = ceildiv(columns.width(), LANES * vector)
    return max(
        1,
        min(
            min(ceildiv(BLOCKS, across), MAX_SLICES),
            ceildiv(columns.wide_rows(), 4 * ROWS),
        ),
    )


@always_inline
def _vectorized[
    dtype: DType
](
    a: DeviceBuffer[dtype], b: DeviceBuffer[dtype], rows: Int, channels: Int
) -> Bool:
    """Whether both tensors can be read 16 bytes at a time: aligned, and whole vectors to a row.
    """
    comptime V = 16 // size_of[dtype]()
    var columns = folded(rows, channels, V, LANES * V)
    return (
        columns.width() % V == 0
        and Int(a.unsafe_ptr()) % 16 == 0
        and Int(b.unsafe_ptr()) % 16 == 0
    )


@no_inline
def _statistics[
    dtype: DType, acc: DType, V: Int, running: Bool
](
    mean: DeviceBuffer[acc],
    invstd: DeviceBuffer[acc],
    new_mean: DeviceBuffer[acc],
    new_variance: DeviceBuffer[acc],
    x: DeviceBuffer[dtype],
    old_mean: DeviceBuffer[acc],
    old_variance: DeviceBuffer[acc],
    rows: Int,
    channels: Int,
    momentum: Float64,
    epsilon: Float64,
    ctx: DeviceContext,
) raises:
    var columns = folded(rows, channels, V, LANES * V)
    var slices = _slices(columns, V)
    var partials = scratch[acc](ctx, 2 * columns.width() * slices)
    ctx.enqueue_function[moments_kernel[dtype, acc, V]](
        partials,
        x,
        Int64(columns.wide_rows()),
        Int64(columns.width()),
        Int64(slices),
        grid_dim=(ceildiv(columns.width(), LANES * V), slices),
        block_dim=(LANES, ROWS),
    )
    ctx.enqueue_function[merge_moments_kernel[dtype, acc, running, Slices]](
        mean,
        invstd,
        new_mean,
        new_variance,
        partials,
        x,
        old_mean,
        old_variance,
        Slices(
            Int64(rows),
            Int64(channels),
            Int64(columns.fold),
            Int64(slices),
        ),
        Int64(rows),
        Int64(channels),
        momentum.cast[acc](),
        epsilon.cast[acc](),
        grid_dim=channels,
        block_dim=MERGERS,
    )
    _ = partials^


def statistics_gpu[
    dtype: DType, acc: DType, running: Bool
](
    mean: DeviceBuffer[acc],
    invstd: DeviceBuffer[acc],
    new_mean: DeviceBuffer[acc],
    new_variance: DeviceBuffer[acc],
    x: DeviceBuffer[dtype],
    old_mean: DeviceBuffer[acc],
    old_variance: DeviceBuffer[acc],
    rows: Int,
    channels: Int,
    momentum: Float64,
    epsilon: Float64,
    ctx: DeviceContext,
) raises:
    comptime V = 16 // size_of[dtype]()
    if _vectorized(x, x, rows, channels):
        _statistics[dtype, acc, V, running](
            mean,
            invstd,
            new_mean,
            new_variance,
            x,
            old_mean,
            old_variance,
            rows,
            channels,
            momentum,
            epsilon,
            ctx,
        )
    else:
        _statistics[dtype, acc, 1, running](
            mean,
            invstd,
            new_mean,
            new_variance,
            x,
            old_mean,
            old_variance,
            rows,
            channels,
            momentum,
            epsilon,
            ctx,
        )


@no_inline
def _gradient_sums[
    dtype: DType, acc: DType, V: Int
](
    sum_dy: DeviceBuffer[acc],
    grad_weight: DeviceBuffer[acc],
    mean_dy: DeviceBuffer[acc],
    projection: DeviceBuffer[acc],
    dy: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    mean: DeviceBuffer[acc],
    invstd: DeviceBuffer[acc],
    rows: Int,
    channels: Int,
    ctx: DeviceContext,
) raises:
    var columns = folded(rows, channels, V, LANES * V)
    var slices = _slices(columns, V)
    var partials = scratch[acc](ctx, 2 * columns.width() * slices)
    ctx.enqueue_function[sums_kernel[dtype, acc, V]](
        partials,
        dy,
        x,
        mean,
        Int64(columns.wide_rows()),
        Int64(columns.width()),
        Int64(channels),
        Int64(slices),
        grid_dim=(ceildiv(columns.width(), LANES * V), slices),
        block_dim=(LANES, ROWS),
    )
    ctx.enqueue_function[merge_sums_kernel[dtype, acc, Slices]](
        sum_dy,
        grad_weight,
        mean_dy,
        projection,
        partials,
        dy,
        x,
        mean,
        invstd,
        Slices(
            Int64(rows),
            Int64(channels),
            Int64(columns.fold),
            Int64(slices),
        ),
        Int64(rows),
        Int64(channels),
        grid_dim=channels,
        block_dim=MERGERS,
    )
    _ = partials^


def gradient_sums_gpu[
    dtype: DType, acc: DType
](
    sum_dy: DeviceBuffer[acc],
    grad_weight: DeviceBuffer[acc],
    mean_dy: DeviceBuffer[acc],
    projection: DeviceBuffer[acc],
    dy: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    mean: DeviceBuffer[acc],
    invstd: DeviceBuffer[acc],
    rows: Int,
    channels: Int,
    ctx: DeviceContext,
) raises:
    comptime V = 16 // size_of[dtype]()
    if _vectorized(dy, x, rows, channels):
        _gradient_sums[dtype, acc, V](
            sum_dy,
            grad_weight,
            mean_dy,
            projection,
            dy,
            x,
            mean,
            invstd,
            rows,
            channels,
            ctx,
        )
    else:
        _gradient_sums[dtype, acc, 1](
            sum_dy,
            grad_weight,
            mean_dy,
            projection,
            dy,
            x,
            mean,
            invstd,
            rows,
            channels,
            ctx,
        )
