"""Which of the tiled products runs on an NVIDIA GPU: Hopper's warpgroups where they take the problem, else blocks of warps.
"""

from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.pointer import Ptr
from ...common.ptx import compiling_for_hopper
from ..problem import ConvolutionProblem
from .block_gather import block_gather_gpu
from .block_wgrad import block_wgrad_gpu
from .merged_groups import merged_groups_can_implement, merged_groups_wgrad_gpu
from .warpgroup_gather import (
    warpgroup_gather_can_implement,
    warpgroup_gather_gpu,
)
from .warpgroup_wgrad import warpgroup_wgrad_can_implement, warpgroup_wgrad_gpu


@no_inline
def gather_product_gpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """The forward pass or the data gradient of a problem that block_can_implement takes.
    """
    comptime if compiling_for_hopper():
        if not warpgroup_gather_can_implement[dtype, pass_](g, source, w):
            warpgroup_gather_gpu[dtype, pass_](result, source, w, g, ctx)
            return
    block_gather_gpu[dtype, pass_](result, source, w, g, ctx)


@no_inline
def wgrad_product_gpu[
    dtype: DType
](
    dw: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    dy: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """The weight gradient of a problem that block_can_implement takes."""
    comptime if compiling_for_hopper():
        var x_at = Ptr[dtype](unsafe_from_address=Int(x.unsafe_ptr()))
        var dy_at = Ptr[dtype](unsafe_from_address=Int(dy.unsafe_ptr()))
        if not merged_groups_can_implement[dtype](g, x_at, dy_at):
            merged_groups_wgrad_gpu[dtype](dw, x, dy, g, ctx)
            return
        if not warpgroup_wgrad_can_implement[dtype](g, x_at, dy_at):
            warpgroup_wgrad_gpu[dtype](dw, x, dy, g, ctx)
            return
    block_wgrad_gpu[dtype](dw, x, dy, g, ctx)
