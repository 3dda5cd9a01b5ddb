"""Weight gradients of groups of a few channels, several groups at a time: the blocks on the diagonal of a larger gradient are
theirs, the rest is dropped.
"""

from std.math import ceildiv

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.arithmetic import divide
from ...common.library import scratch
from ...common.pointer import Ptr
from ..problem import ConvolutionProblem
from .warpgroup_wgrad import warpgroup_wgrad_can_implement, warpgroup_wgrad_gpu

comptime _THREADS = 256
# Channels of the merged groups: a tile's rows.
comptime _CHANNELS = 64


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
    """Of merged [K][taps][together * C / G]: each filter's own channels."""
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at < size:
        var row, c = divide(at, group_c)
        var k, _ = divide(row, taps)
        var group, _ = divide(k, group_k)
        dw[unsafe_offset=Int(at)] = merged[
            unsafe_offset=Int(row) * Int(together * group_c)
            + Int(group % together * group_c + c)
        ]


def _together(g: ConvolutionProblem) -> Int:
    """How many groups fill a tile."""
    var most = _CHANNELS // max(g.group_c(), g.group_k())
    for count in range(min(most, g.groups), 1, -1):
        if g.groups % count == 0:
            return count
    return 1


def _merged(g: ConvolutionProblem) -> ConvolutionProblem:
    var problem = g
    problem.groups = g.groups // _together(g)
    # The larger gradient is scratch memory too.
    problem.workspace_limit = g.workspace_limit - 4 * problem.w_size()
    return problem


def merged_groups_can_implement[
    dtype: DType
](g: ConvolutionProblem, x: Ptr[dtype], dy: Ptr[dtype]) -> Optional[String]:
    """None, or why not, of a problem that block_can_implement takes."""
    if _together(g) == 1:
        return String(
            t"{g.groups} groups of {g.group_c()} and {g.group_k()} channels do"
            t" not fit {_CHANNELS} together"
        )
    var problem = _merged(g)
    if 4 * problem.w_size() > problem.workspace_limit:
        return String("the larger gradient exceeds the workspace limit")
    if problem.w_size() >= 1 << 31:
        return String("more than 2^31 elements of the larger gradient")
    return warpgroup_wgrad_can_implement[dtype](problem, x, dy)


@no_inline
def merged_groups_wgrad_gpu[
    dtype: DType
](
    dw: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    dy: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """The weight gradient."""
    var problem = _merged(g)
    var merged = scratch[dtype](ctx, problem.w_size())
    warpgroup_wgrad_gpu[dtype](merged, x, dy, problem, ctx)
    ctx.enqueue_function[_take_diagonal_kernel[dtype]](
        dw,
        merged,
        Int32(g.w_size()),
        Int32(g.taps()),
        Int32(g.group_c()),
        Int32(g.group_k()),
        Int32(_together(g)),
        grid_dim=ceildiv(g.w_size(), _THREADS),
        block_dim=_THREADS,
    )
