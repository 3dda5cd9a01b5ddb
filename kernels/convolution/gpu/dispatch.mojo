"""The choice of a kernel for each problem on any GPU. On Hopper the kernels of sm90/dispatch.mojo are asked first."""

from ..analytic import Analytic
from ..kernel import ConvolutionKernel, Heuristic, Table
from ..merged_groups import MergedGroups, is_worth_merging
from ..passes import FPROP
from ..problem import ConvolutionProblem
from .block_gather import BlockGather
from .block_wgrad import BlockWgrad
from .depthwise import PAIR
from .depthwise_band import DepthwiseBand
from .depthwise_band_wgrad import DepthwiseBandWgrad
from .depthwise_launch import DepthwiseMarch
from .gemm_col2im import GemmCol2im
from .tiled import Tiled
from .warpgroup_gather import WarpgroupGather
from .warpgroup_wgrad import WarpgroupWgrad

comptime _FEW_TAPS = 9
"""Windows up to 3x3 lie in registers, and depthwise's marches were faster (measured on an H100); so do some of 5x5."""


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
        elif Kernel.NAME == MergedGroups[WarpgroupGather].NAME:
            # By whatever kernel.
            return is_worth_merging[pass_](p)
        else:
            return True


comptime GPU_KERNELS = Table[
    _GpuHeuristic,
    DepthwiseBand,
    DepthwiseBandWgrad,
    DepthwiseMarch,
    GemmCol2im,
    MergedGroups[WarpgroupGather],
    MergedGroups[WarpgroupWgrad],
    WarpgroupGather,
    WarpgroupWgrad,
    MergedGroups[BlockGather],
    MergedGroups[BlockWgrad],
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
