"""The forward passes on a CPU: their kernels in the order of their speed, and their entries in libraries."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import passes
from ..direct import Direct
from ..kernel import Table
from .channel_vectors import ChannelVectorsFprop
from .separable_avg import GlobalAvg, SeparableAvg
from .separable_max import SeparableMaxFprop

comptime FPROP_KERNELS = Table[
    GlobalAvg[forward=True],
    SeparableMaxFprop,
    ChannelVectorsFprop,
    SeparableAvg[forward=True],
    Direct[forward=True, target="cpu"],
]


def max_pool_fprop[
    target: StaticString, dtype: DType, argmax: DType, adaptive: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y, argmaxes = the maxima of x and where they are."""
    passes.max_pool_fprop[dtype, argmax, adaptive, FPROP_KERNELS](
        arguments, ctx
    )


def avg_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the averages of x."""
    passes.avg_pool_fprop[dtype, FPROP_KERNELS](arguments, ctx)
