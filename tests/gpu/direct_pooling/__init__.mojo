"""The pooling operations by the always-right kernels of kernels/pooling/direct.mojo alone, under the names of the real ones.

For small windows no dispatch chooses them on a GPU: only planes that 32-bit numbers cannot count reach them there. What
exports the real operations exports these with `--kernels`, and tests/gpu/check_pooling.py checks them in the same way.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.pooling import direct
from kernels.pooling.problem import Data, pooling_problem
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu


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


@always_inline
def _max_fprop[
    target: StaticString, offsets: Bool, dtype: DType, index: DType
](
    y: OutputTensor[dtype=dtype, rank=5, ...],
    entries: OutputTensor[dtype=index, rank=5, ...],
    x: InputTensor[dtype=dtype, rank=5, ...],
    geometry: InputTensor[dtype=DType.int64, rank=1, ...],
    ctx: DeviceContext,
) raises:
    var p = pooling_problem(
        _in(geometry), geometry.dim_size(0), x.shape(), y.shape()
    )
    comptime if is_cpu[target]():
        direct.max_pool_fprop_cpu[adaptive=False, offsets=offsets](
            _out(y), _out(entries), _in(x), p
        )
    else:
        direct.max_pool_fprop_gpu[adaptive=False, offsets=offsets](
            ctx, _out(y), _out(entries), _in(x), p
        )


@always_inline
def _max_dgrad[
    target: StaticString, offsets: Bool, dtype: DType, index: DType
](
    dx: OutputTensor[dtype=dtype, rank=5, ...],
    dy: InputTensor[dtype=dtype, rank=5, ...],
    entries: InputTensor[dtype=index, rank=5, ...],
    geometry: InputTensor[dtype=DType.int64, rank=1, ...],
    ctx: DeviceContext,
) raises:
    var p = pooling_problem(
        _in(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
    )
    comptime if is_cpu[target]():
        direct.max_pool_dgrad_cpu[adaptive=False, offsets=offsets](
            _out(dx), _in(dy), _in(entries), p
        )
    else:
        direct.max_pool_dgrad_gpu[adaptive=False, offsets=offsets](
            ctx, _out(dx), _in(dy), _in(entries), p
        )


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
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
        _max_fprop[target, False](y, indices, x, geometry, ctx)


@extensibility.register("max_pool_fprop_offsets")
struct MaxPoolFpropOffsets:
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
        _max_fprop[target, True](y, offsets, x, geometry, ctx)


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
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
        _max_dgrad[target, False](dx, dy, indices, geometry, ctx)


@extensibility.register("max_pool_dgrad_offsets")
struct MaxPoolDgradOffsets:
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
        _max_dgrad[target, True](dx, dy, offsets, geometry, ctx)


@extensibility.register("avg_pool_fprop")
struct AvgPoolFprop:
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
        comptime if is_cpu[target]():
            direct.avg_pool_cpu[adaptive=False, forward=True](
                _out(y), _in(x), p
            )
        else:
            direct.avg_pool_gpu[adaptive=False, forward=True](
                ctx, _out(y), _in(x), p
            )


@extensibility.register("avg_pool_dgrad")
struct AvgPoolDgrad:
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
        comptime if is_cpu[target]():
            direct.avg_pool_cpu[adaptive=False, forward=False](
                _out(dx), _in(dy), p
            )
        else:
            direct.avg_pool_gpu[adaptive=False, forward=False](
                ctx, _out(dx), _in(dy), p
            )
