"""Which kernel runs which problem: one readable table for each operation and device.

Each row asks its kernel `can_implement`, which answers None or the reason why not in words; the first None wins, and the
always-right kernel (direct.mojo) ends every table. Rows stand in the order of their speed. A kernel that searches for
the best way to cut a problem has a plan, too, which may find none. A profiler shows the kernel's name, which is that of
its row.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from . import direct
from .cpu.channel_vectors import (
    avg_pool_dgrad_vectors,
    avg_pool_fprop_vectors,
    max_pool_fprop_vectors,
    vectors_avg_can_implement,
    vectors_max_can_implement,
)
from .cpu.disjoint_max import disjoint_can_implement, max_pool_dgrad_disjoint
from .cpu.gather_max import gather_can_implement, max_pool_dgrad_gather
from .cpu.scatter_max import max_pool_dgrad_scatter, scatter_can_implement
from .cpu import separable_avg, separable_max
from .gpu.channels_disjoint import (
    disjoint_channels_can_implement,
    disjoint_channels_dgrad,
)
from .gpu.planes_disjoint import (
    disjoint_planes_can_implement,
    disjoint_planes_dgrad,
    global_avg_dgrad,
    global_can_implement,
)
from .gpu.fprop_planes import planes_can_implement, planes_fprop
from .gpu.fprop_tiles import tiles_can_implement, tiles_fprop
from .gpu.gather import (
    gather_avg_dgrad,
    gather_avg_fprop,
    gather_max_dgrad,
    gather_max_fprop,
)
from .gpu.halo_exchange import (
    halo_exchange_can_implement,
    halo_exchange_dgrad,
)
from .gpu.prefetch_scatter import (
    max_pool_dgrad_prefetch,
    prefetch_scatter_can_implement,
    prefetch_scatter_plan,
)
from .gpu.problem import fits_32_bits
from .gpu.ring_scatter import (
    max_pool_dgrad_ring,
    ring_scatter_can_implement,
    ring_scatter_plan,
)
from .gpu.sliding_sums import (
    sliding_sums_avg_dgrad,
    sliding_sums_can_implement,
)
from .problem import Data, PoolingProblem


def max_pool_fprop[
    target: StaticString,
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool = False,
    offsets: Bool = False,
](
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
    ctx: DeviceContext,
) raises:
    """The maxima of x, unless they are not to be stored, and where they are: int64 indices flat in the plane, or with `offsets`
    numbers of taps."""
    if p.output_size() == 0:
        return
    comptime if is_cpu[target]():
        max_pool_fprop_cpu[adaptive=adaptive, offsets=offsets](y, indices, x, p)
    else:
        max_pool_fprop_gpu[adaptive=adaptive, offsets=offsets](
            ctx, y, indices, x, p
        )


def max_pool_dgrad[
    target: StaticString,
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool = False,
    offsets: Bool = False,
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
    ctx: DeviceContext,
) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose index, or offset, names it.
    """
    if p.input_size() == 0:
        return
    comptime if is_cpu[target]():
        max_pool_dgrad_cpu[adaptive=adaptive, offsets=offsets](
            dx, dy, indices, p
        )
    else:
        max_pool_dgrad_gpu[adaptive=adaptive, offsets=offsets](
            ctx, dx, dy, indices, p
        )


def avg_pool_fprop[
    target: StaticString, dtype: DType, *, adaptive: Bool = False
](y: Data[dtype], x: Data[dtype], p: PoolingProblem, ctx: DeviceContext) raises:
    """The averages of x."""
    if p.output_size() == 0:
        return
    comptime if is_cpu[target]():
        avg_pool_fprop_cpu[adaptive=adaptive](y, x, p)
    else:
        avg_pool_fprop_gpu[adaptive=adaptive](ctx, y, x, p)


def avg_pool_dgrad[
    target: StaticString, dtype: DType, *, adaptive: Bool = False
](
    dx: Data[dtype], dy: Data[dtype], p: PoolingProblem, ctx: DeviceContext
) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor.
    """
    if p.input_size() == 0:
        return
    comptime if is_cpu[target]():
        avg_pool_dgrad_cpu[adaptive=adaptive](dx, dy, p)
    else:
        avg_pool_dgrad_gpu[adaptive=adaptive](ctx, dx, dy, p)


def max_pool_fprop_cpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    if not separable_max.separable_can_implement[adaptive](p):
        separable_max.max_pool_fprop_planes[adaptive=adaptive, offsets=offsets](
            y, indices, x, p
        )
        return
    if not vectors_max_can_implement[adaptive](p):
        max_pool_fprop_vectors[adaptive=adaptive, offsets=offsets](
            y, indices, x, p
        )
        return
    direct.max_pool_fprop_cpu[adaptive=adaptive, offsets=offsets](
        y, indices, x, p
    )


def max_pool_dgrad_cpu[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    comptime if not adaptive:
        if not disjoint_can_implement[dtype, offsets=offsets](p):
            max_pool_dgrad_disjoint[offsets=offsets](dx, dy, indices, p)
            return
        if not gather_can_implement[dtype, offsets=offsets](p):
            max_pool_dgrad_gather[offsets=offsets](dx, dy, indices, p)
            return
    if not scatter_can_implement[adaptive=adaptive, offsets=offsets](p):
        max_pool_dgrad_scatter[adaptive=adaptive, offsets=offsets](
            dx, dy, indices, p
        )
        return
    direct.max_pool_dgrad_cpu[adaptive=adaptive, offsets=offsets](
        dx, dy, indices, p
    )


def avg_pool_fprop_cpu[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    if not separable_avg.global_can_implement[adaptive](p):
        separable_avg.avg_pool_fprop_global[adaptive=adaptive](y, x, p)
        return
    if not vectors_avg_can_implement[adaptive, True](p):
        avg_pool_fprop_vectors[adaptive=adaptive](y, x, p)
        return
    # Right for any problem.
    separable_avg.avg_pool_fprop_rows[adaptive=adaptive](y, x, p)


def avg_pool_dgrad_cpu[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    if not separable_avg.global_can_implement[adaptive](p):
        separable_avg.avg_pool_dgrad_global[adaptive=adaptive](dx, dy, p)
        return
    if not vectors_avg_can_implement[adaptive, False](p):
        avg_pool_dgrad_vectors[adaptive=adaptive](dx, dy, p)
        return
    # Right for any problem.
    separable_avg.avg_pool_dgrad_rows[adaptive=adaptive](dx, dy, p)


@always_inline
def _is_fast[
    a: DType, b: DType, c: DType
](x: Data[a], y: Data[b], z: Data[c], p: PoolingProblem) -> Bool:
    """Whether tensors begin with a whole vector, and 32-bit numbers count their elements: what all kernels of gpu/ ask for.
    """
    return (Int(x) | Int(y) | Int(z)) % 16 == 0 and fits_32_bits(p)


def max_pool_fprop_gpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    ctx: DeviceContext,
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
) raises:
    if _is_fast(y, indices, x, p):
        comptime if not adaptive:
            if not tiles_can_implement(p):
                tiles_fprop[averaging=False, offsets=offsets](
                    ctx, y, indices, x, p
                )
                return
        if not planes_can_implement[dtype](p):
            planes_fprop[
                adaptive=adaptive,
                averaging=False,
                offsets=offsets,
            ](ctx, y, indices, x, p)
            return
        gather_max_fprop[adaptive=adaptive, offsets=offsets](
            ctx, y, indices, x, p
        )
        return
    direct.max_pool_fprop_gpu[adaptive=adaptive, offsets=offsets](
        ctx, y, indices, x, p
    )


def max_pool_dgrad_gpu[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    var is_fast = _is_fast(dx, dy, indices, p)
    comptime if not adaptive and not offsets:
        # Indices of windows wholly in padding name pixels that no window reaches.
        is_fast = is_fast and not p.may_miss()
    if is_fast:
        comptime if not adaptive:
            if not halo_exchange_can_implement[dtype, index, averaging=False](
                p
            ):
                halo_exchange_dgrad[averaging=False, offsets=offsets](
                    ctx, dx, dy, indices, p
                )
                return
            if not disjoint_planes_can_implement[
                dtype, averaging=False, offsets=offsets
            ](p):
                disjoint_planes_dgrad[averaging=False, offsets=offsets](
                    ctx, dx, dy, indices, p
                )
                return
            if not disjoint_channels_can_implement[dtype, averaging=False](p):
                disjoint_channels_dgrad[averaging=False, offsets=offsets](
                    ctx, dx, dy, indices, p
                )
                return
            if not prefetch_scatter_can_implement[index, offsets=offsets](p):
                var plan = prefetch_scatter_plan[dtype, index](ctx, p)
                if plan:
                    max_pool_dgrad_prefetch[offsets=offsets](
                        ctx, dx, dy, indices, p, plan.value()
                    )
                    return
            if not ring_scatter_can_implement[index, offsets=offsets](p):
                var plan = ring_scatter_plan[index, offsets=offsets](ctx, p)
                if plan:
                    max_pool_dgrad_ring[offsets=offsets](
                        ctx, dx, dy, indices, p, plan.value()
                    )
                    return
        gather_max_dgrad[adaptive=adaptive, offsets=offsets](
            ctx, dx, dy, indices, p
        )
        return
    direct.max_pool_dgrad_gpu[adaptive=adaptive, offsets=offsets](
        ctx, dx, dy, indices, p
    )


def avg_pool_fprop_gpu[
    dtype: DType, *, adaptive: Bool
](ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem) raises:
    if _is_fast(y, x, x, p):
        # Averages have no indices.
        var none = rebind[Data[DType.uint8]](y)
        comptime if not adaptive:
            if not tiles_can_implement(p):
                tiles_fprop[averaging=True, offsets=False](ctx, y, none, x, p)
                return
        if not planes_can_implement[dtype](p):
            planes_fprop[
                adaptive=adaptive,
                averaging=True,
                offsets=False,
            ](ctx, y, none, x, p)
            return
        gather_avg_fprop[adaptive=adaptive](ctx, y, x, p)
        return
    direct.avg_pool_gpu[adaptive=adaptive, forward=True](ctx, y, x, p)


def avg_pool_dgrad_gpu[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    if _is_fast(dx, dy, dy, p):
        # Averages have no indices.
        var none = rebind[Data[DType.uint8]](dy)
        if not global_can_implement[dtype, adaptive=adaptive](p):
            global_avg_dgrad[adaptive=adaptive](ctx, dx, dy, p)
            return
        comptime if not adaptive:
            if not sliding_sums_can_implement(p):
                sliding_sums_avg_dgrad(ctx, dx, dy, p)
                return
            if not halo_exchange_can_implement[
                dtype, DType.uint8, averaging=True
            ](p):
                halo_exchange_dgrad[averaging=True, offsets=False](
                    ctx, dx, dy, none, p
                )
                return
            if not disjoint_planes_can_implement[
                dtype, averaging=True, offsets=False
            ](p):
                disjoint_planes_dgrad[averaging=True, offsets=False](
                    ctx, dx, dy, none, p
                )
                return
            if not disjoint_channels_can_implement[dtype, averaging=True](p):
                disjoint_channels_dgrad[averaging=True, offsets=False](
                    ctx, dx, dy, none, p
                )
                return
        gather_avg_dgrad[adaptive=adaptive](ctx, dx, dy, p)
        return
    direct.avg_pool_gpu[adaptive=adaptive, forward=False](ctx, dx, dy, p)
