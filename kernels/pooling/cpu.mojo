"""Which CPU implementation runs which pooling problem."""

from . import (
    cpu_apart_max,
    cpu_avg,
    cpu_max,
    cpu_planes_max,
    cpu_rows_max,
    cpu_scatter_max,
    cpu_vectors,
    direct_launch,
)
from .cpu_row import lanes
from .direct import Data
from .problem import PoolingAxis, PoolingProblem

comptime LIMIT_32 = 1 << 31
"""Places in a plane are kept in 32 bits."""
comptime FEWEST_GATHERED = 16
"""Channels from which on a pixel's vectors pay for listing what it needs."""
comptime MOST_COMPARED = 25
"""Windows above a pixel, at most, for which comparing all their offsets is cheaper than adding each where it points."""
comptime MOST_COMPARED_INDICES = 9
"""The same for indices, eight bytes each."""
comptime MOST_SPREAD = 8
"""Pixels to a window, at most, for which that is so: of more, most are zeros, which clearing writes faster."""
comptime MOST_SUMMED = 16
"""Above so many addends for one average, summing rows first is cheaper, unless one window covers the whole plane."""
comptime MOST_IN_ORDER = 1024
"""Addends that are summed one after the other, at most: rows first keep the rounding smaller."""


def max_pool_fprop[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    var some_empty = False
    comptime if not adaptive:
        some_empty = p.may_miss()
    if p.input_plane() >= LIMIT_32 or some_empty:
        direct_launch.max_pool_fprop_cpu[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)
    elif _is_global[adaptive](p) and (
        not offsets or p.window_size() == p.input_plane()
    ):
        cpu_max.max_pool_fprop_global[store_values=store_values](
            y, indices, x, p.input_plane(), Int(p.batch)
        )
    elif p.channels == 1:
        cpu_max.max_pool_fprop_planes[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)
    else:
        cpu_vectors.max_pool_fprop_vectors[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)


def max_pool_dgrad[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    comptime if not adaptive:
        comptime if not offsets:
            if p.may_miss():
                # Scattering clears dx no further ahead than windows reach.
                direct_launch.max_pool_dgrad_cpu[
                    adaptive=False, offsets=False, everywhere=True
                ](dx, dy, indices, p)
                return
        if cpu_apart_max.can_spread[dtype, offsets=offsets](p):
            cpu_apart_max.max_pool_dgrad_apart[offsets=offsets](
                dx, dy, indices, p
            )
            return
        # Ends of vectors cost as much as whole ones.
        var channels = Int(p.channels)
        var whole = channels % lanes[dtype] == 0
        comptime if offsets:
            whole = whole or channels >= 4 * lanes[dtype]
        else:
            # Between the taps of dilated windows, indices may name pixels (of windows that lie wholly in padding).
            var dilated = max(p.d.dilation, max(p.h.dilation, p.w.dilation)) > 1
            whole = whole and not dilated
        comptime most = MOST_COMPARED if offsets else MOST_COMPARED_INDICES
        if (
            whole
            and p.input_plane() < LIMIT_32
            and p.input_plane() <= MOST_SPREAD * p.output_plane()
            and _most_above[adaptive](p) <= most
        ):
            cpu_rows_max.max_pool_dgrad_rows[offsets=offsets](
                dx, dy, indices, p
            )
            return
        if cpu_planes_max.can_compare[dtype, index, offsets=offsets](p):
            cpu_planes_max.max_pool_dgrad_planes(dx, dy, indices, p)
            return
    cpu_scatter_max.max_pool_dgrad_scatter[adaptive=adaptive, offsets=offsets](
        dx, dy, indices, p
    )


def _is_global[adaptive: Bool](p: PoolingProblem) -> Bool:
    """Whether a plane lies under one window that covers it, and channels do not come between its pixels.
    """

    @always_inline
    def covered(axis: PoolingAxis) -> Bool:
        var taps = axis.taps[adaptive](0)
        return taps.start == 0 and taps.count == Int(axis.input)

    return (
        p.channels == 1
        and p.output_plane() == 1
        and covered(p.d)
        and covered(p.h)
        and covered(p.w)
    )


def _most_above[adaptive: Bool](p: PoolingProblem) -> Int:
    return (
        p.d.most_above[adaptive]()
        * p.h.most_above[adaptive]()
        * p.w.most_above[adaptive]()
    )


def _most_taps(p: PoolingProblem) -> Int:
    @always_inline
    def most(axis: PoolingAxis) -> Int:
        return Int(min(axis.window, axis.input))

    return most(p.d) * most(p.h) * most(p.w)


def avg_pool_fprop[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    if _is_global[adaptive](p):
        cpu_avg.avg_pool_fprop_global(
            y,
            x,
            p.input_plane(),
            Int(p.batch),
            p.divisor[adaptive](0, 0, 0),
        )
    elif p.channels >= FEWEST_GATHERED and _most_taps(p) <= (
        MOST_IN_ORDER if p.output_plane() == 1 else MOST_SUMMED
    ):
        cpu_vectors.avg_pool_fprop_vectors[adaptive=adaptive](y, x, p)
    else:
        cpu_avg.avg_pool_fprop_rows[adaptive=adaptive](y, x, p)


def avg_pool_dgrad[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    if _is_global[adaptive](p):
        cpu_avg.avg_pool_dgrad_global(
            dx,
            dy,
            p.input_plane(),
            Int(p.batch),
            p.divisor[adaptive](0, 0, 0),
        )
    elif (
        p.channels >= FEWEST_GATHERED
        and _most_above[adaptive](p) <= MOST_SUMMED
    ):
        cpu_vectors.avg_pool_dgrad_vectors[adaptive=adaptive](dx, dy, p)
    else:
        cpu_avg.avg_pool_dgrad_rows[adaptive=adaptive](dx, dy, p)
