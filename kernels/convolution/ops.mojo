"""Registrations of the convolution family: check the operands, then hand raw pointers to dispatch.

Operands are channels-last and rank 5: x [N, D, H, W, C], w [K, T, R, S, C/G], y [N, O, P, Q, K]. `geometry` is a host
tensor of GEOMETRY_LENGTH int64 values: strides, dilations and left pads (depth, height, width each), groups, the most
bytes of scratch memory that a kernel may use, and whether float32 products may run in TF32 (0 or 1).

With `grouped` false the kernels that only grouped problems need are not compiled: MAX compiles an op's code anew for
every shape it meets.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from .channel_sum import channel_sum_cpu, channel_sum_gpu
from .common import DGRAD, FPROP, WGRAD, Ptr
from .dispatch import run_cpu, run_gpu
from .problem import GEOMETRY_LENGTH, ConvolutionProblem, checked


@no_inline
def _problem(
    x: IndexList[5],
    w: IndexList[5],
    y: IndexList[5],
    geometry: IndexList[GEOMETRY_LENGTH],
) raises -> ConvolutionProblem:
    """The problem that the operands' shapes and the geometry describe, checked.
    """
    var groups = geometry[9]
    if x[0] != y[0]:
        raise Error(t"convolution: x has batch {x[0]}, y has batch {y[0]}")
    if w[0] != y[4]:
        raise Error(
            t"convolution: w has {w[0]} output channels, y has {y[4]} channels"
        )
    if w[4] * groups != x[4]:
        raise Error(
            t"convolution: w has {w[4]} channels in each of {groups} groups, x"
            t" has {x[4]} channels"
        )
    return checked(
        ConvolutionProblem(
            n=x[0],
            c=x[4],
            k=w[0],
            groups=groups,
            d=x[1],
            h=x[2],
            w=x[3],
            t=w[1],
            r=w[2],
            s=w[3],
            o=y[1],
            p=y[2],
            q=y[3],
            stride_d=geometry[0],
            stride_h=geometry[1],
            stride_w=geometry[2],
            dilation_d=geometry[3],
            dilation_h=geometry[4],
            dilation_w=geometry[5],
            pad_d=geometry[6],
            pad_h=geometry[7],
            pad_w=geometry[8],
            workspace_limit=geometry[10],
            allow_tf32=geometry[11] != 0,
        )
    )


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


@extensibility.register("conv_fprop")
struct ConvFprop:
    """The forward pass, y = x * w."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, grouped: Bool
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var problem = _problem(
            x.shape(), w.shape(), y.shape(), _values(geometry)
        )
        comptime if is_cpu[target]():
            run_cpu[dtype, FPROP, grouped](
                _pointer(y.unsafe_ptr()),
                _pointer(x.unsafe_ptr()),
                _pointer(w.unsafe_ptr()),
                problem,
            )
        else:
            run_gpu[dtype, FPROP, grouped](
                y.to_device_buffer(ctx),
                x.to_device_buffer(ctx),
                w.to_device_buffer(ctx),
                problem,
                ctx,
            )


@extensibility.register("conv_dgrad")
struct ConvDgrad:
    """Gradient of x; input pixels that no window covers get zero."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, grouped: Bool
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var problem = _problem(
            dx.shape(), w.shape(), dy.shape(), _values(geometry)
        )
        comptime if is_cpu[target]():
            run_cpu[dtype, DGRAD, grouped](
                _pointer(dx.unsafe_ptr()),
                _pointer(dy.unsafe_ptr()),
                _pointer(w.unsafe_ptr()),
                problem,
            )
        else:
            run_gpu[dtype, DGRAD, grouped](
                dx.to_device_buffer(ctx),
                dy.to_device_buffer(ctx),
                w.to_device_buffer(ctx),
                problem,
                ctx,
            )


@extensibility.register("conv_wgrad")
struct ConvWgrad:
    """Gradient of w, reduced over N, O, P and Q."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, grouped: Bool
    ](
        dw: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var problem = _problem(
            x.shape(), dw.shape(), dy.shape(), _values(geometry)
        )
        comptime if is_cpu[target]():
            run_cpu[dtype, WGRAD, grouped](
                _pointer(dw.unsafe_ptr()),
                _pointer(x.unsafe_ptr()),
                _pointer(dy.unsafe_ptr()),
                problem,
            )
        else:
            run_gpu[dtype, WGRAD, grouped](
                dw.to_device_buffer(ctx),
                x.to_device_buffer(ctx),
                dy.to_device_buffer(ctx),
                problem,
                ctx,
            )


@extensibility.register("channel_sum")
struct ChannelSum:
    """Gradient of the bias: db[k] = sum of dy[..., k], accumulated in float32 (float64 in float64).
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        db: OutputTensor[dtype=dtype, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var k = dy.dim_size(4)
        if db.dim_size(0) != k:
            raise Error(
                t"channel_sum: db has {db.dim_size(0)} elements, dy has"
                t" {k} channels"
            )
        var rows = (
            dy.dim_size(0) * dy.dim_size(1) * dy.dim_size(2) * dy.dim_size(3)
        )
        comptime if is_cpu[target]():
            channel_sum_cpu[dtype](
                _pointer(db.unsafe_ptr()), _pointer(dy.unsafe_ptr()), rows, k
            )
        else:
            channel_sum_gpu[dtype](
                db.to_device_buffer(ctx),
                dy.to_device_buffer(ctx),
                rows,
                k,
                ctx,
            )
