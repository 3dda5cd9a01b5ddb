"""Registrations of the pooling family: check the operands, then choose an implementation.

`geometry` is the rank-1 int64 host tensor that problem.mojo describes; adaptive pooling needs none.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from .dispatch import (
    avg_pool_dgrad,
    avg_pool_fprop,
    max_pool_dgrad,
    max_pool_fprop,
)
from .problem import (
    Data,
    PoolingProblem,
    adaptive_problem,
    check_equal,
    pooling_problem,
)
from .scatter import (
    ScatterSizes,
    scatter_add_cpu,
    scatter_add_gpu,
    unpool_cpu,
    unpool_gather_cpu,
    unpool_gather_gpu,
    unpool_gpu,
)


@always_inline
def _in[
    dtype: DType, rank: Int
](t: InputTensor[dtype=dtype, rank=rank, ...]) -> Data[dtype]:
    return rebind[Data[dtype]](t.unsafe_ptr())


@always_inline
def _out[
    dtype: DType, rank: Int
](t: OutputTensor[dtype=dtype, rank=rank, ...]) -> Data[dtype]:
    return rebind[Data[dtype]](t.unsafe_ptr())


def _check_same_shape(
    name: String, shape: IndexList[5], wanted: IndexList[5], rule: String
) raises:
    for a in range(5):
        check_equal(String(name, ".shape[", a, "]"), shape[a], wanted[a], rule)


def _scatter_sizes(
    small: IndexList[5], large: IndexList[5]
) raises -> ScatterSizes:
    check_equal("output.N", large[0], small[0], "the input's N")
    check_equal("output.C", large[4], small[4], "the input's C")
    return ScatterSizes(
        small[0],
        small[1] * small[2] * small[3],
        large[1] * large[2] * large[3],
        small[4],
    )


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
    """y, indices = the maxima of x and where they are, flat in the unpadded plane.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        indices: OutputTensor[dtype=DType.int64, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), x.shape(), y.shape()
        )
        _check_same_shape(
            "indices", indices.shape(), y.shape(), "the extent of y"
        )
        max_pool_fprop[target](_out(y), _out(indices), _in(x), p, ctx)


@extensibility.register("max_pool_fprop_offsets")
struct MaxPoolFpropOffsets:
    """As max_pool_fprop, with the number of the winning tap within its window in place of the index.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, offset: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        offsets: OutputTensor[dtype=offset, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), x.shape(), y.shape()
        )
        _check_same_shape(
            "offsets", offsets.shape(), y.shape(), "the extent of y"
        )
        _check_offset_type[offset](p)
        max_pool_fprop[target, offsets=True](
            _out(y), _out(offsets), _in(x), p, ctx
        )


def _check_offset_type[offset: DType](p: PoolingProblem) raises:
    comptime if offset == DType.uint8:
        if p.window_size() > 255:
            raise Error(
                "offsets are uint8: the window has ",
                p.window_size(),
                " taps, one byte holds at most 255",
            )


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
    """dx gathers, for each pixel, the dy of the windows above it whose index names it. Deterministic; an index
    that names no pixel under its window is ignored."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
        )
        _check_same_shape(
            "indices", indices.shape(), dy.shape(), "the extent of dy"
        )
        max_pool_dgrad[target](_out(dx), _in(dy), _in(indices), p, ctx)


@extensibility.register("max_pool_dgrad_offsets")
struct MaxPoolDgradOffsets:
    """As max_pool_dgrad, from the numbers of the winning taps."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, offset: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        offsets: InputTensor[dtype=offset, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
        )
        _check_same_shape(
            "offsets", offsets.shape(), dy.shape(), "the extent of dy"
        )
        _check_offset_type[offset](p)
        max_pool_dgrad[target, offsets=True](
            _out(dx), _in(dy), _in(offsets), p, ctx
        )


@extensibility.register("max_pool_dgrad_scatter")
struct MaxPoolDgradScatter:
    """dx scatters dy to where the indices point, whatever produced them. Atomic on a GPU, so not deterministic
    there; an index outside the plane is ignored."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var s = _scatter_sizes(dy.shape(), dx.shape())
        _check_same_shape(
            "indices", indices.shape(), dy.shape(), "the extent of dy"
        )
        if s.large() == 0:
            return
        comptime if is_cpu[target]():
            scatter_add_cpu(_out(dx), _in(dy), _in(indices), s)
        else:
            scatter_add_gpu(
                ctx, dx.to_device_buffer(ctx), _in(dy), _in(indices), s
            )


@extensibility.register("max_unpool_fprop")
struct MaxUnpoolFprop:
    """y is zero but for x at the indices; an index outside the plane is ignored.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var s = _scatter_sizes(x.shape(), y.shape())
        _check_same_shape(
            "indices", indices.shape(), x.shape(), "the extent of x"
        )
        if s.large() == 0:
            return
        comptime if is_cpu[target]():
            unpool_cpu(_out(y), _in(x), _in(indices), s)
        else:
            unpool_gpu(ctx, y.to_device_buffer(ctx), _in(x), _in(indices), s)


@extensibility.register("max_unpool_dgrad")
struct MaxUnpoolDgrad:
    """dx takes dy at the indices; an index outside the plane gives zero."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var s = _scatter_sizes(dx.shape(), dy.shape())
        _check_same_shape(
            "indices", indices.shape(), dx.shape(), "the extent of dx"
        )
        if s.small() == 0:
            return
        comptime if is_cpu[target]():
            unpool_gather_cpu(_out(dx), _in(dy), _in(indices), s)
        else:
            unpool_gather_gpu(ctx, _out(dx), _in(dy), _in(indices), s)


def _check_undilated(p: PoolingProblem) raises:
    if p.d.dilation != 1 or p.h.dilation != 1 or p.w.dilation != 1:
        raise Error(
            "dilation=(",
            p.d.dilation,
            ", ",
            p.h.dilation,
            ", ",
            p.w.dilation,
            "): average pooling has none",
        )


@extensibility.register("avg_pool_fprop")
struct AvgPoolFprop:
    """y = the averages of x."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), x.shape(), y.shape()
        )
        _check_undilated(p)
        avg_pool_fprop[target, adaptive=False](_out(y), _in(x), p, ctx)


@extensibility.register("avg_pool_dgrad")
struct AvgPoolDgrad:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor. Deterministic.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
        )
        _check_undilated(p)
        avg_pool_dgrad[target, adaptive=False](_out(dx), _in(dy), p, ctx)


@extensibility.register("adaptive_max_pool_fprop")
struct AdaptiveMaxPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        indices: OutputTensor[dtype=DType.int64, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = adaptive_problem(x.shape(), y.shape())
        _check_same_shape(
            "indices", indices.shape(), y.shape(), "the extent of y"
        )
        max_pool_fprop[target, adaptive=True](
            _out(y), _out(indices), _in(x), p, ctx
        )


@extensibility.register("adaptive_max_pool_dgrad")
struct AdaptiveMaxPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = adaptive_problem(dx.shape(), dy.shape())
        _check_same_shape(
            "indices", indices.shape(), dy.shape(), "the extent of dy"
        )
        max_pool_dgrad[target, adaptive=True](
            _out(dx), _in(dy), _in(indices), p, ctx
        )


@extensibility.register("adaptive_avg_pool_fprop")
struct AdaptiveAvgPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = adaptive_problem(x.shape(), y.shape())
        avg_pool_fprop[target, adaptive=True](_out(y), _in(x), p, ctx)


@extensibility.register("adaptive_avg_pool_dgrad")
struct AdaptiveAvgPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = adaptive_problem(dx.shape(), dy.shape())
        avg_pool_dgrad[target, adaptive=True](_out(dx), _in(dy), p, ctx)
