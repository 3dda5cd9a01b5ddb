"""Selection of the kernel that runs a gradient on a GPU.

Most of the compiler's work is for windows that may reach over several slabs of D: `DEEP_DGRAD_KERNELS` take those too.
"""

from std.sys import size_of

from ..direct import Direct
from ..kernel import INDEX, NO_ARGMAX, Heuristic, PoolingKernel, Table
from ..problem import PoolingProblem
from .adaptive_max import ByWindowsDgrad
from .choice import ByAlignment
from .disjoint import DisjointChannels, DisjointPlanes
from .gather import GatherDgrad
from .halo_exchange import HaloExchange
from .params import channel_vector
from .prefetch_scatter import PrefetchScatter
from .ring_scatter import RingScatter
from .sliding_sums import SlidingSums

comptime _FEW_PIXELS = 64
"""Pixels of the largest planes whose maxima of disjoint windows prefetched pieces add up faster."""
comptime _MAX_ROWS = 4
"""Rows, at most, of channels-last averages' disjoint windows: longer ones leave few threads."""


struct _GpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        comptime if Kernel.NAME == ByWindowsDgrad.NAME:
            # A vector of channels costs a gather little more than one element.
            var fewer = 4 if channel_vector[dtype](p) == 1 else 16
            return fewer * p.output_plane() <= p.input_plane()
        elif Kernel.NAME == HaloExchange[False].NAME:
            # Where windows move by one, less padding than the shape's costs a tile.
            return p.channels == 1 or p.w.stride != 1 or p.w.padding != 0
        elif Kernel.NAME == DisjointPlanes.NAME and argmax != NO_ARGMAX:
            if (
                not p.is_line()
                and Int(p.h.input) * Int(p.w.input) <= _FEW_PIXELS
            ):
                return False
            comptime V = 16 // size_of[dtype]()
            comptime if argmax == INDEX and size_of[dtype]() >= 4:
                # Short rows are faster in prefetched pieces.
                return Int(p.w.input) % V == 0
        elif Kernel.NAME == DisjointChannels.NAME and argmax == NO_ARGMAX:
            return p.channels == 1 or Int(p.h.stride) <= _MAX_ROWS
        return True


comptime ALIGNED_KERNELS[deep: Bool] = Table[
    _GpuHeuristic,
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
comptime DGRAD_KERNELS = ByAlignment[
    ALIGNED_KERNELS[False], Direct[forward=False, target="gpu"]
]
comptime DEEP_DGRAD_KERNELS = ByAlignment[
    ALIGNED_KERNELS[True], Direct[forward=False, target="gpu"]
]
