"""Pooling by stored index: the scattering form of max pooling's gradient, and max unpooling.

Indices are flat in a plane of `plane` pixels and may be anything: one that points outside its plane is ignored, so
nothing is ever written outside the tensor; unpooling reports it (common/bounds.mojo). A tensor is [N, pixels, C] here;
the shape of its planes does not matter.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import ceildiv

from ..common.argument import KernelArgument
from ..common.atomics import add_atomically
from ..common.bounds import Bounds
from ..common.library import scratch
from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import SMALLEST_SHARE, for_each_share
from .kernel import INDEX

comptime THREADS = 256


@fieldwise_init
struct UnpoolSizes(KernelArgument):
    """`pixels` indices for each of N * C planes of `plane` pixels."""

    var batch: Int64
    var pixels: Int64
    var plane: Int64
    var channels: Int64

    def small(self) -> Int:
        return Int(self.batch * self.pixels * self.channels)

    def large(self) -> Int:
        return Int(self.batch * self.plane * self.channels)

    @always_inline
    def target(self, indices: Ptr[INDEX], at: Int, bounds: Bounds) -> Int:
        """Returns the place in the large tensor to which index number `at` points; -1 where that lies outside its
        plane."""
        var i = indices[unsafe_offset=at]
        if not bounds.holds(i, self.plane):
            return -1
        var n = Int64(at) // (self.pixels * self.channels)
        return Int((n * self.plane + i) * self.channels) + Int(
            Int64(at) % self.channels
        )


@no_inline
def scatter_add_cpu[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], indices: Ptr[INDEX], s: UnpoolSizes):
    """dx[n, indices[n, o, c], c] += dy[n, o, c], one plane at a time and always in the same order.
    """
    comptime Acc = accumulation_type[dtype]
    var channels = Int(s.channels)
    var plane = Int(s.plane)
    var pixels = Int(s.pixels)

    def share(first: Int, end: Int) {imm}:
        # Sums in the storage type would lose small addends: each plane is summed apart and then rounded once.
        var sums = List[Scalar[Acc]](length=plane, fill=0)
        for unit in range(first, end):
            var n = unit // channels
            var c = unit % channels
            for i in range(plane):
                sums[i] = 0
            for o in range(pixels):
                var at = (n * pixels + o) * channels + c
                var i = Int(indices[unsafe_offset=at])
                if 0 <= i and i < plane:
                    sums[i] += dy[unsafe_offset=at].cast[Acc]()
            for i in range(plane):
                dx[unsafe_offset=(n * plane + i) * channels + c] = sums[i].cast[
                    dtype
                ]()

    for_each_share(share, Int(s.batch) * channels)


@no_inline
def unpool_cpu[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    indices: Ptr[INDEX],
    s: UnpoolSizes,
    bounds: Bounds,
):
    """y = 0, then y[n, indices[n, o, c], c] = x[n, o, c]; the last of equal indices stays.
    """
    var channels = Int(s.channels)
    var plane = Int(s.plane)

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            var y_n = y.unsafe_offset(n * plane * channels)
            for i in range(plane * channels):
                y_n[unsafe_offset=i] = 0
            var at = n * Int(s.pixels) * channels
            for _ in range(Int(s.pixels)):
                for c in range(channels):
                    var i = indices[unsafe_offset=at]
                    if bounds.holds(i, s.plane):
                        y_n[unsafe_offset=Int(i) * channels + c] = x[
                            unsafe_offset=at
                        ]
                    at += 1

    for_each_share(share, Int(s.batch))


comptime ADD = 0
"""dx[index] += dy, atomically."""
comptime STORE = 1
"""y[index] = x; which of equal indices stays is not defined."""
comptime TAKE = 2
"""dx = dy[index]."""


@always_inline
def _move[
    dtype: DType, sums_dtype: DType, //, mode: Int
](
    large: Ptr[sums_dtype],
    small: Ptr[dtype],
    indices: Ptr[INDEX],
    s: UnpoolSizes,
    bounds: Bounds,
    i: Int,
):
    """Element `i` of the small tensor, to where its index points or from there.
    """
    var at = s.target(indices, i, bounds)
    comptime if mode == TAKE:
        var value = Scalar[dtype](0)
        if at >= 0:
            value = large[unsafe_offset=at].cast[dtype]()
        small[unsafe_offset=i] = value
    else:
        if at < 0:
            return
        var value = small[unsafe_offset=i].cast[sums_dtype]()
        comptime if mode == ADD:
            add_atomically(large.unsafe_offset(at), value)
        else:
            large[unsafe_offset=at] = value


@no_inline
def unpool_dgrad_cpu[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], indices: Ptr[INDEX], s: UnpoolSizes):
    """dx[n, o, c] = dy[n, indices[n, o, c], c]; a foreign index reads as zero.
    """

    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            _move[TAKE](dy, dx, indices, s, Bounds(0, 0), i)

    for_each_share(share, s.small(), SMALLEST_SHARE)


@__name(t"pool_by_index_{dtype}_{sums_dtype}_m{mode}")
def pool_by_index[
    dtype: DType, sums_dtype: DType, mode: Int
](
    large: Ptr[sums_dtype],
    small: Ptr[dtype],
    indices: Ptr[INDEX],
    s: UnpoolSizes,
    bounds: Bounds,
):
    var i = Int(global_idx.x)
    if i < s.small():
        _move[mode](large, small, indices, s, bounds, i)


def by_index_gpu[
    dtype: DType, sums_dtype: DType, //, mode: Int
](
    ctx: DeviceContext,
    large: Ptr[sums_dtype],
    small: Ptr[dtype],
    indices: Ptr[INDEX],
    s: UnpoolSizes,
    bounds: Bounds = Bounds(0, 0),
) raises:
    ctx.enqueue_function[pool_by_index[dtype, sums_dtype, mode]](
        large,
        small,
        indices,
        s,
        bounds,
        grid_dim=ceildiv(s.small(), THREADS),
        block_dim=THREADS,
    )


@__name(t"pool_round_sums_{dtype}")
def round_sums[
    dtype: DType
](dx: Ptr[dtype], sums: Ptr[DType.float32], total: Int64):
    var at = Int64(global_idx.x)
    if at < total:
        dx[unsafe_offset=at] = sums[unsafe_offset=at].cast[dtype]()


def scatter_add_gpu[
    dtype: DType
](
    ctx: DeviceContext,
    dx: DeviceBuffer[dtype],
    dy: Ptr[dtype],
    indices: Ptr[INDEX],
    s: UnpoolSizes,
) raises:
    """Does the work of scatter_add_cpu with atomic additions in float32: the order, and so the last bits, differ from
    run to run."""
    var result = rebind[Ptr[dtype]](dx.unsafe_ptr())
    comptime if dtype == DType.float32:
        ctx.enqueue_memset(dx, 0)
        by_index_gpu[ADD](ctx, result, dy, indices, s)
    else:
        var sums = scratch[DType.float32](ctx, s.large())
        ctx.enqueue_memset(sums, 0)
        var pointer = rebind[Ptr[DType.float32]](sums.unsafe_ptr())
        by_index_gpu[ADD](ctx, pointer, dy, indices, s)
        ctx.enqueue_function[round_sums[dtype]](
            result,
            pointer,
            Int64(s.large()),
            grid_dim=ceildiv(s.large(), THREADS),
            block_dim=THREADS,
        )
        _ = sums^
