"""The choice of a kernel for each problem on a CPU."""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from max.gpu.host import DeviceContext

from ...common.amx import has_tiles
from ...common.parallel import worker_count
from ...common.pointer import accumulation_type
from ..analytic import Analytic
from ..kernel import (
    ConvolutionKernel,
    KernelChoice,
    Heuristic,
    Table,
    ConvolutionTensors,
)
from ..passes import FPROP, ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from ..rewrite import is_channels_last_better, rewritten
from .channelwise_passes import Channelwise
from .grouped_wgrad import GroupedWgrad, patch_bytes
from .implicit_gemm import ImplicitGemm
from .joined_taps import JoinedTaps
from .microkernel import PANEL_VECTORS
from .pack import swap_filter
from .panel_gemm import PanelGemm
from .wgrad import WgradGemm

comptime short_tap[dtype: DType]: Int = 24 if has_tiles[dtype] else 8
"""Channels up to which the inner product of a tap is too short."""
comptime FEW_ROWS = 1024
"""Pixels up to which a filter that is packed once for all workers costs more than one that each packs for itself."""
comptime _PATCH_BYTES = 1024 * 1024
"""Most bytes of a patch and dy's copy together that stay in the L2 cache."""


struct _CpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        comptime acc_type = accumulation_type[dtype]
        comptime width = simd_width_of[acc_type]()
        comptime if Kernel.NAME == JoinedTaps.NAME:
            return p.c <= short_tap[dtype]
        elif Kernel.NAME == PanelGemm.NAME:
            var forward = pass_ == FPROP
            var columns = p.group_k() if forward else p.group_c()
            var items = p.groups * ceildiv(columns, PANEL_VECTORS * width)
            var workers = worker_count()
            var pixels = p.output_pixels() if forward else p.input_pixels()
            # Equal shares for the workers, or many.
            return pixels <= FEW_ROWS and (
                items % workers == 0 or items >= 4 * workers
            )
        elif Kernel.NAME == GroupedWgrad.NAME:
            # Whole groups to a worker; tile registers are faster.
            return (
                not has_tiles[dtype]
                and p.groups >= 4 * worker_count()
                and patch_bytes[dtype](p) <= _PATCH_BYTES
            )
        else:
            return True


struct _WithCopiedFilter[Kernels: KernelChoice](KernelChoice):
    """Kernels that run with a copied filter: where windows can be joined if the filter's channels lie inside, the
    filter, or its gradient, is copied into that order."""

    @staticmethod
    def launch[
        dtype: DType, pass_: Int, grouping: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises -> Bool:
        if is_channels_last_better(p):
            return Self._launch_copied[dtype, pass_](ctx, t, p)
        return Self.Kernels.launch[dtype, pass_, grouping](ctx, t, p)

    @staticmethod
    @no_inline
    def _launch_copied[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises -> Bool:
        var copy = unsafe_alloc[Scalar[dtype]](p.w_size(), alignment=64)
        var inner = t
        var problem = p
        problem.taps_inside = False
        problem = rewritten[pass_](problem)
        var is_run: Bool
        comptime if pass_ == WGRAD:
            inner.result = copy
            is_run = Self.Kernels.launch[dtype, pass_, ONE_GROUP](
                ctx, inner, problem
            )
            swap_filter(t.result, copy, p.k, p.taps(), p.c)
        else:
            swap_filter(copy, t.b, p.k, p.c, p.taps())
            inner.b = copy
            is_run = Self.Kernels.launch[dtype, pass_, ONE_GROUP](
                ctx, inner, problem
            )
        copy.unsafe_free()
        return is_run


comptime KERNELS = Table[
    _CpuHeuristic,
    Channelwise[1],
    Channelwise[4],
    Channelwise[8],
    JoinedTaps,
    PanelGemm,
    ImplicitGemm,
    GroupedWgrad,
    WgradGemm,
    Analytic["cpu"],
]
comptime CPU_KERNELS = _WithCopiedFilter[KERNELS]
comptime DEPTHWISE_KERNELS = Table[
    _CpuHeuristic, Channelwise[1], Analytic["cpu"]
]
"""Kernels for one channel in each group, in and out."""
