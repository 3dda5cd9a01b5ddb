"""Selection of the kernel that runs a forward pass on a CPU."""

from ..direct import Direct
from ..kernel import NO_ARGMAX, Heuristic, PoolingKernel, Table
from ..problem import PoolingProblem
from .channel_vectors import (
    MAX_SUMMED,
    MIN_CHANNELS,
    ChannelVectorsFprop,
    most_taps,
)
from .separable_avg import GlobalAvg, SeparableAvg
from .separable_max import SeparableMaxFprop

comptime _MAX_IN_ORDER = 1024
"""Addends that are summed one after the other, at most: rows first keep the rounding smaller."""


struct _CpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        comptime if Kernel.NAME == ChannelVectorsFprop.NAME:
            comptime if argmax == NO_ARGMAX:
                var most = (
                    _MAX_IN_ORDER if p.output_plane() == 1 else MAX_SUMMED
                )
                return p.channels >= MIN_CHANNELS and most_taps(p) <= most
        return True


comptime FPROP_KERNELS = Table[
    _CpuHeuristic,
    GlobalAvg[forward=True],
    SeparableMaxFprop,
    ChannelVectorsFprop,
    SeparableAvg[forward=True],
    Direct[forward=True, target="cpu"],
]
