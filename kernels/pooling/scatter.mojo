"""Pooling by stored index: the scattering form of max pooling's gradient, and max unpooling.

Indices are flat in a plane of `plane` pixels and may be anything: one that points outside its plane is ignored, so
nothing is ever written outside the tensor. A tensor is [N, pixels, C] here; which pixels lie beside which does not
matter.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.atomic import Atomic
from std.math import ceildiv

from ..library import scratch
from .cpu.vectors import SMALLEST_SHARE, for_each_share
from .problem import Data, accumulator

comptime BLOCK = 256


@fieldwise_init
struct ScatterSizes(TrivialRegisterPassable):
    """`pixels` index entries for each of N * C planes of `plane` pixels."""

    var batch: Int
    var pixels: Int
    var plane: Int
    var channels: Int

    def small(self) -> Int:
        return self.batch * self.pixels * self.channels

    def large(self) -> Int:
        return self.batch * self.plane * self.channels


@always_inline
def unpool_gather_at[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    pixels: Int,
    plane: Int,
    channels: Int,
    flat: Int,
):
    """dx[n, o, c] = dy[n, indices[n, o, c], c] over planes of `plane` pixels; a foreign index reads as zero.
    """
    var n = flat // (pixels * channels)
    var c = flat % channels
    var i = Int(indices[unsafe_offset=flat])
    var value = Scalar[dtype](0)
    if 0 <= i and i < plane:
        value = dy[unsafe_offset=(n * plane + i) * channels + c]
    dx[unsafe_offset=flat] = value


@no_inline
def scatter_add_cpu[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    s: ScatterSizes,
):
    """dx[n, indices[n, o, c], c] += dy[n, o, c], one plane at a time and always in the same order.
    """
    comptime Acc = accumulator[dtype]

    def share(first: Int, end: Int) {imm}:
        # Sums in the storage type would lose small addends: each plane is summed apart and then rounded once.
        var sums = List[Scalar[Acc]](length=s.plane, fill=0)
        for unit in range(first, end):
            var n = unit // s.channels
            var c = unit % s.channels
            for i in range(s.plane):
                sums[i] = 0
            for o in range(s.pixels):
                var at = (n * s.pixels + o) * s.channels + c
                var i = Int(indices[unsafe_offset=at])
                if 0 <= i and i < s.plane:
                    sums[i] += dy[unsafe_offset=at].cast[Acc]()
            for i in range(s.plane):
                dx[unsafe_offset=(n * s.plane + i) * s.channels + c] = sums[
                    i
                ].cast[dtype]()

    for_each_share(share, s.batch * s.channels)


@no_inline
def unpool_cpu[
    dtype: DType
](y: Data[dtype], x: Data[dtype], indices: Data[DType.int64], s: ScatterSizes):
    """y = 0, then y[n, indices[n, o, c], c] = x[n, o, c]; the last of equal indices stays.
    """

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            var base = n * s.plane * s.channels
            for i in range(s.plane * s.channels):
                y[unsafe_offset=base + i] = 0
            for o in range(s.pixels):
                for c in range(s.channels):
                    var at = (n * s.pixels + o) * s.channels + c
                    var i = Int(indices[unsafe_offset=at])
                    if 0 <= i and i < s.plane:
                        y[unsafe_offset=base + i * s.channels + c] = x[
                            unsafe_offset=at
                        ]

    for_each_share(share, s.batch)


@no_inline
def unpool_gather_cpu[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    s: ScatterSizes,
):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            unpool_gather_at(dx, dy, indices, s.pixels, s.plane, s.channels, i)

    for_each_share(share, s.small(), SMALLEST_SHARE)


def _scatter_add_kernel[
    dtype: DType, sums_dtype: DType
](
    sums: Data[sums_dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    total: Int64,
    pixels: Int64,
    plane: Int64,
    channels: Int64,
):
    var at = Int64(global_idx.x)
    if at >= total:
        return
    var i = indices[unsafe_offset=at]
    if i < 0 or i >= plane:
        return
    var n = at // (pixels * channels)
    var c = at % channels
    _ = Atomic.fetch_add(
        sums.unsafe_offset((n * plane + i) * channels + c),
        dy[unsafe_offset=at].cast[sums_dtype](),
    )


def _unpool_kernel[
    dtype: DType
](
    y: Data[dtype],
    x: Data[dtype],
    indices: Data[DType.int64],
    total: Int64,
    pixels: Int64,
    plane: Int64,
    channels: Int64,
):
    var at = Int64(global_idx.x)
    if at >= total:
        return
    var i = indices[unsafe_offset=at]
    if i < 0 or i >= plane:
        return
    var n = at // (pixels * channels)
    var c = at % channels
    y[unsafe_offset=(n * plane + i) * channels + c] = x[unsafe_offset=at]


def _unpool_gather_kernel[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    total: Int64,
    pixels: Int64,
    plane: Int64,
    channels: Int64,
):
    var at = Int64(global_idx.x)
    if at < total:
        unpool_gather_at(
            dx,
            dy,
            indices,
            Int(pixels),
            Int(plane),
            Int(channels),
            Int(at),
        )


def _round_kernel[
    dtype: DType
](dx: Data[dtype], sums: Data[DType.float32], total: Int64):
    var at = Int64(global_idx.x)
    if at < total:
        dx[unsafe_offset=at] = sums[unsafe_offset=at].cast[dtype]()


def scatter_add_gpu[
    dtype: DType
](
    ctx: DeviceContext,
    dx: DeviceBuffer[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    s: ScatterSizes,
) raises:
    """The same with atomic additions in float32: the order, and so the last bits, differ from run to run.
    """

    @always_inline
    def add[sums_dtype: DType](sums: DeviceBuffer[sums_dtype]) raises {imm}:
        ctx.enqueue_memset(sums, 0)
        ctx.enqueue_function[_scatter_add_kernel[dtype, sums_dtype]](
            sums,
            dy,
            indices,
            Int64(s.small()),
            Int64(s.pixels),
            Int64(s.plane),
            Int64(s.channels),
            grid_dim=ceildiv(s.small(), BLOCK),
            block_dim=BLOCK,
        )

    comptime if dtype == DType.float32:
        add(dx)
    else:
        var sums = scratch[DType.float32](ctx, s.large())
        add(sums)
        ctx.enqueue_function[_round_kernel[dtype]](
            dx,
            sums,
            Int64(s.large()),
            grid_dim=ceildiv(s.large(), BLOCK),
            block_dim=BLOCK,
        )
        _ = sums^


def unpool_gpu[
    dtype: DType
](
    ctx: DeviceContext,
    y: DeviceBuffer[dtype],
    x: Data[dtype],
    indices: Data[DType.int64],
    s: ScatterSizes,
) raises:
    ctx.enqueue_memset(y, 0)
    ctx.enqueue_function[_unpool_kernel[dtype]](
        y,
        x,
        indices,
        Int64(s.small()),
        Int64(s.pixels),
        Int64(s.plane),
        Int64(s.channels),
        grid_dim=ceildiv(s.small(), BLOCK),
        block_dim=BLOCK,
    )


def unpool_gather_gpu[
    dtype: DType
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[DType.int64],
    s: ScatterSizes,
) raises:
    ctx.enqueue_function[_unpool_gather_kernel[dtype]](
        dx,
        dy,
        indices,
        Int64(s.small()),
        Int64(s.pixels),
        Int64(s.plane),
        Int64(s.channels),
        grid_dim=ceildiv(s.small(), BLOCK),
        block_dim=BLOCK,
    )
