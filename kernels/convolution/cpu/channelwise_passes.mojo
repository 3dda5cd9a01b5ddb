"""The channelwise kernels of all passes, for groups of one number of channels, in and out."""

from std.sys.info import simd_width_of, size_of

from max.gpu.host import DeviceContext

from ...common.parallel import worker_count
from ...common.pointer import accumulation_type
from ..epilogue_callback import run_epilogue
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import ANY_GROUPS, ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from .channelwise import channelwise_cpu
from .channelwise_wgrad import channelwise_wgrad_cpu


struct Channelwise[group: Int](ConvolutionKernel):
    comptime NAME: StaticString = "channelwise"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        # A vector holds whole groups: of float64 it may be shorter than one.
        comptime width = simd_width_of[accumulation_type[dtype]]()
        comptime if Self.group > width:
            return False
        return (
            grouping == ANY_GROUPS if Self.group == 1 else grouping != ONE_GROUP
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime acc_type = accumulation_type[dtype]
        if p.c != p.k or p.groups * Self.group != p.c:
            return String(
                t"C = {p.c} and K = {p.k} are not {Self.group} in each of"
                t" {p.groups} groups"
            )
        comptime width = simd_width_of[acc_type]()
        if Self.group > 1 and p.c % width != 0:
            return String(t"C = {p.c} is not a multiple of {width}")
        var bytes = worker_count() * p.w_size() * size_of[acc_type]()
        if bytes > p.workspace_limit:
            return String(
                t"partial sums take {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if pass_ == WGRAD:
            channelwise_wgrad_cpu[dtype, Self.group](t.result, t.a, t.b, p)
        else:
            channelwise_cpu[dtype, pass_, Self.group](t.result, t.a, t.b, p)
            run_epilogue[pass_](p, t.epilogue)
