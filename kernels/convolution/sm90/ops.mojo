"""The Hopper kernels as ops that no other kernel stands in for, for measurements and tests.

Their `tuning` is a host tensor of five int64 values, the fields of
`WgradChoice`; fprop and dgrad look at the first, the tile shape's index, alone. A first value of -1 leaves the choice to the
kernels' own table.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ...common.pointer import Ptr
from ..finish import NOTHING
from ..kernel import Tensors
from ..passes import DGRAD, FPROP, ONE_GROUP, WGRAD
from ..problem import GEOMETRY_LENGTH, ConvolutionProblem
from ..operands import problem_of as _problem
from .dispatch import SM90_KERNELS
from .gemm import Gemm, compiles_for, run
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
    comptime if not compiles_for[dtype, pass_]():
        raise Error(t"Hopper convolution: no kernel for {dtype} and this GPU")
    else:
        var tensors = Tensors(result, a, b, NOTHING)
        if not tuning:
            if SM90_KERNELS.launch[dtype, pass_, ONE_GROUP](
                ctx, tensors, problem
            ):
                return
        var reason = Gemm.can_implement[dtype, pass_](tensors, problem)
        if reason or not tuning:
            raise Error(
                t"Hopper convolution: {reason.or_else('others are faster')}"
            )
        run[dtype, pass_](ctx, tensors, problem, tuning)


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
