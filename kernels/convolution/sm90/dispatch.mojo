"""Which kernel runs which problem on Hopper, before gpu/dispatch.mojo is asked."""

from ..kernel import ConvolutionKernel, ConvolutionTensors, Heuristic, Table
from ..passes import DGRAD, FPROP, ONE_GROUP
from ..problem import ConvolutionProblem
from .aligned import needs_alignment, aligned_problem
from .fused_col2im import FusedCol2im
from .gemm import Gemm, compiles_fused
from .grouped import GroupedGemm

comptime _FEW_OF_THREE_AXES = 32
"""Channels on both sides: 32 of 96x96x96 took 1.5 times as long as in the warpgroup kernels."""
comptime _FEW_CHANNELS = 4
"""Of float32, what gpu/gemm_col2im.mojo takes."""
comptime _MIN_DEPTH = 12
"""Of float32: with less a stage of one tap is mostly zeros, and the kernels of gpu/ sum over taps and channels together."""
comptime _FEW_IN_GROUP = 32
"""Channels of a group: with so few most of a stage would be zeros (gpu/halo_gather.mojo)."""


def _depth[dtype: DType, pass_: Int](p: ConvolutionProblem) -> Int:
    """Channels that a tap is summed over."""
    var aligned = aligned_problem[dtype, pass_](p).problem if needs_alignment[
        dtype
    ](p) else p
    return aligned.c if pass_ == FPROP else aligned.k


struct Sm90Heuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        comptime if Kernel.NAME == Gemm.NAME:
            comptime if dtype == DType.float32:
                if pass_ == DGRAD and p.c <= _FEW_CHANNELS:
                    return False
                if p.groups == 1 and _depth[dtype, pass_](p) < _MIN_DEPTH:
                    return False
            return not p.is_deep() or max(p.c, p.k) > _FEW_OF_THREE_AXES
        elif Kernel.NAME == GroupedGemm.NAME:
            return min(p.group_c(), p.group_k()) > _FEW_IN_GROUP
        else:
            return True


comptime SM90_KERNELS = Table[Sm90Heuristic, FusedCol2im, Gemm, GroupedGemm]


@no_inline
def runs_fused[
    dtype: DType, pass_: Int, max_phases: Int
](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Bool:
    """Returns whether the matrix products with a program in their store, of `max_phases` phases at most, run the
    problem as it is. While a graph is built, `phases_in_store` (torch_max_backend/mojo_ops/fused_convolution.py) forecasts it.
    """
    comptime if compiles_fused[dtype, pass_]():
        return (
            not p.is_deep()
            and (pass_ == FPROP or p.stride_h * p.stride_w <= max_phases)
            and SM90_KERNELS.chooses[Gemm, dtype, pass_, ONE_GROUP](t, p)
            and not needs_alignment[dtype](p)
        )
    return False
