"""The gradients on a GPU: their kernels in the order of their speed, and their entries in libraries.

`deep` where windows may reach over several slabs of D: most of the compiler's work is for those alone.
"""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import passes
from ..direct import Direct
from ..kernel import Table
from .adaptive_max import ByWindowsDgrad
from .choice import ByAlignment
from .disjoint import DisjointChannels, DisjointPlanes
from .gather import GatherDgrad
from .halo_exchange import HaloExchange
from .prefetch_scatter import PrefetchScatter
from .ring_scatter import RingScatter
from .sliding_sums import SlidingSums

comptime ALIGNED_DGRAD_KERNELS[deep: Bool] = Table[
    ByWindowsDgrad,
    HaloExchange[deep],
    SlidingSums,
    DisjointPlanes,
    DisjointChannels,
    PrefetchScatter,
    RingScatter,
    GatherDgrad,
    Direct[forward=False, target="gpu"],
]
comptime DGRAD_KERNELS[deep: Bool] = ByAlignment[
    ALIGNED_DGRAD_KERNELS[deep], Table[Direct[forward=False, target="gpu"]]
]


def max_pool_dgrad[
    target: StaticString,
    dtype: DType,
    argmax: DType,
    adaptive: Bool,
    deep: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it whose argmax names it.
    """
    passes.max_pool_dgrad[dtype, argmax, adaptive, DGRAD_KERNELS[deep]](
        arguments, ctx
    )


def avg_pool_dgrad[
    target: StaticString, dtype: DType, deep: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor.
    """
    passes.avg_pool_dgrad[dtype, DGRAD_KERNELS[deep]](arguments, ctx)
