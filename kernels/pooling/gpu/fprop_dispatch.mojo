"""Selection of the kernel that runs a forward pass on a GPU."""

from ..direct import Direct
from ..kernel import Heuristic, PoolingKernel, Table
from ..problem import PoolingProblem
from .adaptive_max import SharedWindowsFprop, lanes_of_window
from .choice import ByAlignment
from .fprop_planes import PlanesFprop
from .fprop_tiles import TilesFprop
from .gather import GatherFprop

comptime _MIN_LANES = 4
"""Threads to a window: with fewer the kernel that gathers is as fast."""


struct _GpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        comptime if Kernel.NAME == SharedWindowsFprop.NAME:
            return lanes_of_window[dtype](p) >= _MIN_LANES
        else:
            return True


comptime ALIGNED_KERNELS = Table[
    _GpuHeuristic, SharedWindowsFprop, TilesFprop, PlanesFprop, GatherFprop
]
comptime FPROP_KERNELS = ByAlignment[
    ALIGNED_KERNELS, Direct[forward=True, target="gpu"]
]
