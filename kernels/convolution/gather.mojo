"""The arithmetic progressions, one on each axis, by which a pass reads its moving operand.

A pass computes rows (pixels) from taps. On one axis, row i and tap j read source pixel i * step + first_offset + j *
offset_step, filter tap first_tap + j * tap_step, and write pixel out_first + i * out_step. The forward pass is one such
phase. The data gradient of stride s is s phases on each axis, each dense: a phase holds the input pixels that meet the
same taps, so no zero between strided pixels is ever multiplied.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from ..common.arithmetic import gcd
from .problem import ConvolutionProblem


@fieldwise_init
struct PhaseAxis(ImplicitlyCopyable, TrivialRegisterPassable):
    var rows: Int
    var source: Int
    var step: Int
    var taps: Int
    var first_tap: Int
    var tap_step: Int
    var first_offset: Int
    var offset_step: Int
    var out_first: Int
    var out_step: Int
    var out_extent: Int

    @always_inline
    def offset(self, tap: Int) -> Int:
        return self.first_offset + tap * self.offset_step


@fieldwise_init
struct Phase(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """Three axes, and where this phase's packed filter starts."""

    var d: PhaseAxis
    var h: PhaseAxis
    var w: PhaseAxis
    var filter_offset: Int

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Phase"

    @always_inline
    def taps(self) -> Int:
        return self.d.taps * self.h.taps * self.w.taps

    @always_inline
    def rows(self, n: Int) -> Int:
        return n * self.d.rows * self.h.rows * self.w.rows


@always_inline
def full_tap(p: ConvolutionProblem, phase: Phase, tap: Int) -> Int:
    """Returns the index into the filter's taps of the phase's tap number `tap`.
    """
    var s = tap % phase.w.taps
    var rest = tap // phase.w.taps
    var r = rest % phase.h.taps
    var t = rest // phase.h.taps
    return (
        (
            (phase.d.first_tap + t * phase.d.tap_step) * p.r
            + phase.h.first_tap
            + r * phase.h.tap_step
        )
        * p.s
        + phase.w.first_tap
        + s * phase.w.tap_step
    )


def _forward_axis(
    source: Int, taps: Int, outputs: Int, stride: Int, dilation: Int, pad: Int
) -> PhaseAxis:
    return PhaseAxis(
        rows=outputs,
        source=source,
        step=stride,
        taps=taps,
        first_tap=0,
        tap_step=1,
        first_offset=-pad,
        offset_step=dilation,
        out_first=0,
        out_step=1,
        out_extent=outputs,
    )


def _gradient_axis(
    inputs: Int,
    taps: Int,
    outputs: Int,
    stride: Int,
    dilation: Int,
    pad: Int,
    phase: Int,
) -> PhaseAxis:
    """Returns the axis of input pixels phase, phase + stride, …: output pixel (pixel + pad - tap * dilation) / stride,
    where it divides."""
    var common = gcd(stride, dilation)
    var first_tap = 0
    while (
        first_tap < taps and (phase + pad - first_tap * dilation) % stride != 0
    ):
        first_tap += 1
    var tap_step = stride // common
    var count = 0
    if first_tap < taps:
        count = (taps - 1 - first_tap) // tap_step + 1
    return PhaseAxis(
        rows=max(0, (inputs - phase + stride - 1) // stride),
        source=outputs,
        step=1,
        taps=count,
        first_tap=first_tap,
        tap_step=tap_step,
        first_offset=(phase + pad - first_tap * dilation) // stride,
        offset_step=-(dilation // common),
        out_first=phase,
        out_step=stride,
        out_extent=inputs,
    )


def forward_phases(p: ConvolutionProblem) -> List[Phase]:
    return [
        Phase(
            _forward_axis(p.d, p.t, p.o, p.stride_d, p.dilation_d, p.pad_d),
            _forward_axis(p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h),
            _forward_axis(p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w),
            0,
        )
    ]


def gradient_phases(p: ConvolutionProblem, filter_elements: Int) -> List[Phase]:
    """Returns every phase that has rows; `filter_elements` is the packed size of one tap.
    """
    var phases = List[Phase]()
    var filter_offset = 0
    for a in range(min(p.stride_d, p.d)):
        for b in range(min(p.stride_h, p.h)):
            for c in range(min(p.stride_w, p.w)):
                var phase = Phase(
                    _gradient_axis(
                        p.d, p.t, p.o, p.stride_d, p.dilation_d, p.pad_d, a
                    ),
                    _gradient_axis(
                        p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h, b
                    ),
                    _gradient_axis(
                        p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w, c
                    ),
                    filter_offset,
                )
                phases.append(phase)
                filter_offset += phase.taps() * filter_elements
    return phases^
