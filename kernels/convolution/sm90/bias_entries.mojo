"""The entry of a weight gradient that is computed together with the bias gradient."""

from std.math import ceildiv

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.library import Arguments, Call
from ...common.pointer import Ptr
from ..epilogue_callback import NO_EPILOGUE
from ..kernel import ConvolutionTensors
from ..operands import ConvolutionNumbers, problem_of
from ..passes import ONE_GROUP, WGRAD
from ..rewrite import rewritten
from .aligned import recast_of
from .dispatch import PRODUCT_KERNELS
from .gemm import Gemm, compiles_for, run_wgrad

comptime _THREADS = 64


@__name(t"sum_columns_{dtype}")
def _sum_columns_kernel[
    dtype: DType
](result: Ptr[dtype], source: Ptr[dtype], rows: Int64, columns: Int64):
    """Adds up the rows of [rows, columns], a column for each thread."""
    var column = Int64(block_idx.x) * Int64(block_dim.x) + Int64(thread_idx.x)
    if column >= columns:
        return
    var sum = Float32(0)
    for row in range(Int(rows)):
        sum += source[Int(Int64(row) * columns + column)].cast[DType.float32]()
    result.unsafe_store(Int(column), sum.cast[dtype]())


def conv_wgrad_bias[
    target: StaticString, dtype: DType, rest: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The weight gradient, and the bias gradient, the sums of dy over N, O, P and Q.

    What the implicit matrix product does not take, or another kernel is chosen for, goes to the library function
    `rest`, which computes the weight gradient alone; a plain kernel adds dy up.
    """
    var numbers = ConvolutionNumbers.take(arguments)
    var dw = arguments.take[dtype, 5]()
    var db = arguments.take[dtype, 1]()
    var x = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var given = problem_of(x.shape(), dw.shape(), dy.shape(), numbers)
    comptime if compiles_for[dtype, WGRAD]():
        var problem = rewritten[WGRAD](given)
        var tensors = ConvolutionTensors(dw.data, x.data, dy.data, NO_EPILOGUE)
        if PRODUCT_KERNELS.chooses[Gemm, dtype, WGRAD, ONE_GROUP](
            tensors, problem
        ):
            run_wgrad[dtype, True](
                ctx,
                tensors,
                problem,
                recast_of[dtype, WGRAD](problem, may_exchange=False),
                db.data,
            )
            return
    var call = Call()
    numbers.append_to(call)
    call.append_at(Int(dw.data), dw.shape())
    call.append_at(Int(x.data), x.shape())
    call.append_at(Int(dy.data), dy.shape())
    call.run[rest](ctx)
    ctx.enqueue_function[_sum_columns_kernel[dtype]](
        db.data,
        dy.data,
        Int64(given.output_pixels()),
        Int64(given.k),
        grid_dim=(ceildiv(given.k, _THREADS),),
        block_dim=(_THREADS,),
    )
