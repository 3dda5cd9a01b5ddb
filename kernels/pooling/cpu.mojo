"""Which CPU implementation runs which pooling problem."""

from . import cpu_avg, cpu_max, direct_launch
from .cpu_row import AxisTables
from .direct import Data
from .problem import PoolingAxis, PoolingProblem

comptime LIMIT_32 = 1 << 31
"""Places in a plane are kept in 32 bits."""
comptime MOST_GATHERED = 10
"""Above so many windows over one pixel, scattering its channels one by one is cheaper than comparing them all."""


def _some_empty[adaptive: Bool](p: PoolingProblem) -> Bool:
    return (
        AxisTables(p.d, adaptive=adaptive).some_empty
        or AxisTables(p.h, adaptive=adaptive).some_empty
        or AxisTables(p.w, adaptive=adaptive).some_empty
    )


def max_pool_fprop[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    if p.input_plane() >= LIMIT_32 or _some_empty[adaptive](p):
        direct_launch.max_pool_fprop_cpu[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)
    elif p.channels == 1:
        cpu_max.max_pool_fprop_planes[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)
    else:
        cpu_max.max_pool_fprop_vectors[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p)


def max_pool_dgrad[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    var above = (
        _most_above[adaptive](p.d)
        * _most_above[adaptive](p.h)
        * _most_above[adaptive](p.w)
    )
    if p.channels == 1 or above > MOST_GATHERED:
        cpu_max.max_pool_dgrad_scatter[offsets=offsets](dx, dy, indices, p)
    else:
        cpu_max.max_pool_dgrad_vectors[adaptive=adaptive, offsets=offsets](
            dx, dy, indices, p
        )


def _most_above[adaptive: Bool](axis: PoolingAxis) -> Int:
    var tables = AxisTables(axis, adaptive=adaptive)
    var most = 0
    for i in range(Int(axis.input)):
        most = max(most, tables.above_end[i] - tables.above_first[i])
    return most


def avg_pool_fprop[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    cpu_avg.avg_pool_fprop_rows[adaptive=adaptive](y, x, p)


def avg_pool_dgrad[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    cpu_avg.avg_pool_dgrad_rows[adaptive=adaptive](dx, dy, p)
