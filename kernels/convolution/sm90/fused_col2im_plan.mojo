"""The plan of fused_col2im.mojo: how windows of dy lie over dx, and why a problem has none."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv

from ..problem import ConvolutionProblem
from .plan import (
    STAGE_LENGTH,
    Im2colAxis,
    Im2colPhase,
    Im2colPlan,
    dgrad_axis,
    fprop_axis,
)

comptime MAX_CHANNELS = 4
"""A tap's channels are one 16-byte vector of float32."""
comptime WINDOW_PHASES = 4
"""Of a data gradient: strides up to two along both axes."""
comptime COLUMNS = 64
"""Of z: a (tap, channel) each."""
comptime _MAX_TAPS = COLUMNS // MAX_CHANNELS
comptime WINDOW_H = 8
"""Rows of dy of a window."""
comptime WINDOW_W = 16
comptime PIXELS = WINDOW_H * WINDOW_W
"""Of a window: the rows of wgmma's two tiles."""
comptime FILTER_BYTES = COLUMNS * STAGE_LENGTH * 2
comptime STAGE_BYTES = PIXELS * STAGE_LENGTH * 2
comptime RING_BYTES = 112 * 1024
"""What z leaves of shared memory: filter tiles and pipeline stages fill it."""
comptime MAX_STAGES = 6
comptime _MIN_STAGES = 3


@fieldwise_init
struct Window(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """How windows of dy lie over the result, in pixels of a phase."""

    var phases: Int32
    var k: Int32
    var stages: Int32
    var tiles_h: Int32
    var inner_h: Int32
    """Result pixels of one phase that a window serves."""
    var inner_w: Int32
    var lower_h: Int32
    """First dy pixel of the window of result pixel 0."""
    var lower_w: Int32

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "FusedCol2imWindow"


@fieldwise_init
struct _Side(Movable):
    """One spatial axis: its phases, and the dy pixels that all of them reach together.
    """

    var axes: List[Im2colAxis]
    var lower: Int
    var span: Int
    """Pixels of the rim."""
    var taps: Int
    """The most that one phase has."""

    @staticmethod
    def of(
        size: Int,
        filter: Int,
        result: Int,
        stride: Int,
        dilation: Int,
        pad: Int,
    ) -> Self:
        var axes = List[Im2colAxis]()
        var lower = Int.MAX
        var upper = Int.MIN
        var taps = 0
        for phase in range(stride):
            var axis = dgrad_axis(
                size, filter, result, stride, dilation, pad, phase
            )
            if axis.taps > 0:
                lower = min(lower, axis.lower)
                upper = max(upper, axis.lower + axis.offset)
                taps = max(taps, axis.taps)
            axes.append(axis)
        return Self(axes^, lower, upper - lower, taps)


def _rows(p: ConvolutionProblem) -> _Side:
    return _Side.of(p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h)


def _columns_of(p: ConvolutionProblem) -> _Side:
    return _Side.of(p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w)


def _stages(p: ConvolutionProblem) -> Int:
    """Of the ring, beside the filter."""
    var filter_tiles = p.stride_h * p.stride_w * ceildiv(p.k, STAGE_LENGTH)
    return (RING_BYTES - filter_tiles * FILTER_BYTES) // STAGE_BYTES


def plan_of(p: ConvolutionProblem) -> Tuple[Im2colPlan[WINDOW_PHASES], Window]:
    """The launch's plan, for problems that `reason_against` has nothing against.
    """
    var h = _rows(p)
    var w = _columns_of(p)
    var inner_h = WINDOW_H - h.span
    var inner_w = WINDOW_W - w.span
    # Phases differ by one pixel at most; the first has the most.
    var tiles_h = ceildiv(ceildiv(p.h, p.stride_h), inner_h)
    var tiles_w = ceildiv(ceildiv(p.w, p.stride_w), inner_w)
    var plan = Im2colPlan[WINDOW_PHASES]()
    var d = fprop_axis(p.d, p.t, p.o, 1, 1, 0)
    for a in range(p.stride_h):
        for b in range(p.stride_w):
            var phase = Im2colPhase(d, h.axes[a], w.axes[b])
            plan.set_phase(a * p.stride_w + b, p, phase, 0)
    plan.set_launch(
        p,
        dgrad=True,
        tiles=p.n * tiles_h * tiles_w,
        column_tiles=tiles_w,
        stage_length=STAGE_LENGTH,
    )
    var window = Window(
        phases=Int32(p.stride_h * p.stride_w),
        k=Int32(p.k),
        stages=Int32(min(_stages(p), MAX_STAGES)),
        tiles_h=Int32(tiles_h),
        inner_h=Int32(inner_h),
        inner_w=Int32(inner_w),
        lower_h=Int32(h.lower),
        lower_w=Int32(w.lower),
    )
    return plan, window


def reason_against(p: ConvolutionProblem) -> Optional[String]:
    """Why there is no plan: many channels or taps, windows that are mostly rim; else None.
    """
    if p.c > MAX_CHANNELS or p.k % 8 != 0 or p.is_deep():
        return String(t"C = {p.c} and K = {p.k}, or three axes")
    if p.stride_h * p.stride_w > WINDOW_PHASES:
        return String(t"strides of {p.stride_h} and {p.stride_w}")
    if _stages(p) < max(_MIN_STAGES, ceildiv(p.k, STAGE_LENGTH)):
        return String(t"K = {p.k}: the filter leaves no room")
    var h = _rows(p)
    var w = _columns_of(p)
    var taps = h.taps * w.taps
    if taps > _MAX_TAPS or taps <= 0:
        return String(t"{taps} taps of a phase")
    if h.span > WINDOW_H // 2 or w.span > WINDOW_W // 2:
        return String("windows that are mostly rim")
    return None
