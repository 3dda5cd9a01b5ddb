"""How a convolution pass becomes implicit matrix products: the integers that a kernel walks by.

fprop and dgrad are the same product. Rows are pixels of the result, columns its channels, and the reduction runs over
filter taps and, inside each tap, over channels of the tensor that is read in columns ("source"). A strided dgrad is
several such products, one for each residue of the result's pixels modulo the stride ("phase"): only the taps that can
hit that residue take part, so no zero is multiplied.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.memory import Pointer
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...arithmetic import Divisor

comptime ROW_BYTES = 128
"""Of each operand's rows in a pipeline stage: the widest swizzle."""
comptime BLOCK_K = 64
"""Reduction elements of one pipeline stage of a 16-bit type."""

comptime _HEADER = 16
comptime _COLUMN_DIVISOR = 11
comptime _PHASE = 24

comptime CORNER_MIN = -128
comptime CORNER_MAX = 127
comptime OFFSET_MAX = 255


def block_k[dtype: DType]() -> Int:
    """Reduction elements of one pipeline stage."""
    return ROW_BYTES // size_of[dtype]()


@fieldwise_init
struct Axis(ImplicitlyCopyable):
    """One spatial axis of one phase: which result pixels, which taps, which source pixels.
    """

    var extent: Int
    """Result pixels of this phase."""
    var first: Int
    """First result pixel; the next ones follow in steps of `Pass.out_step`."""
    var taps: Int
    var tap: Int
    """First filter tap that takes part."""
    var tap_step: Int
    var lower: Int
    """Source pixel that the first result pixel reads at tap offset 0."""
    var offset: Int
    """Source offset of the first tap, never negative."""
    var offset_step: Int
    """Added for each further tap; may be negative."""
    var upper: Int
    """Upper corner of the box of base pixels, relative to the last source pixel."""

    def fits_copy_engine(self) -> Bool:
        var last = self.offset + (self.taps - 1) * self.offset_step
        return (
            self.lower >= CORNER_MIN
            and self.lower <= CORNER_MAX
            and self.upper >= CORNER_MIN
            and self.upper <= CORNER_MAX
            and max(self.offset, last) <= OFFSET_MAX
        )


def fprop_axis(
    size: Int, filter: Int, result: Int, stride: Int, dilation: Int, pad: Int
) -> Axis:
    return Axis(
        extent=result,
        first=0,
        taps=filter,
        tap=0,
        tap_step=1,
        lower=-pad,
        offset=0,
        offset_step=dilation,
        upper=(result - 1) * stride + 1 - size - pad,
    )


def dgrad_axis(
    size: Int,
    filter: Int,
    result: Int,
    stride: Int,
    dilation: Int,
    pad: Int,
    phase: Int,
) -> Axis:
    """Input pixels `phase`, `phase + stride`, ...: pixel i of them reads output pixel i + shift(tap).

    shift(tap) = (phase + pad - tap * dilation) / stride, for the taps where that is whole; those taps are an
    arithmetic progression and their shifts descend.
    """
    var extent = max(0, ceildiv(size - phase, stride))
    var first_tap = 0
    while (
        first_tap < filter
        and (phase + pad - first_tap * dilation) % stride != 0
    ):
        first_tap += 1
        if first_tap >= stride:
            first_tap = filter
    if first_tap >= filter:
        return Axis(extent, phase, 0, 0, 1, 0, 0, 0, extent - result)
    var step = 1
    while (step * dilation) % stride != 0:
        step += 1
    var taps = ceildiv(filter - first_tap, step)
    var shift_step = step * dilation // stride
    var highest = (phase + pad - first_tap * dilation) // stride
    var lowest = highest - (taps - 1) * shift_step
    return Axis(
        extent=extent,
        first=phase,
        taps=taps,
        tap=first_tap,
        tap_step=step,
        lower=lowest,
        offset=(taps - 1) * shift_step,
        offset_step=-shift_step,
        upper=extent - result + lowest,
    )


struct Plan[phases: Int](DevicePassable, ImplicitlyCopyable):
    """The integers of one launch, by value in the kernel's parameters."""

    var data: StaticTuple[Int32, _HEADER + _PHASE * Self.phases]

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Plan"

    def __init__(out self):
        self.data = StaticTuple[Int32, _HEADER + _PHASE * Self.phases](fill=0)

    @always_inline
    def _at(self, index: Int) -> Int32:
        return Pointer(to=self).unsafe_bitcast[Int32]().unsafe_load(index)

    # Of the whole launch.

    @always_inline
    def tiles(self) -> Int32:
        return self._at(0)

    @always_inline
    def column_tiles(self) -> Int32:
        return self._at(1)

    @always_inline
    def channel_blocks(self) -> Int32:
        """Pipeline stages for each tap."""
        return self._at(2)

    @always_inline
    def filter_s(self) -> Int32:
        return self._at(3)

    @always_inline
    def source_step_h(self) -> Int32:
        return self._at(4)

    @always_inline
    def source_step_w(self) -> Int32:
        return self._at(5)

    @always_inline
    def columns(self) -> Int32:
        return self._at(6)

    @always_inline
    def out_h(self) -> Int32:
        return self._at(7)

    @always_inline
    def out_w(self) -> Int32:
        return self._at(8)

    @always_inline
    def out_step_h(self) -> Int32:
        return self._at(9)

    @always_inline
    def out_step_w(self) -> Int32:
        return self._at(10)

    @always_inline
    def tile_place(self, tile: Int32) -> Tuple[Int32, Int32]:
        """Row and column of a phase's tile, counted in tiles."""
        return self._divisor(_COLUMN_DIVISOR).divide(tile)

    @always_inline
    def _divisor(self, index: Int) -> Divisor:
        return Divisor(
            self._at(index),
            UInt32(self._at(index + 1)),
            UInt32(self._at(index + 2)),
        )

    # Of one phase.

    @always_inline
    def pixel(self, index: Int, row: Int32) -> Tuple[Int32, Int32, Int32]:
        """Batch, height and width of a phase's row, counted in the phase's pixels.
        """
        comptime at = _HEADER + WIDTH_DIVISOR
        var line, i = self._divisor(at + _PHASE * index).divide(row)
        var n, j = self._divisor(at + 3 + _PHASE * index).divide(line)
        return n, j, i

    @always_inline
    def phase(self, index: Int, field: Int) -> Int32:
        return self._at(_HEADER + _PHASE * index + field)

    def set_launch(
        mut self,
        tiles: Int,
        column_tiles: Int,
        channel_blocks: Int,
        filter_s: Int,
        source_step_h: Int,
        source_step_w: Int,
        columns: Int,
        out_h: Int,
        out_w: Int,
        out_step_h: Int,
        out_step_w: Int,
    ):
        var values: Array[Int, 11] = [
            tiles,
            column_tiles,
            channel_blocks,
            filter_s,
            source_step_h,
            source_step_w,
            columns,
            out_h,
            out_w,
            out_step_h,
            out_step_w,
        ]
        comptime for i in range(11):
            self.data[i] = Int32(values[i])
        self._set_divisor(_COLUMN_DIVISOR, column_tiles)

    def _set_divisor(mut self, index: Int, value: Int):
        var divisor = Divisor(max(value, 1))
        self.data[index] = divisor.value
        self.data[index + 1] = Int32(divisor.multiplier)
        self.data[index + 2] = Int32(divisor.shift)

    def set_first_tile(mut self, index: Int, tile: Int):
        """A phase that begins past the last tile is never reached."""
        self.data[_HEADER + _PHASE * index + FIRST_TILE] = Int32(tile)

    def set_phase(
        mut self, index: Int, n: Int, h: Axis, w: Axis, first_tile: Int
    ):
        var values: Array[Int, 16] = [
            n * h.extent * w.extent,
            h.extent,
            w.extent,
            h.lower,
            w.lower,
            h.taps,
            w.taps,
            h.tap,
            w.tap,
            h.tap_step,
            w.tap_step,
            h.offset,
            w.offset,
            h.offset_step,
            w.offset_step,
            first_tile,
        ]
        comptime for i in range(16):
            self.data[_HEADER + _PHASE * index + i] = Int32(values[i])
        self.data[_HEADER + _PHASE * index + 16] = Int32(h.first)
        self.data[_HEADER + _PHASE * index + 17] = Int32(w.first)
        self._set_divisor(_HEADER + _PHASE * index + WIDTH_DIVISOR, w.extent)
        self._set_divisor(
            _HEADER + _PHASE * index + WIDTH_DIVISOR + 3, h.extent
        )


# Fields of a phase.
comptime ROWS = 0
comptime EXTENT_H = 1
comptime EXTENT_W = 2
comptime LOWER_H = 3
comptime LOWER_W = 4
comptime TAPS_H = 5
comptime TAPS_W = 6
comptime TAP_H = 7
comptime TAP_W = 8
comptime TAP_STEP_H = 9
comptime TAP_STEP_W = 10
comptime OFFSET_H = 11
comptime OFFSET_W = 12
comptime OFFSET_STEP_H = 13
comptime OFFSET_STEP_W = 14
comptime FIRST_TILE = 15
comptime FIRST_H = 16
comptime FIRST_W = 17
comptime WIDTH_DIVISOR = 18
"""Three integers of EXTENT_W's divisor, and three of EXTENT_H's."""
