"""Weight gradients of groups of a few channels: several groups are one product, of which only the blocks on the
diagonal are kept. A product for each group would leave most of a tile empty.

Drawn problems on an H200 take 0.9 of cuDNN's time (convolution_by_kernel.json).
"""

from std.math import ceildiv

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.arithmetic import divide
from ...common.library import scratch
from ...common.pointer import Ptr, device_pointer
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .pipeline import block_refusal
from .warpgroup_wgrad import WarpgroupWgrad

comptime _THREADS = 256
# Channels of the merged groups: a tile's rows.
comptime _CHANNELS = 64


@__name(t"conv_merged_groups_diagonal_{dtype}")
def _take_diagonal_kernel[
    dtype: DType
](
    dw: Ptr[dtype],
    merged: Ptr[dtype],
    size: Int32,
    taps: Int32,
    group_c: Int32,
    group_k: Int32,
    together: Int32,
):
    """Writes each filter's own channels of merged [K][taps][together * C / G].
    """
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at < size:
        var row, c = divide(at, group_c)
        var k, _ = divide(row, taps)
        var group, _ = divide(k, group_k)
        dw[unsafe_offset=Int(at)] = merged[
            unsafe_offset=Int(row) * Int(together * group_c)
            + Int(group % together * group_c + c)
        ]


def _together(p: ConvolutionProblem) -> Int:
    """Returns how many groups fill a tile."""
    var most = _CHANNELS // max(p.group_c(), p.group_k())
    for count in range(min(most, p.groups), 1, -1):
        if p.groups % count == 0:
            return count
    return 1


def _merged(p: ConvolutionProblem) -> ConvolutionProblem:
    var problem = p
    problem.groups = p.groups // _together(p)
    # The larger gradient is scratch memory too.
    problem.workspace_limit = p.workspace_limit - 4 * problem.w_size()
    return problem


struct MergedGroups(ConvolutionKernel):
    comptime NAME: StaticString = "merged_groups"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return WarpgroupWgrad.compiles[dtype, pass_, grouping]()

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = block_refusal[pass_](p)
        if reason:
            return reason
        if _together(p) == 1:
            return String(
                t"{p.groups} groups of {p.group_c()} and {p.group_k()} channels"
                t" do not fit {_CHANNELS} together"
            )
        var problem = _merged(p)
        if 4 * problem.w_size() > problem.workspace_limit:
            return String("the larger gradient exceeds the workspace limit")
        if problem.w_size() >= 1 << 31:
            return String("more than 2^31 elements of the larger gradient")
        return WarpgroupWgrad.refusal[dtype, pass_](t, problem)

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var problem = _merged(p)
        var merged = scratch[dtype](ctx, problem.w_size())
        var inner = t
        inner.result = device_pointer(merged)
        WarpgroupWgrad.launch[dtype, pass_](ctx, inner, problem)
        ctx.enqueue_function[_take_diagonal_kernel[dtype]](
            t.result,
            merged,
            Int32(p.w_size()),
            Int32(p.taps()),
            Int32(p.group_c()),
            Int32(p.group_k()),
            Int32(_together(p)),
            grid_dim=ceildiv(p.w_size(), _THREADS),
            block_dim=_THREADS,
        )
