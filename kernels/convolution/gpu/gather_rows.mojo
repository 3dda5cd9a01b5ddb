"""Rows and reduction steps of the implicit products of forward pass and data gradient, as 32-bit device arithmetic."""

from ...common.arithmetic import divide
from ..gather import Phase


@fieldwise_init
struct Step(ImplicitlyCopyable, TrivialRegisterPassable):
    """A step of the flattened reduction: a tap of the phase, and a channel."""

    var t: Int32
    var r: Int32
    var s: Int32
    var c: Int32

    @always_inline
    def advance(mut self, count: Int32, depth: Int32, phase: Phase):
        self.c += count
        while self.c >= depth:
            self.c -= depth
            self.s += 1
            if self.s == Int32(phase.w.taps):
                self.s = 0
                self.r += 1
                if self.r == Int32(phase.h.taps):
                    self.r = 0
                    self.t += 1

    @always_inline
    def exists(self, phase: Phase) -> Bool:
        return self.t < Int32(phase.d.taps)

    @always_inline
    def offset(self, phase: Phase) -> Offset:
        """Returns the offset from a row's source pixel to the one under the tap.
        """
        return Offset(
            Int32(phase.d.first_offset) + self.t * Int32(phase.d.offset_step),
            Int32(phase.h.first_offset) + self.r * Int32(phase.h.offset_step),
            Int32(phase.w.first_offset) + self.s * Int32(phase.w.offset_step),
        )

    @always_inline
    def tap(self, phase: Phase, filter_r: Int32, filter_s: Int32) -> Int32:
        """The tap's number in a filter [T][filter_r][filter_s]."""
        return (
            (Int32(phase.d.first_tap) + self.t * Int32(phase.d.tap_step))
            * filter_r
            + Int32(phase.h.first_tap)
            + self.r * Int32(phase.h.tap_step)
        ) * filter_s + (
            Int32(phase.w.first_tap) + self.s * Int32(phase.w.tap_step)
        )


@fieldwise_init
struct Offset(ImplicitlyCopyable, TrivialRegisterPassable):
    """An offset in source pixels along each axis."""

    var d: Int32
    var h: Int32
    var w: Int32

    @always_inline
    def pixels(self, phase: Phase) -> Int:
        return (
            Int(self.d) * phase.h.source + Int(self.h)
        ) * phase.w.source + Int(self.w)


@fieldwise_init
struct SourceRow(ImplicitlyCopyable, TrivialRegisterPassable):
    """One row of the product: the source pixel that it reads through an offset of zero.
    """

    var d: Int32
    var h: Int32
    var w: Int32
    var base: Int
    """Index of the pixel's first channel in the group; may lie outside the tensor."""

    @always_inline
    def reaches(self, offset: Offset, phase: Phase) -> Bool:
        """Returns whether the pixel at the offset is one of the source's."""
        return (
            UInt32(self.d + offset.d) < UInt32(phase.d.source)
            and UInt32(self.h + offset.h) < UInt32(phase.h.source)
            and UInt32(self.w + offset.w) < UInt32(phase.w.source)
        )


@always_inline
def source_row(
    phase: Phase, row: Int32, rows: Int32, channels: Int, first: Int
) -> SourceRow:
    # Rows past the end read nothing: their depth is outside whatever the tap.
    if row >= rows:
        return SourceRow(Int32(-(1 << 30)), 0, 0, 0)
    var rest, q = divide(row, Int32(phase.w.rows))
    var outer, p = divide(rest, Int32(phase.h.rows))
    var n, o = divide(outer, Int32(phase.d.rows))
    var d = o * Int32(phase.d.step)
    var h = p * Int32(phase.h.step)
    var w = q * Int32(phase.w.step)
    var pixel = (
        (Int(n) * phase.d.source + Int(d)) * phase.h.source + Int(h)
    ) * phase.w.source + Int(w)
    return SourceRow(d, h, w, pixel * channels + first)


@always_inline
def result_pixel(phase: Phase, row: Int32) -> Int:
    var rest, q = divide(row, Int32(phase.w.rows))
    var outer, p = divide(rest, Int32(phase.h.rows))
    var n, o = divide(outer, Int32(phase.d.rows))
    return (
        (
            Int(n) * phase.d.out_extent
            + phase.d.out_first
            + Int(o) * phase.d.out_step
        )
        * phase.h.out_extent
        + phase.h.out_first
        + Int(p) * phase.h.out_step
    ) * phase.w.out_extent + (phase.w.out_first + Int(q) * phase.w.out_step)
