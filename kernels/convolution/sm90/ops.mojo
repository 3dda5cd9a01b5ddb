"""The Hopper kernels as ops of their own, for measurements and tests: no other kernel stands in for them.

`tuning` is a host tensor of two int64 values: the tile shape's index and, for wgrad, the number of splits; -1 leaves the
choice to the kernels' own table.
"""

import extensibility
from extensibility import InputTensor, OutputTensor, _FusedComputeOutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common import DGRAD, FPROP, WGRAD, Ptr
from ..problem import ConvolutionProblem
from ..ops import _pointer, _problem, _values
from .packed import needs_packing
from .dispatch import are_aligned, can_implement, compiles_for, run, run_fused


def _tuning(
    tuning: InputTensor[dtype=DType.int64, rank=1, ...]
) raises -> Tuple[Int, Int]:
    if tuning.dim_size(0) != 2:
        raise Error(
            t"convolution: tuning has {tuning.dim_size(0)} values, not 2"
        )
    return Int(tuning[0]), Int(tuning[1])


@no_inline
def _run[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
    tuning: Tuple[Int, Int],
    ctx: DeviceContext,
) raises:
    var reason = can_implement[dtype, pass_](problem)
    if reason:
        raise Error(t"Hopper convolution: {reason.value()}")
    if not are_aligned[dtype](result, a, b):
        raise Error(
            "Hopper convolution: a tensor does not begin at a multiple of 16"
            " bytes"
        )
    comptime if compiles_for[dtype]():
        run[dtype, pass_](result, a, b, problem, ctx, tuning[0], tuning[1])


@extensibility.register("conv_fprop_sm90")
struct ConvFpropSm90:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        tuning: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_cpu[target]():
            raise Error("conv_fprop_sm90 runs on a GPU only")
        else:
            _run[dtype, FPROP](
                _pointer(y.unsafe_ptr()),
                _pointer(x.unsafe_ptr()),
                _pointer(w.unsafe_ptr()),
                _problem(x.shape(), w.shape(), y.shape(), _values(geometry)),
                _tuning(tuning),
                ctx,
            )


@extensibility.register("conv_dgrad_sm90")
struct ConvDgradSm90:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        tuning: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_cpu[target]():
            raise Error("conv_dgrad_sm90 runs on a GPU only")
        else:
            _run[dtype, DGRAD](
                _pointer(dx.unsafe_ptr()),
                _pointer(dy.unsafe_ptr()),
                _pointer(w.unsafe_ptr()),
                _problem(dx.shape(), w.shape(), dy.shape(), _values(geometry)),
                _tuning(tuning),
                ctx,
            )


@extensibility.register("conv_wgrad_sm90")
struct ConvWgradSm90:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dw: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        tuning: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_cpu[target]():
            raise Error("conv_wgrad_sm90 runs on a GPU only")
        else:
            _run[dtype, WGRAD](
                _pointer(dw.unsafe_ptr()),
                _pointer(x.unsafe_ptr()),
                _pointer(dy.unsafe_ptr()),
                _problem(x.shape(), dw.shape(), dy.shape(), _values(geometry)),
                _tuning(tuning),
                ctx,
            )


@no_inline
def _check_fused[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
) raises:
    var reason = can_implement[dtype, pass_](problem)
    if reason:
        raise Error(t"Hopper convolution with an epilogue: {reason.value()}")
    if needs_packing(problem):
        raise Error(
            t"Hopper convolution with an epilogue: C = {problem.c} and K ="
            t" {problem.k} must be multiples of 8"
        )
    if not are_aligned[dtype](result, a, b):
        raise Error(
            "Hopper convolution: a tensor does not begin at a multiple of 16"
            " bytes"
        )


@extensibility.register("conv_fprop_sm90_fused")
struct ConvFpropSm90Fused:
    """The forward pass, with the graph's elementwise successors in its store.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: _FusedComputeOutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        @__parameter
        @always_inline
        def finish[
            width: Int
        ](index: IndexList[5], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
            return y._fused_compute_output_lambda[element_alignment=width](
                index, value
            )

        comptime if is_cpu[target]() or not compiles_for[dtype]():
            raise Error("conv_fprop_sm90_fused needs a Hopper GPU")
        else:
            var result = _pointer(y.unsafe_ptr())
            var a = _pointer(x.unsafe_ptr())
            var b = _pointer(w.unsafe_ptr())
            var problem = _problem(
                x.shape(), w.shape(), y.shape(), _values(geometry)
            )
            _check_fused[dtype, FPROP](result, a, b, problem)
            run_fused[dtype, FPROP, finish](result, a, b, problem, ctx)


@extensibility.register("conv_dgrad_sm90_fused")
struct ConvDgradSm90Fused:
    """The data gradient, with the graph's elementwise successors in its store.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        dx: _FusedComputeOutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        @__parameter
        @always_inline
        def finish[
            width: Int
        ](index: IndexList[5], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
            return dx._fused_compute_output_lambda[element_alignment=width](
                index, value
            )

        comptime if is_cpu[target]() or not compiles_for[dtype]():
            raise Error("conv_dgrad_sm90_fused needs a Hopper GPU")
        else:
            var result = _pointer(dx.unsafe_ptr())
            var a = _pointer(dy.unsafe_ptr())
            var b = _pointer(w.unsafe_ptr())
            var problem = _problem(
                dx.shape(), w.shape(), dy.shape(), _values(geometry)
            )
            _check_fused[dtype, DGRAD](result, a, b, problem)
            run_fused[dtype, DGRAD, finish](result, a, b, problem, ctx)
