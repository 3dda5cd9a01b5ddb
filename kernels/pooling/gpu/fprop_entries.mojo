"""The forward passes on a GPU: their kernels in the order of their speed, and their entries in libraries."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import passes
from ..direct import Direct
from ..kernel import Table
from .adaptive_max import SharedWindowsFprop
from .choice import ByAlignment
from .fprop_planes import PlanesFprop
from .fprop_tiles import TilesFprop
from .gather import GatherFprop

comptime ALIGNED_FPROP_KERNELS = Table[
    SharedWindowsFprop, TilesFprop, PlanesFprop, GatherFprop
]
comptime FPROP_KERNELS = ByAlignment[
    ALIGNED_FPROP_KERNELS, Table[Direct[forward=True, target="gpu"]]
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
