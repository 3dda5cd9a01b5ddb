"""The Hopper kernels as ops: with a fused epilogue, and forced, for measurements and tests.

For the forced ones no other kernel stands in. Their `tuning` is a host tensor of five int64 values, the fields of
`WgradChoice`; fprop and dgrad look at the first, the tile shape's index, alone. A first value of -1 leaves the choice to the
kernels' own table.
"""

import extensibility
from extensibility import (
    InputTensor,
    InputVariadicTensors,
    OutputTensor,
    _FusedComputeOutputTensor,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common import DGRAD, FPROP, WGRAD, Ptr
from ...library import Call, scratch
from ..problem import GEOMETRY_LENGTH, ConvolutionProblem
from ..entries import problem_of as _problem
from .dispatch import are_aligned, can_implement, compiles_for, run, run_fused
from .epilogue import apply_epilogue
from .implicit_gemm import Epilogue, EpilogueStore
from .packed import needs_packing
from .wgrad_plan import WgradChoice


@always_inline
def _pointer[
    dtype: DType
](pointer: Pointer[mut=_, Scalar[dtype], _]) -> Ptr[dtype]:
    """A tensor's data; the caller keeps the tensor alive while kernels use it.
    """
    return pointer.unsafe_mut_cast[True]().unsafe_origin_cast[
        MutUntrackedOrigin
    ]()


def _values(
    geometry: InputTensor[dtype=DType.int64, rank=1, ...]
) raises -> IndexList[GEOMETRY_LENGTH]:
    if geometry.dim_size(0) != GEOMETRY_LENGTH:
        raise Error(
            t"convolution: geometry has {geometry.dim_size(0)} values, not"
            t" {GEOMETRY_LENGTH}"
        )
    var values = IndexList[GEOMETRY_LENGTH]()
    for i in range(GEOMETRY_LENGTH):
        values[i] = Int(geometry[i])
    return values


def _tuning(
    tuning: InputTensor[dtype=DType.int64, rank=1, ...]
) raises -> Optional[WgradChoice]:
    if tuning.dim_size(0) != 5:
        raise Error(
            t"convolution: tuning has {tuning.dim_size(0)} values, not 5"
        )
    if Int(tuning[0]) < 0:
        return None
    return WgradChoice(
        shape=Int(tuning[0]),
        splits=Int(tuning[1]),
        cluster=Int(tuning[2]),
        share_rows=Int(tuning[3]),
        share_columns=Int(tuning[4]),
    )


@no_inline
def _run[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    problem: ConvolutionProblem,
    tuning: Optional[WgradChoice],
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
        run[dtype, pass_](result, a, b, problem, ctx, tuning)


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


@always_inline
def _run_with_epilogue[
    dtype: DType,
    pass_: Int,
    columns: Int,
    phases: Int,
    function: StaticString,
    epilogue: Optional[Epilogue[dtype]],
    epilogue_store: Optional[EpilogueStore[dtype]],
](
    result: Ptr[dtype],
    shape: IndexList[4],
    a: InputTensor[dtype=dtype, rank=4, ...],
    b: InputTensor[dtype=dtype, rank=4, ...],
    geometry: InputTensor[dtype=DType.int64, rank=1, ...],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """The Hopper kernel with the epilogue in its store, or, for a problem or an address that it does not take, the
    library's `function` into a buffer and a pass over that.
    """
    comptime if compiles_for[dtype]():
        var first = _pointer(a.unsafe_ptr())
        var second = _pointer(b.unsafe_ptr())
        if (
            not can_implement[dtype, pass_](problem)
            and not needs_packing(problem)
            and are_aligned[dtype](result, first, second)
        ):
            run_fused[dtype, pass_, columns, phases, epilogue, epilogue_store](
                result, first, second, problem, ctx
            )
            return
    var plain = scratch[dtype](ctx, shape.flattened_length())
    var call = Call()
    call.append_at(Int(plain.unsafe_ptr()), _deep(shape))
    call.append_at(Int(a.unsafe_ptr()), _deep(a.shape()))
    call.append_at(Int(b.unsafe_ptr()), _deep(b.shape()))
    call.append(geometry)
    call.run[function](ctx)
    apply_epilogue[dtype, epilogue, epilogue_store](
        result, _pointer(plain.unsafe_ptr()), shape, ctx
    )
    _ = plain^


@always_inline
def _deep(shape: IndexList[4]) -> IndexList[5]:
    """[N, 1, H, W, C] of an [N, H, W, C]."""
    return IndexList[5](shape[0], 1, shape[1], shape[2], shape[3])


@extensibility.register("conv_fprop_fused")
struct ConvFpropFused:
    """The forward pass over two spatial axes, with the graph's elementwise successors in its store.

    `columns` is K, and `phases` 1: known when the graph is compiled, they say which kernel it needs.
    """

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        columns: Int,
        phases: Int,
        function: StaticString,
    ](
        y: _FusedComputeOutputTensor[dtype=dtype, rank=4, ...],
        x: InputTensor[dtype=dtype, rank=4, ...],
        w: InputTensor[dtype=dtype, rank=4, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        @__parameter
        @always_inline
        def finish[
            width: Int
        ](index: IndexList[5], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
            return y._fused_compute_output_lambda[element_alignment=width](
                IndexList[4](index[0], index[2], index[3], index[4]), value
            )

        @__parameter
        @always_inline
        def store[width: Int](index: IndexList[5], value: SIMD[dtype, width]):
            y._lambda_store[width=width, element_alignment=width](
                IndexList[4](index[0], index[2], index[3], index[4]), value
            )

        comptime computes = type_of(y)._has_compute_fusion
        comptime stores = type_of(y)._has_output_store_fusion and not computes
        comptime epilogue = Optional[Epilogue[dtype]](
            finish
        ) if computes else None
        comptime epilogue_store = Optional[EpilogueStore[dtype]](
            store
        ) if stores else None
        comptime if is_cpu[target]():
            raise Error("conv_fprop_fused runs on a GPU only")
        else:
            var problem = _problem(
                _deep(x.shape()),
                _deep(w.shape()),
                _deep(y.shape()),
                _values(geometry),
            )
            _run_with_epilogue[
                dtype,
                FPROP,
                columns,
                phases,
                function,
                epilogue,
                epilogue_store,
            ](
                _pointer(y.unsafe_ptr()),
                y.shape(),
                x,
                w,
                geometry,
                problem,
                ctx,
            )


@extensibility.register("conv_dgrad_fused")
struct ConvDgradFused:
    """The data gradient over two spatial axes, with the graph's elementwise successors in its store.

    `columns` is C, and `phases` the product of the strides. Nothing reads `after`, as in `conv_dgrad`.
    """

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        columns: Int,
        phases: Int,
        function: StaticString,
    ](
        dx: _FusedComputeOutputTensor[dtype=dtype, rank=4, ...],
        dy: InputTensor[dtype=dtype, rank=4, ...],
        w: InputTensor[dtype=dtype, rank=4, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        after: InputVariadicTensors[dtype=dtype, rank=4, ...],
        ctx: DeviceContext,
    ) raises:
        @__parameter
        @always_inline
        def finish[
            width: Int
        ](index: IndexList[5], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
            return dx._fused_compute_output_lambda[element_alignment=width](
                IndexList[4](index[0], index[2], index[3], index[4]), value
            )

        @__parameter
        @always_inline
        def store[width: Int](index: IndexList[5], value: SIMD[dtype, width]):
            dx._lambda_store[width=width, element_alignment=width](
                IndexList[4](index[0], index[2], index[3], index[4]), value
            )

        comptime computes = type_of(dx)._has_compute_fusion
        comptime stores = type_of(dx)._has_output_store_fusion and not computes
        comptime epilogue = Optional[Epilogue[dtype]](
            finish
        ) if computes else None
        comptime epilogue_store = Optional[EpilogueStore[dtype]](
            store
        ) if stores else None
        comptime if is_cpu[target]():
            raise Error("conv_dgrad_fused runs on a GPU only")
        else:
            var problem = _problem(
                _deep(dx.shape()),
                _deep(w.shape()),
                _deep(dy.shape()),
                _values(geometry),
            )
            _run_with_epilogue[
                dtype,
                DGRAD,
                columns,
                phases,
                function,
                epilogue,
                epilogue_store,
            ](
                _pointer(dx.unsafe_ptr()),
                dx.shape(),
                dy,
                w,
                geometry,
                problem,
                ctx,
            )
