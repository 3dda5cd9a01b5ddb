"""The choice of a kernel for each problem on any GPU. On Hopper the kernels of sm90/dispatch.mojo are asked first."""

from ..analytic import Analytic
from ..kernel import ConvolutionKernel, Heuristic, Table
from ..merged_groups import MergedGroups
from ..passes import FPROP
from ..problem import ConvolutionProblem
from .block_gather import BlockGather
from .block_wgrad import BlockWgrad
from .depthwise import PAIR
from .depthwise_band import DepthwiseBand
from .depthwise_band_wgrad import DepthwiseBandWgrad
from .depthwise_launch import DepthwiseMarch
from .gemm_col2im import GemmCol2im
from .halo_gather import HaloGather
from .halo_wgrad import HaloWgrad
from .small_groups import SmallGroups
from .tiled import Tiled
from .warpgroup_gather import WarpgroupGather
from .warpgroup_wgrad import WarpgroupWgrad

comptime _FEW_TAPS = 9
"""Windows up to 3x3 lie in registers, and depthwise's marches were faster (measured on an H100); so do some of 5x5."""
comptime _HALO_PIXELS = 256
"""Pixels from which on the loads of the filter pay: with 196 and 49 pixels the other kernels took half to two thirds of
the time."""
comptime _HALO_CHANNELS = 32
"""Channels of a group from which on strides make halos slow: they have up to four times the pixels that are needed, and
took 1.7 times as long as the other kernels."""


def _marches(p: ConvolutionProblem) -> Bool:
    """Returns whether the marches are made for windows of this size: up to 3x3, and 5x5 of pairs of channels.
    """
    return p.r * p.s <= _FEW_TAPS or (
        p.t == 1
        and p.r == 5
        and p.s == 5
        and p.c % PAIR == 0
        and p.stride_h == p.stride_w
        and p.stride_h <= 2
        and max(p.dilation_h, p.dilation_w) == 1
    )


struct _GpuHeuristic(Heuristic):
    """Choices as measured on an H100 and an H200."""

    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        comptime forward = pass_ == FPROP
        comptime if Kernel.NAME == DepthwiseBand.NAME:
            var is_strided = max(p.stride_h, p.stride_w) > 1
            return not _marches(p) and not (forward and is_strided)
        elif Kernel.NAME == DepthwiseBandWgrad.NAME:
            return p.r * p.s > _FEW_TAPS
        elif Kernel.NAME == HaloGather.NAME:
            var most = max(p.group_c(), p.group_k())
            if forward and most >= _HALO_CHANNELS:
                if p.stride_h * p.stride_w > 1:
                    return False
            var pixels = p.p * p.q if forward else p.h * p.w
            return p.n * pixels >= _HALO_PIXELS
        else:
            return True


comptime GPU_KERNELS = Table[
    _GpuHeuristic,
    DepthwiseBand,
    DepthwiseBandWgrad,
    DepthwiseMarch,
    HaloGather,
    HaloWgrad,
    SmallGroups,
    GemmCol2im,
    MergedGroups[WarpgroupWgrad],
    WarpgroupGather,
    WarpgroupWgrad,
    BlockGather,
    BlockWgrad,
    Tiled,
    Analytic["gpu"],
]
comptime DEPTHWISE_KERNELS = Table[
    _GpuHeuristic,
    DepthwiseBand,
    DepthwiseBandWgrad,
    DepthwiseMarch,
    Analytic["gpu"],
]
"""Kernels for one channel in each group, in and out."""
