"""Which GPU implementation runs which pooling problem, and how it is launched."""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from . import direct_launch
from .direct import Data
from .gpu_across_launch import launch_pool_dgrad_across
from .gpu_apart import (
    launch_avg_pool_dgrad_apart,
    launch_max_pool_dgrad_apart,
)
from .gpu_blocks_max import launch_max_pool_dgrad_blocks
from .gpu_box_avg import launch_avg_pool_dgrad_box
from .gpu_channels import (
    avg_pool_dgrad_channels,
    avg_pool_fprop_channels,
    max_pool_dgrad_channels,
    max_pool_fprop_channels,
)
from .gpu_fprop_lanes import launch_avg_pool_fprop_lanes
from .gpu_fprop_pieces import launch_pool_fprop_pieces
from .gpu_fprop_tiles import launch_pool_fprop_tiles
from .gpu_flat import launch_pool_dgrad_flat
from .gpu_global import launch_avg_pool_dgrad_global
from .gpu_march_avg import launch_avg_pool_dgrad_march
from .gpu_pipeline_max import launch_max_pool_dgrad_pipeline
from .gpu_planes_avg import can_ring_planes, launch_avg_pool_dgrad_planes
from .gpu_planes_max import can_scatter_planes, launch_max_pool_dgrad_planes
from .gpu_ring_max import launch_max_pool_dgrad_ring
from .gpu_tiles_launch import launch_pool_dgrad_tiles
from .gpu_problem import (
    GpuProblem,
    LaunchShape,
    fits_32_bits,
    uniform_scale,
)
from .problem import PoolingProblem, PoolingAxis

comptime BUSY = 1 << 19
"""Threads that keep a large GPU busy: fewer make better use of the cache only while at least so many remain."""
comptime LONGEST_STRIP = 8
comptime LONGEST_APART = 4
"""Rows, at most, of averages' windows whose columns threads own."""
comptime LINE = 128
"""Bytes of a line of the first-level cache."""
comptime FEW_PIXELS = 64
"""Of planes up to which windows apart are added fastest by pieces."""
comptime LONG_ROW = 32
"""Pixels from which on rows of a plane fill vectors well."""


@always_inline
def _aligned[dtype: DType](data: Data[dtype]) -> Bool:
    return Int(data) % 16 == 0


def _strip(p: PoolingProblem, threads: Int) -> Int:
    """How many input rows a thread of a gradient takes."""
    return max(min(min(threads // BUSY, LONGEST_STRIP), Int(p.h.input)), 1)


def _prefers_planes[dtype: DType, *, offsets: Bool](p: PoolingProblem) -> Bool:
    """Whether rows are so short, and windows so far apart, that planes through shared memory beat rows in registers.
    """
    comptime V = 16 // size_of[dtype]()

    @always_inline
    def apart(axis: PoolingAxis) -> Bool:
        return axis.window <= axis.stride and axis.dilation == 1

    @always_inline
    def halves(axis: PoolingAxis) -> Bool:
        return axis.window == 3 and axis.stride == 2 and axis.dilation == 1

    # Finding the pixel of an offset takes longer than an index, which few bytes do not hide.
    var whole = Int(p.w.input) % V == 0
    comptime if size_of[dtype]() < 4:
        if offsets or whole:
            return False
    else:
        if offsets and whole:
            return False
        if not whole and p.w.input >= LONG_ROW:
            # Rows that are no whole vectors would go through shared memory all the same.
            return p.channels == 1 and halves(p.h) and halves(p.w)
    comptime shortest = 7 if size_of[dtype]() >= 4 and not offsets else 8
    return (
        p.channels == 1
        and shortest <= Int(p.w.input)
        and Int(p.w.input) < LONG_ROW
        and p.h.input > 1
        and apart(p.d)
        and apart(p.h)
        and apart(p.w)
    )


def _prefers_flat[dtype: DType, *, offsets: Bool](p: PoolingProblem) -> Bool:
    """Whether maxima of windows that do not overlap are placed fastest by 16 bytes of dx a thread.
    """
    # Tiles walk down the batch of a 1-D problem.
    if p.h.input == 1:
        return False
    comptime if size_of[dtype]() >= 4:
        # Rows of elements so wide fill whole sectors, or planes through shared memory do.
        if p.w.stride != 2 or (not offsets and Int(p.w.input) % 4 != 0):
            return False
    # Finding one's slab pays where rows are no whole lines of the cache.
    return p.d.window == 1 or Int(p.w.input) * size_of[dtype]() < LINE


def _prefers_pieces(p: PoolingProblem) -> Bool:
    """Whether windows overlap or leave gaps, or planes are small; others are placed faster without sums.
    """

    @always_inline
    def alike(axis: PoolingAxis) -> Bool:
        return axis.window == axis.stride and axis.dilation == 1

    return (
        not alike(p.h)
        or not alike(p.w)
        or Int(p.h.input) * Int(p.w.input) <= FEW_PIXELS
    )


def windows_above[adaptive: Bool](axis: PoolingAxis) -> Int:
    """The most windows above one input position."""
    comptime if adaptive:
        # Windows start every input / output positions and overlap by at most one on either side.
        if axis.input % axis.output == 0:
            return 1
        return Int(axis.output) // Int(axis.input) + 2
    else:
        return axis.most_above()


def max_pool_fprop[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](
    ctx: DeviceContext,
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
) raises:
    comptime if not adaptive:
        if launch_pool_fprop_tiles[
            averaging=False, store_values=store_values, offsets=offsets
        ](ctx, y, indices, x, p):
            return
    if launch_pool_fprop_pieces[
        adaptive=adaptive,
        averaging=False,
        store_values=store_values,
        offsets=offsets,
    ](ctx, y, indices, x, p):
        return
    if not fits_32_bits(p):
        direct_launch.max_pool_fprop_gpu[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](ctx, y, indices, x, p)
        return

    @always_inline
    def launch[V: Int]() raises {imm}:
        var problem = GpuProblem(p, extent_d=p.d.output, vector=V)
        var shape = LaunchShape(
            Int(p.h.output) * Int(p.w.output) * (Int(p.channels) // V),
            Int(problem.slabs),
        )
        comptime kernel = max_pool_fprop_channels[
            dtype, index, V, adaptive, store_values, offsets
        ]
        ctx.enqueue_function[kernel](
            y,
            indices,
            x,
            problem,
            grid_dim=(shape.grid_x, shape.grid_y),
            block_dim=(shape.x, shape.y),
        )

    comptime V = 16 // size_of[dtype]()
    if (
        Int(p.channels) % V == 0
        and _aligned(x)
        and _aligned(y)
        and _aligned(indices)
    ):
        launch[V]()
    else:
        launch[1]()


def max_pool_dgrad[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    comptime if not adaptive:
        comptime if not offsets:
            if p.may_miss():
                direct_launch.max_pool_dgrad_gpu[
                    adaptive=False, offsets=False, everywhere=True
                ](ctx, dx, dy, indices, p)
                return
        if launch_pool_dgrad_across[averaging=False, offsets=offsets](
            ctx, dx, dy, indices, p
        ):
            return
        if launch_max_pool_dgrad_blocks[offsets=offsets](
            ctx, dx, dy, indices, p
        ):
            return
        # Tiles walk down the batch of a 1-D problem.
        if p.h.input > 1:
            if _prefers_pieces(p) and launch_max_pool_dgrad_pipeline[
                offsets=offsets
            ](ctx, dx, dy, indices, p):
                return
            if p.channels > 1 and launch_max_pool_dgrad_apart[offsets=offsets](
                ctx, dx, dy, indices, p
            ):
                return
        if _prefers_flat[dtype, offsets=offsets](p) and launch_pool_dgrad_flat[
            averaging=False, offsets=offsets
        ](ctx, dx, dy, indices, p):
            return
        if not _prefers_planes[dtype, offsets=offsets](
            p
        ) and launch_pool_dgrad_tiles[averaging=False, offsets=offsets](
            ctx, dx, dy, indices, p
        ):
            return
        if can_scatter_planes[offsets=offsets](p):
            launch_max_pool_dgrad_planes[offsets=offsets](
                ctx, dx, dy, indices, p
            )
            return
        if launch_max_pool_dgrad_ring[offsets=offsets](ctx, dx, dy, indices, p):
            return
    if not fits_32_bits(p):
        direct_launch.max_pool_dgrad_gpu[adaptive=adaptive, offsets=offsets](
            ctx, dx, dy, indices, p
        )
        return

    @always_inline
    def launch[V: Int]() raises {imm}:
        var problem = GpuProblem(p, extent_d=p.d.input, vector=V)
        var rows = _strip(p, p.input_size() // V)
        var shape = LaunchShape(
            ceildiv(Int(p.h.input), rows)
            * Int(p.w.input)
            * (Int(p.channels) // V),
            Int(problem.slabs),
        )
        comptime kernel = max_pool_dgrad_channels[
            dtype, index, V, adaptive, offsets
        ]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            problem,
            Int32(rows),
            grid_dim=(shape.grid_x, shape.grid_y),
            block_dim=(shape.x, shape.y),
        )

    comptime V = 16 // size_of[dtype]()
    if (
        Int(p.channels) % V == 0
        and _aligned(dx)
        and _aligned(dy)
        and _aligned(indices)
    ):
        launch[V]()
    else:
        launch[1]()


def avg_pool_fprop[
    dtype: DType, *, adaptive: Bool
](ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem) raises:
    comptime if not adaptive:
        comptime if size_of[dtype]() <= 4:
            if launch_avg_pool_fprop_lanes(ctx, y, x, p):
                return
        if launch_pool_fprop_tiles[
            averaging=True, store_values=True, offsets=False
        ](ctx, y, rebind[Data[DType.uint8]](y), x, p):
            return
    if launch_pool_fprop_pieces[
        adaptive=adaptive, averaging=True, store_values=True, offsets=False
    ](ctx, y, rebind[Data[DType.uint8]](y), x, p):
        return
    if not fits_32_bits(p):
        direct_launch.avg_pool_fprop_gpu[adaptive=adaptive](ctx, y, x, p)
        return

    @always_inline
    def launch[V: Int]() raises {imm}:
        var problem = GpuProblem(
            p, extent_d=p.d.output, vector=V, scale=uniform_scale[adaptive](p)
        )
        var shape = LaunchShape(
            Int(p.h.output) * Int(p.w.output) * (Int(p.channels) // V),
            Int(problem.slabs),
        )
        comptime kernel = avg_pool_fprop_channels[dtype, V, adaptive]
        ctx.enqueue_function[kernel](
            y,
            x,
            problem,
            grid_dim=(shape.grid_x, shape.grid_y),
            block_dim=(shape.x, shape.y),
        )

    comptime V = 16 // size_of[dtype]()
    if Int(p.channels) % V == 0 and _aligned(x) and _aligned(y):
        launch[V]()
    else:
        launch[1]()


def avg_pool_dgrad[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    comptime if not adaptive:
        if launch_avg_pool_dgrad_box(ctx, dx, dy, p):
            return
        if launch_avg_pool_dgrad_march(ctx, dx, dy, p):
            return
        if launch_pool_dgrad_across[averaging=True, offsets=False](
            ctx, dx, dy, rebind[Data[DType.uint8]](dy), p
        ):
            return
    if launch_avg_pool_dgrad_global[adaptive=adaptive](ctx, dx, dy, p):
        return
    comptime if not adaptive:
        # Tiles walk down the batch of a 1-D problem.
        if p.h.input > 1:
            if launch_pool_dgrad_flat[averaging=True, offsets=False](
                ctx, dx, dy, rebind[Data[DType.uint8]](dy), p
            ):
                return
            # Longer windows leave few threads.
            if (
                p.channels > 1
                and p.h.stride <= LONGEST_APART
                and launch_avg_pool_dgrad_apart(ctx, dx, dy, p)
            ):
                return
        if launch_pool_dgrad_tiles[averaging=True, offsets=False](
            ctx, dx, dy, rebind[Data[DType.uint8]](dy), p
        ):
            return
        if p.channels == 1 and launch_avg_pool_dgrad_apart(ctx, dx, dy, p):
            return
    var above = windows_above[adaptive](p.h)
    if not fits_32_bits(p):
        direct_launch.avg_pool_dgrad_gpu[adaptive=adaptive](ctx, dx, dy, p)
        return

    @always_inline
    def launch_channels[V: Int, L: Int]() raises {imm}:
        var problem = GpuProblem(
            p, extent_d=p.d.input, vector=V, scale=uniform_scale[adaptive](p)
        )
        var rows = _strip(p, p.input_size() // V)
        var shape = LaunchShape(
            ceildiv(Int(p.h.input), rows)
            * Int(p.w.input)
            * (Int(p.channels) // V),
            Int(problem.slabs),
        )
        comptime kernel = avg_pool_dgrad_channels[dtype, V, L, adaptive]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            problem,
            Int32(rows),
            grid_dim=(shape.grid_x, shape.grid_y),
            block_dim=(shape.x, shape.y),
        )

    comptime V = 16 // size_of[dtype]()

    @always_inline
    def launch[L: Int]() raises {imm}:
        comptime if L > 0:
            # Where windows do not overlap there is nothing to share.
            var apart = (
                L == 1
                and windows_above[adaptive](p.d) == 1
                and windows_above[adaptive](p.w) == 1
            )
            if not apart and can_ring_planes[dtype](p):
                launch_avg_pool_dgrad_planes[dtype, L, adaptive=adaptive](
                    ctx, dx, dy, p
                )
                return
        if Int(p.channels) % V == 0 and _aligned(dx) and _aligned(dy):
            launch_channels[V, L]()
        else:
            launch_channels[1, L]()

    if above == 1:
        launch[1]()
    elif above == 2:
        launch[2]()
    elif above == 3:
        launch[3]()
    else:
        launch[0]()
