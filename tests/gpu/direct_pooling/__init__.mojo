"""The pooling operations by the always-right kernels of kernels/pooling/direct.mojo alone, under the names of the real ones.

For small windows no dispatch chooses them on a GPU: only planes that 32-bit numbers cannot count reach them there. What
exports the real operations exports these with `--kernels`, and tests/gpu/check_pooling.py checks them in the same way.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.common.pointer import Ptr
from kernels.pooling.direct import Direct
from kernels.pooling.kernel import Operands, averages
from kernels.pooling.problem import PoolingProblem, pooling_problem
from max.gpu.host import DeviceContext


@always_inline
def _in[
    dtype: DType, rank: Int
](t: InputTensor[dtype=dtype, rank=rank, ...]) -> Ptr[dtype]:
    return rebind[Ptr[dtype]](t.unsafe_ptr())


@always_inline
def _out[
    dtype: DType, rank: Int
](t: OutputTensor[dtype=dtype, rank=rank, ...]) -> Ptr[dtype]:
    return rebind[Ptr[dtype]](t.unsafe_ptr())


@always_inline
def _launch[
    dtype: DType, entry: DType, //, target: StaticString, forward: Bool
](t: Operands[dtype, entry], p: PoolingProblem, ctx: DeviceContext) raises:
    Direct[forward, target].launch[dtype, entry, False](ctx, t, p)


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, entry: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        entries: OutputTensor[dtype=entry, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), x.shape(), y.shape()
        )
        var t = Operands(_out(y), _in(x), _out(entries))
        _launch[target, True](t, p, ctx)


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, entry: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        entries: InputTensor[dtype=entry, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var p = pooling_problem(
            _in(geometry), geometry.dim_size(0), dx.shape(), dy.shape()
        )
        var t = Operands(_out(dx), _in(dy), _in(entries))
        _launch[target, False](t, p, ctx)


@extensibility.register("avg_pool")
struct AvgPool:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=5, ...],
        source: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var t = averages(_out(result), _in(source))
        comptime forward = "fprop" in function
        comptime if forward:
            var p = pooling_problem(
                _in(geometry),
                geometry.dim_size(0),
                source.shape(),
                result.shape(),
            )
            _launch[target, True](t, p, ctx)
        else:
            var p = pooling_problem(
                _in(geometry),
                geometry.dim_size(0),
                result.shape(),
                source.shape(),
            )
            _launch[target, False](t, p, ctx)
