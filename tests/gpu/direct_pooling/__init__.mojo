"""The pooling operations by the always-right kernels of kernels/pooling/direct.mojo alone, under the names of the real ones.

For small windows no dispatch chooses them on a GPU: only planes that 32-bit numbers cannot count reach them there. What
exports the real operations exports these with `--kernels`, and tests/gpu/check_pooling.py checks them in the same way.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.common.library import Arguments
from kernels.common.pointer import Ptr
from kernels.pooling.direct import Direct
from kernels.pooling.kernel import PoolingTensors, averages
from kernels.pooling.problem import (
    PoolingNumbers,
    PoolingProblem,
    pooling_problem,
)
from max.gpu.host import DeviceContext
from std.utils.index import IndexList


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


def _problem(
    numbers: InputTensor[dtype=DType.int64, rank=1, ...],
    x: IndexList[5],
    y: IndexList[5],
) raises -> PoolingProblem:
    var arguments = Arguments(Int(numbers.unsafe_ptr()))
    return pooling_problem(PoolingNumbers.take(arguments), x, y)


@always_inline
def _launch[
    dtype: DType, argmax: DType, //, target: StaticString, forward: Bool
](
    t: PoolingTensors[dtype, argmax], p: PoolingProblem, ctx: DeviceContext
) raises:
    Direct[forward, target].launch[dtype, argmax, False](ctx, t, p)


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        argmax: DType,
        function: StaticString,
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        argmaxes: OutputTensor[dtype=argmax, rank=5, ...],
        numbers: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = _problem(numbers, x.shape(), y.shape())
        var t = PoolingTensors(_out(y), _in(x), _out(argmaxes))
        _launch[target, True](t, p, ctx)


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        argmax: DType,
        function: StaticString,
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        numbers: InputTensor[dtype=DType.int64, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        argmaxes: InputTensor[dtype=argmax, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = _problem(numbers, dx.shape(), dy.shape())
        var t = PoolingTensors(_out(dx), _in(dy), _in(argmaxes))
        _launch[target, False](t, p, ctx)


@extensibility.register("avg_pool_fprop")
struct AvgPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        numbers: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = _problem(numbers, x.shape(), y.shape())
        _launch[target, True](averages(_out(y), _in(x)), p, ctx)


@extensibility.register("avg_pool_dgrad")
struct AvgPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        numbers: InputTensor[dtype=DType.int64, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var p = _problem(numbers, dx.shape(), dy.shape())
        _launch[target, False](averages(_out(dx), _in(dy)), p, ctx)
