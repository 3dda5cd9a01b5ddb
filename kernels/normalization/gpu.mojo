"""Batch normalization's reductions on a GPU, in two stages with a fixed order: no atomics, the same bits every run.

Stage 1: a block reduces one slice of rows of some vectors of columns, at most LANES, each thread 16 bytes wide. Stage
2: a block merges the slices of some channels. Partial results lie as [slice][column], so that both stages move
neighbours together.
"""

from std.bit import log2_floor
from std.math import ceildiv, sqrt
from std.memory import stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.arithmetic import divide
from ..common.lanes import from_lane
from ..common.library import scratch
from ..common.pointer import Ptr, accumulation_type
from .folded_rows import (
    FoldedRows,
    Moments,
    Sums,
    chunk_moments,
    chunk_sums,
    folded,
)
from .numbers import NormalizationNumbers
from .operands import GradientSums, Statistics
from .partials import Partials, Slices

# Threads of a block beside each other, at most.
comptime LANES = 64
comptime THREADS = 256
# Rows that a thread reads at once of each tensor: of one, and of two.
comptime MOMENTS_LOADS = 8
comptime SUMS_LOADS = 4
# Blocks that registers let run on a multiprocessor at a time. With no more of them a thread has several rounds, which the
# sum over its block is little beside, and stage 2 has few slices.
comptime RESIDENT_BLOCKS = 2
# Threads that merge a channel's parts (a warp, on AMD's GPUs half of one), channels of a block, whose numbers lie
# together, and parts that a thread reads at once.
comptime MERGE_LANES = 32
comptime MERGE_CHANNELS = 8
comptime MERGE_LOADS = 8
comptime _MERGE_STEPS = log2_floor(MERGE_LANES)


@always_inline
def _thread_count(first: Int, last: Int, row: Int, rows: Int) -> Int:
    """Rows that thread row `row` of a block with `rows` of them reads."""
    var left = max(0, last - first - row)
    return Int(divide(Int32(left + rows - 1), Int32(rows))[0])


@always_inline
def _keep[acc: DType, V: Int, //](target: Ptr[acc], value: SIMD[acc, V]):
    """A thread's numbers; a row of them is whole vectors, and lies where its columns do.
    """
    comptime most = min(V, 16 // size_of[acc]())
    comptime for part in range(V // most):
        target.unsafe_offset(part * most).unsafe_store[
            alignment=most * size_of[acc]()
        ](value.slice[most, offset=part * most]())


@always_inline
def _sum_of_rows[acc: DType, V: Int, //](value: SIMD[acc, V]) -> SIMD[acc, V]:
    """The sum over a block's rows of threads, in each of them."""
    # A lane's numbers stand THREADS apart: neighbours' stand in different banks.
    var shared = stack_allocation[
        THREADS * V, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var lanes = Int(block_dim.x)
    var mine = Int(thread_idx.y) * lanes + Int(thread_idx.x)
    var total = value
    barrier()
    comptime for k in range(V):
        shared[unsafe_offset=k * THREADS + mine] = total[k]
    barrier()
    var left = Int(block_dim.y)
    while left > 1:
        var half = ceildiv(left, 2)
        if Int(thread_idx.y) < left - half:
            comptime for k in range(V):
                total[k] += shared[
                    unsafe_offset=k * THREADS + mine + half * lanes
                ]
                shared[unsafe_offset=k * THREADS + mine] = total[k]
        barrier()
        left = half
    comptime for k in range(V):
        total[k] = shared[unsafe_offset=k * THREADS + Int(thread_idx.x)]
    return total


@__name(t"batch_norm_moments_{dtype}_{acc}_v{V}")
def moments_kernel[
    dtype: DType, acc: DType, V: Int
](
    partials: Ptr[acc],
    x: Ptr[dtype],
    wide_rows: Int64,
    width: Int64,
    share: Int64,
    slices: Int64,
):
    var lanes = Int(block_dim.x)
    var rows = Int(block_dim.y)
    var column = (block_idx.x * lanes + thread_idx.x) * V
    var row = thread_idx.y
    var slice = block_idx.y
    var pitch = Int(width)
    var first = slice * Int(share)
    var last = min(first + Int(share), Int(wide_rows))
    var moments = Moments[acc, V]()
    if column < pitch:
        moments = chunk_moments[
            dtype, acc, V, aligned=True, together=MOMENTS_LOADS
        ](
            x.unsafe_offset((first + row) * pitch + column),
            0,
            _thread_count(first, last, row, rows),
            rows * pitch,
        )
    var count = Scalar[acc](moments.count)
    var center = _sum_of_rows(moments.mean * count) / Scalar[acc](last - first)
    var apart = moments.mean - center
    var m2 = _sum_of_rows(apart * apart * count + moments.m2)
    if row == 0 and column < pitch:
        var kept = partials.unsafe_offset(slice * pitch + column)
        _keep(kept, center)
        _keep(kept.unsafe_offset(pitch * Int(slices)), m2)


@__name(t"batch_norm_sums_{dtype}_{acc}_v{V}")
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
    share: Int64,
    slices: Int64,
):
    var lanes = Int(block_dim.x)
    var rows = Int(block_dim.y)
    var column = (block_idx.x * lanes + thread_idx.x) * V
    var row = thread_idx.y
    var slice = block_idx.y
    var pitch = Int(width)
    var first = slice * Int(share)
    var last = min(first + Int(share), Int(wide_rows))
    var sums = Sums[acc, V](0, 0)
    if column < pitch:
        var means = SIMD[acc, V](0)
        comptime for lane in range(V):
            var channel = divide(Int32(column + lane), Int32(channels))[1]
            means[lane] = mean[unsafe_offset=Int(channel)]
        var offset = (first + row) * pitch + column
        sums = chunk_sums[dtype, acc, V, aligned=True, together=SUMS_LOADS](
            dy.unsafe_offset(offset),
            x.unsafe_offset(offset),
            means,
            0,
            _thread_count(first, last, row, rows),
            rows * pitch,
        )
    var dy_sum = _sum_of_rows(sums.dy)
    var product = _sum_of_rows(sums.product)
    if row == 0 and column < pitch:
        var kept = partials.unsafe_offset(slice * pitch + column)
        _keep(kept, dy_sum)
        _keep(kept.unsafe_offset(pitch * Int(slices)), product)


@always_inline
def _sum_of_lanes[dtype: DType](value: Scalar[dtype]) -> Scalar[dtype]:
    """The sum over the MERGE_LANES threads of a channel, in every one of them.
    """
    var total = value
    comptime for step in range(_MERGE_STEPS):
        total += from_lane(total, MERGE_LANES >> (step + 1))
    return total


@__name(t"batch_norm_merge_moments_{dtype}_{acc}_r{running}_{Parts.NAME}")
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
    """Merges the partial moments of each channel, as the formula of Chan, Golub and LeVeque (1979) does for two.
    """
    var own = Int(block_idx.x) * MERGE_CHANNELS + Int(thread_idx.y)
    var channel = min(own, Int(channels) - 1)
    var tail = parts.tail()
    var plane = parts.plane()
    var most = parts.parts(channel)
    var total = Moments[acc, 1]()
    for first in range(Int(thread_idx.x), most, MERGE_LOADS * MERGE_LANES):
        var read = StaticTuple[Moments[acc, 1], MERGE_LOADS](
            fill=Moments[acc, 1]()
        )
        comptime for k in range(MERGE_LOADS):
            var part = min(first + k * MERGE_LANES, most - 1)
            var at = parts.place(channel, part)
            read[k] = Moments[acc, 1](
                Int(parts.count(partials, channel, part)),
                partials[unsafe_offset=at],
                partials[unsafe_offset=plane + at],
            )
        comptime for k in range(MERGE_LOADS):
            if first + k * MERGE_LANES < most:
                total.merge(read[k])
    for i in range(Int(thread_idx.x), tail, MERGE_LANES):
        var at = (Int(rows) - tail + i) * Int(channels) + channel
        total.merge(Moments[acc, 1](1, x[unsafe_offset=at].cast[acc](), 0))
    comptime for step in range(_MERGE_STEPS):
        comptime distance = MERGE_LANES >> (step + 1)
        # In every lane the lower one's moments come first: all get the same bits.
        var other = Moments[acc, 1](
            Int(from_lane(Int32(total.count), distance)),
            from_lane(total.mean[0], distance),
            from_lane(total.m2[0], distance),
        )
        if Int(thread_idx.x) & distance == 0:
            total.merge(other)
        else:
            other.merge(total)
            total = other
    if thread_idx.x == 0 and own < Int(channels):
        var n = Scalar[acc](Int(rows))
        var center = total.mean[0]
        mean[unsafe_offset=channel] = center
        invstd[unsafe_offset=channel] = 1 / sqrt(total.m2[0] / n + epsilon)
        comptime if running:
            new_mean[unsafe_offset=channel] = (
                momentum * center
                + (1 - momentum) * old_mean[unsafe_offset=channel]
            )
            new_variance[unsafe_offset=channel] = (
                momentum * (total.m2[0] / (n - 1))
                + (1 - momentum) * old_variance[unsafe_offset=channel]
            )


@__name(t"batch_norm_merge_sums_{dtype}_{acc}_{Parts.NAME}")
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
    var own = Int(block_idx.x) * MERGE_CHANNELS + Int(thread_idx.y)
    var channel = min(own, Int(channels) - 1)
    var tail = parts.tail()
    var plane = parts.plane()
    var center = mean[unsafe_offset=channel]
    var sum = Scalar[acc](0)
    var product = Scalar[acc](0)
    var most = parts.parts(channel)
    for first in range(Int(thread_idx.x), most, MERGE_LOADS * MERGE_LANES):
        var sums = StaticTuple[Scalar[acc], MERGE_LOADS](fill=0)
        var products = StaticTuple[Scalar[acc], MERGE_LOADS](fill=0)
        comptime for k in range(MERGE_LOADS):
            var part = min(first + k * MERGE_LANES, most - 1)
            var at = parts.place(channel, part)
            sums[k] = partials[unsafe_offset=at]
            products[k] = partials[unsafe_offset=plane + at]
        comptime for k in range(MERGE_LOADS):
            if first + k * MERGE_LANES < most:
                sum += sums[k]
                product += products[k]
    for i in range(Int(thread_idx.x), tail, MERGE_LANES):
        var at = (Int(rows) - tail + i) * Int(channels) + channel
        var grad = dy[unsafe_offset=at].cast[acc]()
        sum += grad
        product += grad * (x[unsafe_offset=at].cast[acc]() - center)
    sum = _sum_of_lanes(sum)
    product = _sum_of_lanes(product)
    if thread_idx.x == 0 and own < Int(channels):
        var n = Scalar[acc](Int(rows))
        var scale = invstd[unsafe_offset=channel]
        sum_dy[unsafe_offset=channel] = sum
        grad_weight[unsafe_offset=channel] = product * scale
        mean_dy[unsafe_offset=channel] = sum / n
        projection[unsafe_offset=channel] = product * scale * scale / n


@fieldwise_init
struct _Grid(ImplicitlyCopyable, TrivialRegisterPassable):
    """The launch shape of stage 1: `tiles` x `slices` blocks of `lanes` x `rows` threads.
    """

    var lanes: Int
    var rows: Int
    var tiles: Int
    var share: Int
    var slices: Int

    @staticmethod
    def of(columns: FoldedRows, vector: Int, ctx: DeviceContext) raises -> Self:
        """Returns a launch shape with equal tiles of columns, so that no lanes are idle, of blocks that all run at a
        time, and at least one round of rows for each thread."""
        var blocks = RESIDENT_BLOCKS * ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        var vectors = ceildiv(columns.width(), vector)
        var lanes = ceildiv(vectors, ceildiv(vectors, LANES))
        var rows = THREADS // lanes
        var tiles = ceildiv(vectors, lanes)
        var most = ceildiv(columns.wide_rows(), MOMENTS_LOADS * rows)
        var share = ceildiv(
            columns.wide_rows(), max(1, min(blocks // tiles, most))
        )
        var slices = ceildiv(columns.wide_rows(), share)
        return Self(lanes, rows, tiles, share, slices)

    def parts(self, columns: FoldedRows) -> Slices:
        """Returns the slices that stage 2 merges."""
        return Slices(
            Int64(columns.wide_rows()),
            Int64(columns.tail()),
            Int64(columns.channels),
            Int64(columns.fold),
            Int64(self.slices),
            Int64(self.share),
        )


@no_inline
def statistics_gpu[
    dtype: DType, //, V: Int, running: Bool
](
    t: Statistics[dtype], numbers: NormalizationNumbers, ctx: DeviceContext
) raises:
    """Threads read `V` elements at once."""
    comptime acc = accumulation_type[dtype]
    var columns = folded(t.rows, t.channels, V, V)
    var grid = _Grid.of(columns, V, ctx)
    var partials = scratch[acc](ctx, 2 * columns.width() * grid.slices)
    ctx.enqueue_function[moments_kernel[dtype, acc, V]](
        partials,
        t.x,
        Int64(columns.wide_rows()),
        Int64(columns.width()),
        Int64(grid.share),
        Int64(grid.slices),
        grid_dim=(grid.tiles, grid.slices),
        block_dim=(grid.lanes, grid.rows),
    )
    ctx.enqueue_function[merge_moments_kernel[dtype, acc, running, Slices]](
        t.mean,
        t.invstd,
        t.new_mean,
        t.new_variance,
        partials,
        t.x,
        t.old_mean,
        t.old_variance,
        grid.parts(columns),
        Int64(t.rows),
        Int64(t.channels),
        numbers.momentum.cast[acc](),
        numbers.epsilon.cast[acc](),
        grid_dim=ceildiv(t.channels, MERGE_CHANNELS),
        block_dim=(MERGE_LANES, MERGE_CHANNELS),
    )
    _ = partials^


@no_inline
def gradient_sums_gpu[
    dtype: DType, //, V: Int
](t: GradientSums[dtype], ctx: DeviceContext) raises:
    """Threads read `V` elements at once."""
    comptime acc = accumulation_type[dtype]
    var columns = folded(t.rows, t.channels, V, V)
    var grid = _Grid.of(columns, V, ctx)
    var partials = scratch[acc](ctx, 2 * columns.width() * grid.slices)
    ctx.enqueue_function[sums_kernel[dtype, acc, V]](
        partials,
        t.dy,
        t.x,
        t.mean,
        Int64(columns.wide_rows()),
        Int64(columns.width()),
        Int64(t.channels),
        Int64(grid.share),
        Int64(grid.slices),
        grid_dim=(grid.tiles, grid.slices),
        block_dim=(grid.lanes, grid.rows),
    )
    ctx.enqueue_function[merge_sums_kernel[dtype, acc, Slices]](
        t.sum_dy,
        t.grad_weight,
        t.mean_dy,
        t.projection,
        partials,
        t.dy,
        t.x,
        t.mean,
        t.invstd,
        grid.parts(columns),
        Int64(t.rows),
        Int64(t.channels),
        grid_dim=ceildiv(t.channels, MERGE_CHANNELS),
        block_dim=(MERGE_LANES, MERGE_CHANNELS),
    )
    _ = partials^
