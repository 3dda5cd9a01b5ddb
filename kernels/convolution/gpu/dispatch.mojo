"""Which kernel runs which problem on any GPU: one readable table. On Hopper sm90/entries.mojo asks its kernels first.

Each row asks its kernel `can_implement`, which answers None or the reason why not in words; the first None wins, and
the always-right kernel ends the table.
"""

from std.sys import size_of

from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.pointer import Ptr, device_pointer
from ...common.tensor_cores import blocks_compile
from ..analytic import convolution_analytic_gpu
from ..passes import ANY_GROUPS, DGRAD, ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from ..rewrite import rewritten
from .depthwise_dispatch import run_depthwise_gpu
from .few_channels import few_channels_can_implement, few_channels_dgrad_gpu
from .halo_gather import halo_gather_can_implement, halo_gather_gpu
from .halo_wgrad import halo_wgrad_can_implement, halo_wgrad_gpu
from .pipeline import block_can_implement
from .products import gather_product_gpu, wgrad_product_gpu
from .small_groups import small_groups_can_implement, small_groups_gpu
from .tiled import tiled_can_implement, tiled_gather_gpu, tiled_wgrad_gpu


@no_inline
def run_gpu[
    dtype: DType, pass_: Int, grouping: Int = ANY_GROUPS
](
    result: DeviceBuffer[dtype],
    a: DeviceBuffer[dtype],
    b: DeviceBuffer[dtype],
    given: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Enqueues y from (x, w), dx from (dy, w) or dw from (x, dy) on a GPU.

    Kernels that `grouping` does not need are left out; the others take any problem.
    """
    var problem = rewritten[pass_](given)
    var to = device_pointer(result)
    var left = device_pointer(a)
    var right = device_pointer(b)
    # Sums are float32 in these kernels.
    comptime if dtype != DType.float64:
        comptime if grouping == ANY_GROUPS:
            if run_depthwise_gpu[dtype, pass_](result, a, b, problem, ctx):
                return
        comptime if blocks_compile():
            if not block_can_implement[pass_](problem):
                comptime if pass_ == WGRAD:
                    comptime if grouping != ONE_GROUP and size_of[dtype]() == 2:
                        if not halo_wgrad_can_implement[dtype](
                            problem, to, left, right
                        ):
                            halo_wgrad_gpu[dtype](
                                result, left, right, problem, ctx
                            )
                            return
                    wgrad_product_gpu[dtype](result, a, b, problem, ctx)
                else:
                    comptime if grouping != ONE_GROUP and size_of[dtype]() == 2:
                        if not halo_gather_can_implement[dtype, pass_](
                            problem, to, left, right
                        ):
                            halo_gather_gpu[dtype, pass_](
                                to, left, right, problem, ctx
                            )
                            return
                    comptime if grouping != ONE_GROUP:
                        if not small_groups_can_implement[dtype, pass_](
                            problem, to, left
                        ):
                            small_groups_gpu[dtype, pass_](
                                to, left, right, problem, ctx
                            )
                            return
                    comptime if pass_ == DGRAD and dtype == DType.float32:
                        comptime F32 = Ptr[DType.float32]
                        var dy = rebind[F32](left)
                        if not few_channels_can_implement(problem, dy):
                            few_channels_dgrad_gpu(
                                rebind[F32](to),
                                dy,
                                rebind[F32](right),
                                problem,
                                ctx,
                            )
                            return
                    gather_product_gpu[dtype, pass_](
                        to, left, right, problem, ctx
                    )
                return
        if not tiled_can_implement[dtype, pass_](problem):
            comptime if pass_ == WGRAD:
                tiled_wgrad_gpu[dtype](result, a, b, problem, ctx)
            else:
                tiled_gather_gpu[dtype, pass_](result, a, b, problem, ctx)
            return
    convolution_analytic_gpu[dtype, pass_](result, a, b, problem, ctx)
