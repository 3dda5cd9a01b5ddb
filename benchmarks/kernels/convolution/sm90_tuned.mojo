"""Hopper's matrix products with no kernel behind them, and with a given tile: for measurements and tests.

Behind its other operands a call has the five fields of `WgradChoice`; fprop and dgrad look at the first, the tile shape's
index, alone. Then come the fields of `Recast`, a block of 0 for the table's. A first number of -1 leaves all to the table,
of -2 the tile shape.
"""

from kernels.common.library import Arguments
from kernels.convolution.epilogue_callback import NO_EPILOGUE
from kernels.convolution.kernel import ConvolutionTensors
from kernels.convolution.operands import ConvolutionOperands
from kernels.convolution.passes import DGRAD, FPROP, ONE_GROUP, WGRAD
from kernels.convolution.problem import ConvolutionProblem
from kernels.convolution.sm90.aligned import Recast, recast_of
from kernels.convolution.sm90.dispatch import SM90_KERNELS
from kernels.convolution.sm90.gemm import compiles_for, gemm_refusal
from kernels.convolution.sm90.gemm import run, run_wgrad
from kernels.convolution.sm90.wgrad_plan import WgradChoice
from max.gpu.host import DeviceContext
from std.utils.index import IndexList


def _choice(words: IndexList[5]) -> Optional[WgradChoice]:
    if words[0] < 0:
        return None
    return WgradChoice(
        shape=words[0],
        splits=words[1],
        cluster=words[2],
        share_rows=words[3],
        share_columns=words[4],
    )


def _recast[
    dtype: DType, pass_: Int
](
    problem: ConvolutionProblem, ways: IndexList[3], may_exchange: Bool = True
) -> Recast:
    if ways[0] > 0:
        return Recast(ways[0], ways[1] == 1, ways[2] == 1)
    return recast_of[dtype, pass_](problem, may_exchange)


def conv_tuned[
    target: StaticString, dtype: DType, pass_: Int
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The pass of that number in passes.mojo."""
    var given = ConvolutionOperands[dtype, pass_](arguments)
    var words = arguments.take_words[5]()
    var ways = arguments.take_words[3]()
    comptime if not compiles_for[dtype, pass_]():
        raise Error(t"Hopper convolution: no kernel for {dtype} and this GPU")
    else:
        var problem = given.problem
        var tensors = ConvolutionTensors(
            given.result.data, given.a.data, given.b.data, NO_EPILOGUE
        )
        var tuning = _choice(words)
        if words[0] == -1 and SM90_KERNELS.launch[dtype, pass_, ONE_GROUP](
            ctx, tensors, problem
        ):
            return
        var recast = _recast[dtype, pass_](problem, ways)
        var reason = gemm_refusal[dtype, pass_](problem, recast)
        if reason:
            raise Error(t"Hopper convolution: {reason.value()}")
        run[dtype, pass_](ctx, tensors, problem, recast, tuning)


def conv_tuned_bias[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The weight gradient with the bias gradient, which lies behind it in memory.
    """
    var given = ConvolutionOperands[dtype, WGRAD](arguments)
    var tuning = _choice(arguments.take_words[5]())
    var ways = arguments.take_words[3]()
    comptime if not compiles_for[dtype, WGRAD]():
        raise Error(t"Hopper convolution: no kernel for {dtype} and this GPU")
    else:
        var dw = given.result.data
        var tensors = ConvolutionTensors(
            dw, given.a.data, given.b.data, NO_EPILOGUE
        )
        run_wgrad[dtype, True](
            ctx,
            tensors,
            given.problem,
            _recast[dtype, WGRAD](given.problem, ways, False),
            dw.unsafe_offset(given.problem.w_size()),
            tuning,
        )
