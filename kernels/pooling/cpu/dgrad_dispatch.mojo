"""Selection of the kernel that runs a gradient on a CPU."""

from ...common.vectors import lanes
from ..direct import Direct
from ..kernel import OFFSET, Heuristic, PoolingKernel, Table
from ..problem import PoolingProblem
from .channel_vectors import MAX_SUMMED, MIN_CHANNELS, ChannelVectorsDgrad
from .gather_max import GatherMaxDgrad
from .scatter_max import ScatterMaxDgrad
from .separable_avg import GlobalAvg, SeparableAvg

comptime _MAX_COMPARED = 25
"""Windows above a pixel, at most, for which comparing all their offsets is cheaper than adding each where it points."""
comptime _MAX_COMPARED_INDICES = 9
"""The same limit for indices, eight bytes each."""
comptime _MAX_PIXELS = 8
"""Pixels to a window, at most, for which that is so: of more, most are zeros, which clearing writes faster."""


def _is_gathering_worthwhile[
    dtype: DType, argmax: DType
](p: PoolingProblem) -> Bool:
    # Ends of vectors cost as much as whole ones.
    var channels = Int(p.channels)
    var is_whole = channels % lanes[dtype] == 0
    comptime if argmax == OFFSET:
        is_whole = is_whole or channels >= 4 * lanes[dtype]
    comptime most = _MAX_COMPARED if argmax == OFFSET else _MAX_COMPARED_INDICES
    return (
        is_whole
        and p.input_plane() <= _MAX_PIXELS * p.output_plane()
        and p.most_above() <= most
    )


struct _CpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        comptime if Kernel.NAME == GatherMaxDgrad.NAME:
            return _is_gathering_worthwhile[dtype, argmax](p)
        elif Kernel.NAME == ChannelVectorsDgrad.NAME:
            return p.channels >= MIN_CHANNELS and p.most_above() <= MAX_SUMMED
        else:
            return True


comptime DGRAD_KERNELS = Table[
    _CpuHeuristic,
    GlobalAvg[forward=False],
    GatherMaxDgrad,
    ScatterMaxDgrad,
    ChannelVectorsDgrad,
    SeparableAvg[forward=False],
    Direct[forward=False, target="cpu"],
]
