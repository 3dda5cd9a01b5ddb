"""The gradients on a CPU: their kernels in the order of their speed, and their entries in libraries."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import passes
from ..direct import Direct
from ..kernel import Table
from .channel_vectors import ChannelVectorsDgrad
from .gather_max import GatherMaxDgrad
from .scatter_max import ScatterMaxDgrad
from .separable_avg import GlobalAvg, SeparableAvg

comptime DGRAD_KERNELS = Table[
    GlobalAvg[forward=False],
    GatherMaxDgrad,
    ScatterMaxDgrad,
    ChannelVectorsDgrad,
    SeparableAvg[forward=False],
    Direct[forward=False, target="cpu"],
]


def max_pool_dgrad[
    target: StaticString, dtype: DType, argmax: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose argmax names it.
    """
    passes.max_pool_dgrad[dtype, argmax, adaptive, DGRAD_KERNELS](
        arguments, ctx
    )


def avg_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor.
    """
    passes.avg_pool_dgrad[dtype, DGRAD_KERNELS](arguments, ctx)
