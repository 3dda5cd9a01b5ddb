"""Launches of the direct depthwise kernels (depthwise.mojo): the march where one is made for a phase's taps, else the
kernel for any taps."""

from std.math import ceildiv
from std.sys.info import size_of

from max.gpu.host import DeviceAttribute, DeviceContext

from ...common.library import scratch
from ...common.pointer import Ptr, device_pointer
from ..passes import ANY_GROUPS, FPROP, WGRAD
from ..gather import PhaseAxis, Phase, forward_phases, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .depthwise import (
    MOST_TAPS_OF_PHASE,
    PAIR,
    RESIDENT_THREADS,
    VECTOR,
    WGRAD_LANES,
    depthwise_filter_kernel,
    depthwise_gather_kernel,
    depthwise_march_kernel,
    depthwise_phases_kernel,
    is_aligned,
    march_rows,
    strip_width,
)
from .depthwise_wgrad import depthwise_wgrad_gpu
from .phase_table import PhaseTable
from .row_queue import THREADS


@always_inline
def _grid(
    p: ConvolutionProblem, phase: Phase, march: Int, width: Int, vector: Int
) -> Int:
    """Returns the number of blocks with one thread for each march of a phase.
    """
    return ceildiv(
        p.n
        * phase.d.rows
        * ceildiv(phase.h.rows, march)
        * ceildiv(phase.w.rows, width)
        * (p.c // vector),
        THREADS,
    )


@always_inline
def _launch_march[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int, step: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    whole: Bool,
    ctx: DeviceContext,
) raises:
    comptime kernel = depthwise_march_kernel[
        dtype, vector, taps_h, taps_w, step
    ]
    comptime width = strip_width[dtype]()
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    var march = march_rows(
        phase.h.rows,
        _grid(p, phase, phase.h.rows, width, vector) * THREADS,
        processors * RESIDENT_THREADS,
    )
    ctx.enqueue_function[kernel](
        result,
        source,
        packed,
        phase,
        Int32(p.n),
        Int32(p.c),
        Int32(march),
        Int32(1 if whole else 0),
        grid_dim=_grid(p, phase, march, width, vector),
        block_dim=THREADS,
    )


@always_inline
def _launch_any[
    dtype: DType, vector: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[depthwise_gather_kernel[dtype, vector]](
        result,
        source,
        packed,
        phase,
        Int32(p.n),
        Int32(p.c),
        grid_dim=_grid(p, phase, 1, strip_width[dtype](), vector),
        block_dim=THREADS,
    )


def _steps_by_one(axis: PhaseAxis) -> Bool:
    """Returns whether neighbouring taps read neighbouring source pixels."""
    return axis.taps == 1 or abs(axis.offset_step) == 1


def _may_march(phase: Phase) -> Bool:
    """Returns whether a march is right for the phase, if one is made for its taps.
    """
    return (
        phase.d.taps == 1
        and _steps_by_one(phase.h)
        and _steps_by_one(phase.w)
        and phase.h.step == phase.w.step
    )


def _takes_whole_filter(p: ConvolutionProblem, phase: Phase) -> Bool:
    """Returns whether the phase's march reads the filter as it lies."""
    return (
        p.t == 1
        and p.r == p.s
        and (p.r == 3 or p.r == 5)
        and phase.taps() == p.r * p.s
        and phase.h.step <= 2
        and _may_march(phase)
    )


@always_inline
def _launch_wide[
    dtype: DType, pass_: Int, vector: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    whole: Bool,
    ctx: DeviceContext,
) raises:
    """Launches the march where one is made for the phase's taps, else the kernel for any taps.
    """
    var h = phase.h
    var w = phase.w
    if _may_march(phase):
        comptime for step in [1, 2]:
            comptime if pass_ == FPROP or step == 1:
                if h.step == step and h.taps == 3 and w.taps == 3:
                    _launch_march[dtype, vector, 3, 3, step](
                        result, source, packed, p, phase, whole, ctx
                    )
                    return
                if h.step == step and h.taps == 5 and w.taps == 5:
                    _launch_march[dtype, PAIR, 5, 5, step](
                        result, source, packed, p, phase, whole, ctx
                    )
                    return
        comptime if vector == VECTOR:
            if h.step == 1 and h.taps == 1 and w.taps == 1:
                _launch_march[dtype, vector, 1, 1, 1](
                    result, source, packed, p, phase, False, ctx
                )
                return
    _launch_any[dtype, vector](result, source, packed, p, phase, ctx)


def _fewest_taps(p: ConvolutionProblem, phases: List[Phase]) -> Int:
    """Returns the number for which one launch computes all phases of a strided gradient: each has as many taps, or one
    more, along H and W. 0 where no march is made for them.
    """
    if p.t > 1 or p.stride_d > 1 or len(phases) == 1 or not PhaseTable.takes(p):
        return 0
    var fewest = MOST_TAPS_OF_PHASE
    var most = 0
    for phase in phases:
        if not _may_march(phase):
            return 0
        fewest = min(fewest, phase.h.taps, phase.w.taps)
        most = max(most, phase.h.taps, phase.w.taps)
    return fewest if most <= min(fewest + 1, MOST_TAPS_OF_PHASE) else 0


@always_inline
def _launch_phases[
    dtype: DType, fewest: Int
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var phases = PhaseTable.of(p)
    comptime width = strip_width[dtype]()
    # Residue 0 has the most pixels.
    var widest = phases.first()
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    var march = march_rows(
        widest.h.rows,
        phases.count()
        * _grid(p, widest, widest.h.rows, width, VECTOR)
        * THREADS,
        processors * RESIDENT_THREADS,
    )
    ctx.enqueue_function[depthwise_phases_kernel[dtype, VECTOR, fewest]](
        dx,
        dy,
        w,
        phases,
        Int32(p.n),
        Int32(p.c),
        Int32(march),
        Int32(p.r),
        Int32(p.s),
        grid_dim=phases.count() * _grid(p, widest, march, width, VECTOR),
        block_dim=THREADS,
    )


@no_inline
def depthwise_gather_gpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Computes the forward pass (source x, result y) or the data gradient (source dy, result dx).
    """
    comptime pair_bytes = PAIR * size_of[dtype]()
    var aligned = is_aligned(result) and is_aligned(source)
    var wide = aligned and p.c % VECTOR == 0
    var in_pairs = (
        p.c % PAIR == 0 and (Int(result) | Int(source)) % pair_bytes == 0
    )
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, p.c)
        if wide:
            var fewest = _fewest_taps(p, phases)
            comptime for taps in range(1, MOST_TAPS_OF_PHASE):
                if fewest == taps:
                    _launch_phases[dtype, taps](result, source, w, p, ctx)
                    return
    var memory = scratch[dtype](ctx, max(1, p.taps() * p.c))
    var packed = device_pointer(memory)
    for phase in phases:
        if phase.rows(p.n) == 0:
            continue
        var whole = in_pairs and is_aligned(w) and _takes_whole_filter(p, phase)
        if phase.taps() > 0 and not whole:
            ctx.enqueue_function[depthwise_filter_kernel[dtype]](
                packed,
                w,
                p,
                phase,
                grid_dim=ceildiv(phase.taps() * p.c, THREADS),
                block_dim=THREADS,
            )
        if wide:
            _launch_wide[dtype, pass_, VECTOR](
                result, source, w if whole else packed, p, phase, whole, ctx
            )
        elif in_pairs:
            _launch_wide[dtype, pass_, PAIR](
                result, source, w if whole else packed, p, phase, whole, ctx
            )
        else:
            _launch_any[dtype, 1](result, source, packed, p, phase, ctx)
    # Lives until its last use is enqueued.
    _ = memory^


struct DepthwiseMarch(ConvolutionKernel):
    comptime NAME: StaticString = "depthwise_march"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return grouping == ANY_GROUPS and dtype != DType.float64

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if p.groups != p.c or p.groups != p.k:
            return String(
                t"C = {p.c}, K = {p.k} and groups = {p.groups} differ"
            )
        if 4 * p.w_size() > p.workspace_limit:
            return String(
                t"the filter takes {4 * p.w_size()} bytes, the workspace limit"
                t" is {p.workspace_limit}"
            )
        if p.c > WGRAD_LANES * 65535:
            return String(
                t"C = {p.c}; the grid takes at most {WGRAD_LANES * 65535}"
            )
        # Threads, pixels and strips are counted in 32 bits.
        if max(p.x_size(), p.y_size()) >= 1 << 32:
            return String(
                t"{max(p.x_size(), p.y_size())} elements are too many"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if pass_ == WGRAD:
            depthwise_wgrad_gpu[dtype](t.result, t.a, t.b, p, ctx)
        else:
            depthwise_gather_gpu[dtype, pass_](t.result, t.a, t.b, p, ctx)
