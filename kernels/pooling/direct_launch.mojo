"""Runs the always-right functions of direct.mojo over a whole tensor: on the CPU in equal shares for each core, on
a GPU with one thread for each result."""

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import ceildiv

from .cpu_row import SMALLEST_SHARE, for_each_share
from .direct import (
    Data,
    accumulator,
    avg_pool_dgrad_at,
    avg_pool_fprop_at,
    max_pool_dgrad_at,
    max_pool_fprop_at,
    unpool_gather_at,
)
from .problem import PoolingProblem

comptime BLOCK = 256


@no_inline
def max_pool_fprop_cpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            max_pool_fprop_at[
                adaptive=adaptive, store_values=store_values, offsets=offsets
            ](y, indices, x, p, i)

    for_each_share(share, p.output_size(), SMALLEST_SHARE)


@no_inline
def max_pool_dgrad_cpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
    everywhere: Bool = False,
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            max_pool_dgrad_at[
                adaptive=adaptive, offsets=offsets, everywhere=everywhere
            ](dx, dy, indices, p, i)

    for_each_share(share, p.input_size(), SMALLEST_SHARE)


@no_inline
def avg_pool_fprop_cpu[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            avg_pool_fprop_at[adaptive=adaptive](y, x, p, i)

    for_each_share(share, p.output_size(), SMALLEST_SHARE)


@no_inline
def avg_pool_dgrad_cpu[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            avg_pool_dgrad_at[adaptive=adaptive](dx, dy, p, i)

    for_each_share(share, p.input_size(), SMALLEST_SHARE)


def _max_pool_fprop_kernel[
    dtype: DType,
    index: DType,
    adaptive: Bool,
    store_values: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.output_size():
        max_pool_fprop_at[
            adaptive=adaptive, store_values=store_values, offsets=offsets
        ](y, indices, x, p, i)


def _max_pool_dgrad_kernel[
    dtype: DType,
    index: DType,
    adaptive: Bool,
    offsets: Bool,
    everywhere: Bool,
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.input_size():
        max_pool_dgrad_at[
            adaptive=adaptive, offsets=offsets, everywhere=everywhere
        ](dx, dy, indices, p, i)


def _avg_pool_fprop_kernel[
    dtype: DType, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.output_size():
        avg_pool_fprop_at[adaptive=adaptive](y, x, p, i)


def _avg_pool_dgrad_kernel[
    dtype: DType, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.input_size():
        avg_pool_dgrad_at[adaptive=adaptive](dx, dy, p, i)


def max_pool_fprop_gpu[
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
    comptime kernel = _max_pool_fprop_kernel[
        dtype, index, adaptive, store_values, offsets
    ]
    ctx.enqueue_function[kernel](
        y,
        indices,
        x,
        p,
        grid_dim=ceildiv(p.output_size(), BLOCK),
        block_dim=BLOCK,
    )


def max_pool_dgrad_gpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
    everywhere: Bool = False,
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    comptime kernel = _max_pool_dgrad_kernel[
        dtype, index, adaptive, offsets, everywhere
    ]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        p,
        grid_dim=ceildiv(p.input_size(), BLOCK),
        block_dim=BLOCK,
    )


def avg_pool_fprop_gpu[
    dtype: DType, *, adaptive: Bool
](ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem) raises:
    comptime kernel = _avg_pool_fprop_kernel[dtype, adaptive]
    ctx.enqueue_function[kernel](
        y,
        x,
        p,
        grid_dim=ceildiv(p.output_size(), BLOCK),
        block_dim=BLOCK,
    )


def avg_pool_dgrad_gpu[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    comptime kernel = _avg_pool_dgrad_kernel[dtype, adaptive]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        p,
        grid_dim=ceildiv(p.input_size(), BLOCK),
        block_dim=BLOCK,
    )
