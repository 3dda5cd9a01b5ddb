"""Batch normalization's reductions on the CPU: rows in equal shares for each core, columns in vectors.

The shares' results are merged in a fixed order, so that the same input gives the same bits.
"""

from std.math import sqrt
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr, accumulation_type
from .folded_rows import FoldedRows, Moments, chunk_moments, chunk_sums, folded
from .numbers import NormalizationNumbers
from .operands import GradientSums, Statistics

# Vectors that are reduced side by side: enough independent sums to hide an addition's latency.
comptime TILE = 4


def _shares(columns: FoldedRows) -> Int:
    return workers_for(columns.size(), columns.wide_rows())


@always_inline
def _moments_tile[
    dtype: DType, acc: DType, width: Int
](
    partial: Ptr[acc],
    x: Ptr[dtype],
    columns: FoldedRows,
    column: Int,
    first: Int,
    last: Int,
):
    var moments = chunk_moments[dtype, acc, width](
        x.unsafe_offset(column), first, last, columns.width()
    )
    partial.unsafe_offset(column).unsafe_store(moments.mean)
    partial.unsafe_offset(columns.width() + column).unsafe_store(moments.m2)


@always_inline
def _sums_tile[
    dtype: DType, acc: DType, width: Int
](
    partial: Ptr[acc],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    mean: Ptr[acc],
    columns: FoldedRows,
    column: Int,
    first: Int,
    last: Int,
):
    var sums = chunk_sums[dtype, acc, width](
        dy.unsafe_offset(column),
        x.unsafe_offset(column),
        mean.unsafe_offset(column).unsafe_load[width=width](),
        first,
        last,
        columns.width(),
    )
    partial.unsafe_offset(column).unsafe_store(sums.dy)
    partial.unsafe_offset(columns.width() + column).unsafe_store(sums.product)


@no_inline
def _moments[
    dtype: DType, acc: DType
](mean: Ptr[acc], m2: Ptr[acc], x: Ptr[dtype], rows: Int, channels: Int):
    """The mean of each channel and the sum of squared deviations from it."""
    comptime vector = simd_width_of[acc]()
    var columns = folded(rows, channels, vector, TILE * vector)
    var width = columns.width()
    var shares = _shares(columns)
    var partials = unsafe_alloc[Scalar[acc]](
        max(1, shares * 2 * width), alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def task(share: Int) {imm}:
        var mine = partials.unsafe_offset(share * 2 * width)
        var first = columns.wide_rows() * share // shares
        var last = columns.wide_rows() * (share + 1) // shares
        var column = 0
        while column + TILE * vector <= width:
            _moments_tile[dtype, acc, TILE * vector](
                mine, x, columns, column, first, last
            )
            column += TILE * vector
        while column + vector <= width:
            _moments_tile[dtype, acc, vector](
                mine, x, columns, column, first, last
            )
            column += vector
        while column < width:
            _moments_tile[dtype, acc, 1](mine, x, columns, column, first, last)
            column += 1

    sync_parallelize(task, shares)
    var wide_rows = columns.wide_rows()
    for channel in range(channels):
        var total = Moments[acc, 1]()
        for share in range(shares):
            var count = (
                wide_rows * (share + 1) // shares - wide_rows * share // shares
            )
            var mine = partials.unsafe_offset(share * 2 * width)
            for part in range(columns.fold):
                var column = part * channels + channel
                total.merge(
                    Moments[acc, 1](
                        count,
                        mine[unsafe_offset=column],
                        mine[unsafe_offset=width + column],
                    )
                )
        total.merge(
            chunk_moments[dtype, acc, 1](
                x.unsafe_offset(channel), rows - columns.tail(), rows, channels
            )
        )
        mean[unsafe_offset=channel] = total.mean[0]
        m2[unsafe_offset=channel] = total.m2[0]
    partials.unsafe_free()


@no_inline
def statistics_cpu[
    dtype: DType, //, *, running: Bool
](t: Statistics[dtype], numbers: NormalizationNumbers):
    comptime acc = accumulation_type[dtype]
    _moments(t.mean, t.invstd, t.x, t.rows, t.channels)
    var momentum = numbers.momentum.cast[acc]()
    var epsilon = numbers.epsilon.cast[acc]()
    var n = Scalar[acc](t.rows)
    for c in range(t.channels):
        # What `_moments` left there.
        var m2 = t.invstd[unsafe_offset=c]
        t.invstd[unsafe_offset=c] = 1 / sqrt(m2 / n + epsilon)
        comptime if running:
            t.new_mean[unsafe_offset=c] = (
                momentum * t.mean[unsafe_offset=c]
                + (1 - momentum) * t.old_mean[unsafe_offset=c]
            )
            t.new_variance[unsafe_offset=c] = (
                momentum * (m2 / (n - 1))
                + (1 - momentum) * t.old_variance[unsafe_offset=c]
            )


@no_inline
def _sums[
    dtype: DType, acc: DType
](
    sum_dy: Ptr[acc],
    sum_product: Ptr[acc],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    mean: Ptr[acc],
    rows: Int,
    channels: Int,
):
    """Computes for each channel the sum of dy and the sum of dy * (x - mean).
    """
    comptime vector = simd_width_of[acc]()
    var columns = folded(rows, channels, vector, TILE * vector)
    var width = columns.width()
    var shares = _shares(columns)
    var scratch = unsafe_alloc[Scalar[acc]](
        max(1, (2 * shares + 1) * width), alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()
    var means = scratch.unsafe_offset(shares * 2 * width)
    for column in range(width):
        means[unsafe_offset=column] = mean[unsafe_offset=column % channels]

    @always_inline
    def task(share: Int) {imm}:
        var mine = scratch.unsafe_offset(share * 2 * width)
        var first = columns.wide_rows() * share // shares
        var last = columns.wide_rows() * (share + 1) // shares
        var column = 0
        while column + TILE * vector <= width:
            _sums_tile[dtype, acc, TILE * vector](
                mine, dy, x, means, columns, column, first, last
            )
            column += TILE * vector
        while column + vector <= width:
            _sums_tile[dtype, acc, vector](
                mine, dy, x, means, columns, column, first, last
            )
            column += vector
        while column < width:
            _sums_tile[dtype, acc, 1](
                mine, dy, x, means, columns, column, first, last
            )
            column += 1

    sync_parallelize(task, shares)
    for channel in range(channels):
        var total = chunk_sums[dtype, acc, 1](
            dy.unsafe_offset(channel),
            x.unsafe_offset(channel),
            mean[unsafe_offset=channel],
            rows - columns.tail(),
            rows,
            channels,
        )
        for share in range(shares):
            var mine = scratch.unsafe_offset(share * 2 * width)
            for part in range(columns.fold):
                var column = part * channels + channel
                total.dy += mine[unsafe_offset=column]
                total.product += mine[unsafe_offset=width + column]
        sum_dy[unsafe_offset=channel] = total.dy[0]
        sum_product[unsafe_offset=channel] = total.product[0]
    scratch.unsafe_free()


@no_inline
def gradient_sums_cpu[dtype: DType, //](t: GradientSums[dtype]):
    _sums(t.sum_dy, t.grad_weight, t.dy, t.x, t.mean, t.rows, t.channels)
    var n = Scalar[t.Acc](t.rows)
    for c in range(t.channels):
        var scale = t.invstd[unsafe_offset=c]
        var weight = t.grad_weight[unsafe_offset=c] * scale
        t.grad_weight[unsafe_offset=c] = weight
        t.mean_dy[unsafe_offset=c] = t.sum_dy[unsafe_offset=c] / n
        t.projection[unsafe_offset=c] = weight * scale / n
