"""Which kernel runs which problem on Hopper, before gpu/dispatch.mojo is asked."""

from std.sys import size_of

from ..kernel import ConvolutionKernel, ConvolutionTensors, Heuristic, Table
from ..merged_groups import MergedGroups, is_worth_merging, merged
from ..passes import DGRAD, FPROP, ONE_GROUP
from ..problem import ConvolutionProblem
from .aligned import AS_IT_IS, depth_of, recast_of
from .exchanged import can_exchange, exchanged
from .fused_col2im import FusedCol2im
from .gemm import Gemm, compiles_fused, phases_at_most
from .grouped import GroupedGemm
from .plan import STAGE_LENGTH
from .small_product import SmallProduct, is_small_product

comptime _FEW_OF_THREE_AXES = 32
"""Channels on both sides: as they are, 32 of 96x96x96 took 1.5 times as long as in the warpgroup kernels, and recast
half as long."""
comptime _FEW_CHANNELS = 4
"""Of float32, what gpu/gemm_col2im.mojo takes."""
comptime _FEW_IN_BLOCK = 32
comptime _MIN_DEPTH = 12
"""Of float32: with less a stage of one tap is mostly zeros, and the kernels of gpu/ sum over taps and channels
together."""
comptime _FEW_IN_GROUP = 32
"""Channels of a group: with so few most of a stage would be zeros."""
comptime _LEAST_IN_GROUP = 4
"""Of groups that are taken together: with less, products with zeros take longer than other kernels."""
comptime Merged = MergedGroups[GroupedGemm]
comptime MergedToOne = MergedGroups[Gemm]


def _depth[dtype: DType, pass_: Int](p: ConvolutionProblem) -> Int:
    """Channels that a tap is summed over; of fprop and dgrad."""
    var recast = recast_of[dtype, pass_](p)
    if recast.exchanges:
        return depth_of[dtype](exchanged(p), recast)
    return depth_of[dtype](p, recast) if pass_ == FPROP else p.k


struct Sm90Heuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        comptime if Kernel.NAME == SmallProduct.NAME:
            return is_small_product[dtype, pass_](p)
        elif Kernel.NAME == Gemm.NAME:
            comptime if dtype == DType.float32:
                if pass_ == DGRAD and p.c <= _FEW_CHANNELS:
                    return False
                if p.groups == 1 and _depth[dtype, pass_](p) < _MIN_DEPTH:
                    return False
            if not p.is_deep() or max(p.c, p.k) > _FEW_OF_THREE_AXES:
                return True
            return (
                dtype != DType.float32
                and recast_of[dtype, pass_](p) != AS_IT_IS
            )
        elif Kernel.NAME == FusedCol2im.NAME:
            # Without strides the exchanged problem's blocks are faster: 0.6 to 0.9 of the time.
            return max(p.stride_h, p.stride_w) > 1 or p.taps() == 1
        elif Kernel.NAME == GroupedGemm.NAME:
            return min(p.group_c(), p.group_k()) > _FEW_IN_GROUP
        elif Kernel.NAME == Merged.NAME:
            var inner = merged(p)
            return (
                min(p.group_c(), p.group_k()) >= _LEAST_IN_GROUP
                and min(inner.group_c(), inner.group_k()) > _FEW_IN_GROUP
                and is_worth_merging[pass_](p)
            )
        else:
            return True


comptime PRODUCT_KERNELS = Table[
    Sm90Heuristic, FusedCol2im, Gemm, GroupedGemm, Merged, MergedToOne
]
"""Kernels of large products, which may do more than a convolution."""
comptime SM90_KERNELS = Table[
    Sm90Heuristic,
    SmallProduct,
    FusedCol2im,
    Gemm,
    GroupedGemm,
    Merged,
    MergedToOne,
]


def _is_exchanged_with_few(p: ConvolutionProblem) -> Bool:
    """Returns whether a data gradient is a forward pass (exchanged.mojo) of so few channels that nothing its own store
    could take in is worth as much: 16 > 16 channels, 3x3, took 0.3 of the time.
    """
    var stages = 2 if 4 * p.k <= STAGE_LENGTH else 1
    var folds = p.s * p.k <= stages * STAGE_LENGTH and 2 * p.k <= STAGE_LENGTH
    var makes_blocks = p.c < _FEW_IN_BLOCK and p.w % 2 == 0
    return (
        p.s > 1
        and p.dilation_w == 1
        and can_exchange(p)
        and (folds or makes_blocks)
    )


@no_inline
def runs_fused[
    dtype: DType, pass_: Int, max_phases: Int
](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Bool:
    """Returns whether the matrix products with a program in their store, of `max_phases` phases at most, run the
    problem as it is. While a graph is built, `phases_in_store` (torch_max_backend/mojo_ops/fused_convolution.py)
    forecasts it.
    """
    comptime if compiles_fused[dtype, pass_]():
        comptime vector = 16 // size_of[dtype]()
        var result, source = (p.k, p.c) if pass_ == FPROP else (p.c, p.k)
        if result % vector != 0:
            return False
        if p.is_deep() and max(p.c, p.k) <= _FEW_OF_THREE_AXES:
            return False
        comptime if pass_ == DGRAD:
            if source % vector != 0 or phases_at_most(p) > max_phases:
                return False
            if _is_exchanged_with_few(p):
                return False
        return PRODUCT_KERNELS.chooses[Gemm, dtype, pass_, ONE_GROUP](t, p)
    return False
