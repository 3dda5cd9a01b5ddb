"""Gradient of global average pooling on a GPU over contiguous NCHW tensors: every pixel of a plane gets the same.

A thread stores 16 bytes of dx, wherever planes begin and end in them.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import LIMIT_32, THREADS, FastDivisor
from .problem import PoolingAxis, PoolingProblem


@always_inline
def spread_run[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    by_plane: FastDivisor,
    total: Int32,
    scale: Float32,
    first: Int32,
):
    """Elements first, ... of dx, as many as make 16 bytes."""
    comptime V = 16 // size_of[dtype]()
    var plane, at = by_plane.divmod(first)
    var value = (
        dy[unsafe_offset=Int(plane)].cast[DType.float32]() * scale
    ).cast[dtype]()
    var result = SIMD[dtype, V](0)
    comptime for j in range(V):
        result[j] = value
        at += 1
        if at == by_plane.divisor and first + Int32(j) + 1 < total:
            at = 0
            plane += 1
            value = (
                dy[unsafe_offset=Int(plane)].cast[DType.float32]() * scale
            ).cast[dtype]()
    if first + Int32(V) <= total:
        dx.unsafe_store[alignment=16](Int(first), result)
    else:
        comptime for j in range(V):
            if first + Int32(j) < total:
                dx[unsafe_offset=Int(first) + j] = result[j]


def avg_pool_dgrad_global[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    by_plane: FastDivisor,
    total: Int32,
    scale: Float32,
):
    comptime V = 16 // size_of[dtype]()
    var first = Int32(block_idx.x * block_dim.x + thread_idx.x) * Int32(V)
    if first < total:
        spread_run(dx, dy, by_plane, total, scale, first)


def is_global[adaptive: Bool](p: PoolingProblem) -> Bool:
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


def launch_avg_pool_dgrad_global[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises -> Bool:
    """False where pooling is not global."""
    comptime V = 16 // size_of[dtype]()
    var total = p.input_size()
    if (
        not is_global[adaptive](p)
        or total + THREADS * V >= LIMIT_32
        or Int(dx) % 16 != 0
    ):
        return False
    ctx.enqueue_function[avg_pool_dgrad_global[dtype]](
        dx,
        dy,
        FastDivisor(p.input_plane()),
        Int32(total),
        Float32(1.0 / Float64(p.divisor[adaptive](0, 0, 0))),
        grid_dim=ceildiv(total, THREADS * V),
        block_dim=THREADS,
    )
    return True
