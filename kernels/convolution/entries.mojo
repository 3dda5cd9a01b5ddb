"""The convolution family's entries in its libraries: check the operands, then hand pointers to dispatch.

Operands are channels-last and rank 5: x [N, D, H, W, C], w [K, T, R, S, C/G], y [N, O, P, Q, K]. `geometry` is a host
tensor of GEOMETRY_LENGTH int64 values: strides, dilations and left pads (depth, height, width each), groups, the most
bytes of scratch memory that a kernel may use, whether float32 products may run in TF32 (0 or 1), and whether w is
[K, C/G, T, R, S] instead (0 or 1, on a CPU alone). On a CPU fprop and dgrad take two more: the address of a function
that is called for what has been stored, and what that gets (finish.mojo).

Without `grouped` the kernels that only grouped problems need are not compiled.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..library import Arguments, Operand
from .channel_sum import channel_sum_cpu, channel_sum_gpu
from .common import DGRAD, FPROP, WGRAD
from .dispatch import run_cpu, run_gpu
from .finish import NOTHING, Finish
from .problem import GEOMETRY_LENGTH, ConvolutionProblem, checked


@no_inline
def problem_of(
    x: IndexList[5],
    w: IndexList[5],
    y: IndexList[5],
    geometry: IndexList[GEOMETRY_LENGTH],
) raises -> ConvolutionProblem:
    """The problem that the operands' shapes and the geometry describe, checked.
    """
    var groups = geometry[9]
    var taps_inside = geometry[12] != 0
    var taps = 2 if taps_inside else 1
    var group_c = w[1] if taps_inside else w[4]
    if x[0] != y[0]:
        raise Error(t"convolution: x has batch {x[0]}, y has batch {y[0]}")
    if w[0] != y[4]:
        raise Error(
            t"convolution: w has {w[0]} output channels, y has {y[4]} channels"
        )
    if group_c * groups != x[4]:
        raise Error(
            t"convolution: w has {group_c} channels in each of {groups} groups,"
            t" x has {x[4]} channels"
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
            t=w[taps],
            r=w[taps + 1],
            s=w[taps + 2],
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
            taps_inside=taps_inside,
        )
    )


def geometry_of(
    geometry: Operand[DType.int64, 1]
) raises -> IndexList[GEOMETRY_LENGTH]:
    var length = geometry.dim_size(0)
    if length != GEOMETRY_LENGTH and length != GEOMETRY_LENGTH + 2:
        raise Error(
            t"convolution: geometry has {geometry.dim_size(0)} values, not"
            t" {GEOMETRY_LENGTH}"
        )
    var values = IndexList[GEOMETRY_LENGTH]()
    for i in range(GEOMETRY_LENGTH):
        values[i] = Int(geometry[i])
    return values


def finish_of(geometry: Operand[DType.int64, 1]) -> Finish:
    if geometry.dim_size(0) == GEOMETRY_LENGTH:
        return NOTHING
    return Finish(
        Int(geometry[GEOMETRY_LENGTH]), Int(geometry[GEOMETRY_LENGTH + 1]), 0
    )


def _convolve[
    target: StaticString, dtype: DType, pass_: Int, grouped: Bool
](
    result: Operand[dtype, 5],
    a: Operand[dtype, 5],
    b: Operand[dtype, 5],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
    finish: Finish = NOTHING,
) raises:
    comptime if is_cpu[target]():
        run_cpu[dtype, pass_, grouped](
            result.data, a.data, b.data, problem, finish
        )
    else:
        if problem.taps_inside:
            raise Error("convolution: w must be channels last on a GPU")
        run_gpu[dtype, pass_, grouped](
            result.to_device_buffer(ctx),
            a.to_device_buffer(ctx),
            b.to_device_buffer(ctx),
            problem,
            ctx,
        )


def conv_fprop[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The forward pass, y = x * w."""
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var w = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var problem = problem_of(
        x.shape(), w.shape(), y.shape(), geometry_of(geometry)
    )
    _convolve[target, dtype, FPROP, grouped](
        y, x, w, problem, ctx, finish_of(geometry)
    )


def conv_dgrad[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of x; input pixels that no window covers get zero."""
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var w = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    var problem = problem_of(
        dx.shape(), w.shape(), dy.shape(), geometry_of(geometry)
    )
    _convolve[target, dtype, DGRAD, grouped](
        dx, dy, w, problem, ctx, finish_of(geometry)
    )


def conv_wgrad[
    target: StaticString, dtype: DType, grouped: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of w, reduced over N, O, P and Q."""
    var dw = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var geometry = geometry_of(arguments.take[DType.int64, 1]())
    var problem = problem_of(x.shape(), dw.shape(), dy.shape(), geometry)
    _convolve[target, dtype, WGRAD, grouped](dw, x, dy, problem, ctx)


def channel_sum[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of the bias: db[k] = sum of dy[..., k], accumulated in float32 (float64 in float64).
    """
    var db = arguments.take[dtype, 1]()
    var dy = arguments.take[dtype, 5]()
    var k = dy.dim_size(4)
    if db.dim_size(0) != k:
        raise Error(
            t"channel_sum: db has {db.dim_size(0)} elements, dy has {k}"
            t" channels"
        )
    var rows = dy.dim_size(0) * dy.dim_size(1) * dy.dim_size(2) * dy.dim_size(3)
    comptime if is_cpu[target]():
        channel_sum_cpu[dtype](db.data, dy.data, rows, k)
    else:
        channel_sum_gpu[dtype](
            db.to_device_buffer(ctx), dy.to_device_buffer(ctx), rows, k, ctx
        )
