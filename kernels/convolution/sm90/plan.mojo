"""Plans of a convolution pass as implicit matrix products: the integers that a kernel walks by.

fprop and dgrad are the same product. Rows are pixels of the result, columns its channels, and the reduction runs over
filter taps and, inside each tap, over channels of the tensor that is read in columns ("source"). A strided dgrad is
several such products, one for each residue of the result's pixels modulo the stride ("phase"): only the taps that can
hit that residue take part, so no zero is multiplied.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.memory import Pointer
from std.sys import size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from ...common.arithmetic import Divisor
from ..problem import ConvolutionProblem

comptime ROW_BYTES = 128
"""Bytes of each operand's rows in a pipeline stage: the widest swizzle."""
comptime STAGE_LENGTH = 64
"""Reduction elements of one pipeline stage of a 16-bit type."""
comptime MOST_SHARED_TAPS = 3
"""Taps along W that one pipeline stage serves at most."""

comptime _COLUMN_DIVISOR = 13
comptime _TAP_STEP = 16
comptime _OFFSET_STEP = 19
comptime _COLUMN_STEP = 22
comptime _ENDS_SHORT = 23
comptime _SPLIT_BITS = 24
comptime _SHARED_TAPS = 25
comptime _HEADER = 26
comptime _PHASE = 22


def stage_length[dtype: DType]() -> Int:
    """Reduction elements of one pipeline stage."""
    return ROW_BYTES // size_of[dtype]()


def ends_short(channels: Int, stage_length: Int) -> Bool:
    """Returns whether the last stage of each tap holds half of the others' channels at most.
    """
    return 0 < channels % stage_length <= stage_length // 2


@fieldwise_init
struct Im2colAxis(ImplicitlyCopyable):
    """One axis of an `Im2colPhase`: its result pixels, taps and source pixels.
    """

    var extent: Int
    """Result pixels of this phase."""
    var first: Int
    """First result pixel; the next ones follow in steps of `Im2colPlan.out_step`."""
    var taps: Int
    var tap: Int
    """First filter tap that takes part."""
    var tap_step: Int
    var lower: Int
    """Source pixel that the first result pixel reads at tap offset 0."""
    var offset: Int
    """Source offset of the first tap, never negative."""
    var offset_step: Int
    """Step of the source offset for each further tap; may be negative."""
    var upper: Int
    """Upper corner of the box of base pixels, relative to the last source pixel."""

    def fits_copy_engine(self, bits: Int) -> Bool:
        """Returns whether corners fit into `bits` bits with their sign, and offsets into as many without one.
        """
        var corner = 1 << (bits - 1)
        var last = self.offset + (self.taps - 1) * self.offset_step
        return (
            min(self.lower, self.upper) >= -corner
            and max(self.lower, self.upper) < corner
            and max(self.offset, last) < 1 << bits
        )

    def sharing_taps(self) -> Self:
        """Returns the axis with the tap that reads the first source pixel in place of all, and as many result pixels as
        there are source pixels: the taps behind it, in steps of `tap_step`, read as many pixels further on. What is
        computed of the last `taps - 1` pixels is not the result's."""
        var ascends = self.offset_step > 0
        var others = self.taps - 1
        return Self(
            extent=self.extent + others,
            first=self.first,
            taps=1,
            tap=self.tap if ascends else self.tap + others * self.tap_step,
            tap_step=self.tap_step if ascends else -self.tap_step,
            lower=self.lower,
            offset=0,
            offset_step=0,
            upper=self.upper + others,
        )


def fprop_axis(
    size: Int, filter: Int, result: Int, stride: Int, dilation: Int, pad: Int
) -> Im2colAxis:
    return Im2colAxis(
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
) -> Im2colAxis:
    """Returns the axis of input pixels `phase`, `phase + stride`, ...: pixel i of them reads output pixel i +
    shift(tap).

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
        return Im2colAxis(extent, phase, 0, 0, 1, 0, 0, 0, extent - result)
    var step = 1
    while (step * dilation) % stride != 0:
        step += 1
    var taps = ceildiv(filter - first_tap, step)
    var shift_step = step * dilation // stride
    var highest = (phase + pad - first_tap * dilation) // stride
    var lowest = highest - (taps - 1) * shift_step
    return Im2colAxis(
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


@fieldwise_init
struct Im2colPhase(ImplicitlyCopyable):
    """A phase's spatial axes as im2col copies have them: corners of a box of base pixels, and a tap's offsets from
    there.

    gather.mojo's `Phase` has the same products for kernels that compute addresses themselves.
    """

    var d: Im2colAxis
    var h: Im2colAxis
    var w: Im2colAxis

    def pixels(self) -> Int:
        """Returns the pixels of one image's result."""
        return self.d.extent * self.h.extent * self.w.extent

    def taps(self) -> Int:
        return self.d.taps * self.h.taps * self.w.taps

    def sharing_taps(
        self, p: ConvolutionProblem, source_step: Int
    ) -> Optional[Self]:
        """Returns the phase for stages that serve all taps along W, MOST_SHARED_TAPS at most. None where neighbouring
        taps do not read neighbouring pixels, lines are so short that a third of them would not be the result's, or the
        copy engine does not take the wider ones."""
        var w = self.w
        var others = w.taps - 1
        if not (0 < others < MOST_SHARED_TAPS and 2 * others <= w.extent):
            return None
        if abs(w.offset_step) != 1 or source_step != 1:
            return None
        var wider = Self(self.d, self.h, w.sharing_taps())
        var fits = wider.fits_copy_engine(p.is_deep())
        if not fits or p.n * wider.pixels() >= 1 << 31:
            return None
        return wider

    def fits_copy_engine(self, deep: Bool) -> Bool:
        """Returns whether the copy engine takes the phase: with three axes a tensor map has 5 bits for each corner and
        offset, with two it has 8."""
        if not deep:
            return self.h.fits_copy_engine(8) and self.w.fits_copy_engine(8)
        return (
            self.d.fits_copy_engine(5)
            and self.h.fits_copy_engine(5)
            and self.w.fits_copy_engine(5)
        )


def packed_offsets(deep: Bool, d: Int, h: Int, w: Int) -> Int:
    """Returns a tap's offsets along the axes as one number, as `load_im2col` takes them; steps from tap to tap add up
    alike."""
    return (d << 10) + (h << 5) + w if deep else (h << 8) + w


def fprop_phase(p: ConvolutionProblem) -> Im2colPhase:
    return Im2colPhase(
        fprop_axis(p.d, p.t, p.o, p.stride_d, p.dilation_d, p.pad_d),
        fprop_axis(p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h),
        fprop_axis(p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w),
    )


def dgrad_phases(p: ConvolutionProblem) -> List[Im2colPhase]:
    """Returns the phases that have pixels, long reductions first: what is left for the end of the launch is short.
    """
    var phases = List[Im2colPhase]()
    for a in range(min(p.stride_d, p.d)):
        var d = dgrad_axis(p.d, p.t, p.o, p.stride_d, p.dilation_d, p.pad_d, a)
        for b in range(min(p.stride_h, p.h)):
            var h = dgrad_axis(
                p.h, p.r, p.p, p.stride_h, p.dilation_h, p.pad_h, b
            )
            for c in range(min(p.stride_w, p.w)):
                var w = dgrad_axis(
                    p.w, p.s, p.q, p.stride_w, p.dilation_w, p.pad_w, c
                )
                var phase = Im2colPhase(d, h, w)
                var place = len(phases)
                while place > 0 and phases[place - 1].taps() < phase.taps():
                    place -= 1
                phases.insert(place, phase)
    return phases^


struct Im2colPlan[phases: Int](DevicePassable, ImplicitlyCopyable):
    """The integers of one launch, by value in the kernel's parameters."""

    var data: StaticTuple[Int32, _HEADER + _PHASE * Self.phases]

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Im2colPlan"

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
        return self._at(_COLUMN_DIVISOR)

    @always_inline
    def channel_blocks(self) -> Int32:
        """Returns the number of pipeline stages for each tap."""
        return self._at(1)

    @always_inline
    def columns(self) -> Int32:
        return self._at(2)

    @always_inline
    def column_step(self) -> Int32:
        """Returns the number of columns from a tile to the next one."""
        return self._at(_COLUMN_STEP)

    @always_inline
    def split_bits(self) -> Int32:
        """Returns how often the reduction of each tile is halved for the blocks of a cluster.
        """
        return self._at(_SPLIT_BITS)

    @always_inline
    def ends_short(self) -> Bool:
        """Returns whether each tap's last stage is a short one: half of it is copied and multiplied.
        """
        return self._at(_ENDS_SHORT) != 0

    @always_inline
    def shared_taps(self) -> Int32:
        """Returns the number of taps along W that a pipeline stage serves."""
        return self._at(_SHARED_TAPS)

    @always_inline
    def is_deep(self) -> Bool:
        """Returns whether the source's tensor maps have three spatial axes."""
        return self._at(3) != 0

    @always_inline
    def source_step(self, axis: Int) -> Int32:
        return self._at(4 + axis)

    @always_inline
    def out_extent(self, axis: Int) -> Int32:
        return self._at(7 + axis)

    @always_inline
    def out_step(self, axis: Int) -> Int32:
        return self._at(10 + axis)

    @always_inline
    def tap_step(self, axis: Int) -> Int32:
        """Returns the distance from a tap of a phase to the next one along an axis, counted in the filter's taps; the
        same in all phases."""
        return self._at(_TAP_STEP + axis)

    @always_inline
    def offset_step(self, axis: Int) -> Int32:
        """Returns the distance from a tap of a phase to the next one along an axis, in packed offsets; the same in all
        phases."""
        return self._at(_OFFSET_STEP + axis)

    @always_inline
    def tile_place(self, tile: Int32) -> Tuple[Int32, Int32]:
        """Returns the row and the column of a phase's tile, counted in tiles.
        """
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
    def pixel(
        self, index: Int, row: Int32
    ) -> Tuple[Int32, Int32, Int32, Int32]:
        """Returns batch, depth, height and width of a phase's row, counted in the phase's pixels.
        """
        comptime at = _HEADER + _DIVISORS
        var line, i = self.line_place(index, row)
        var plane, j = self._divisor(at + 3 + _PHASE * index).divide(line)
        var n, l = self._divisor(at + _PHASE * index).divide(plane)
        return n, l, j, i

    @always_inline
    def line_place(self, index: Int, row: Int32) -> Tuple[Int32, Int32]:
        """Returns the line along W of a phase's row, and the place in it."""
        comptime at = _HEADER + _DIVISORS
        return self._divisor(at + 6 + _PHASE * index).divide(row)

    @always_inline
    def extent(self, index: Int, axis: Int) -> Int32:
        return self.phase(index, _DIVISORS + 3 * axis)

    @always_inline
    def taps(self, index: Int) -> Int32:
        return (
            self.phase(index, TAPS)
            * self.phase(index, TAPS + 1)
            * self.phase(index, TAPS + 2)
        )

    @always_inline
    def phase(self, index: Int, field: Int) -> Int32:
        return self._at(_HEADER + _PHASE * index + field)

    def set_launch(
        mut self,
        problem: ConvolutionProblem,
        *,
        dgrad: Bool,
        tiles: Int,
        column_tiles: Int,
        stage_length: Int,
        column_step: Int = 0,
        short_stages: Bool = False,
    ):
        """Sets the numbers of the whole launch. `stage_length` elements of the reduction are one pipeline stage;
        `short_stages` says that the kernel has short ones."""
        var p = problem
        var depth = p.k if dgrad else p.c
        var columns = p.c if dgrad else p.k
        var ones = IndexList[3](1, 1, 1)
        var strides = IndexList[3](p.stride_d, p.stride_h, p.stride_w)
        var source_step = ones if dgrad else strides
        var out_step = strides if dgrad else ones
        var out = IndexList[3](p.d, p.h, p.w) if dgrad else IndexList[3](
            p.o, p.p, p.q
        )
        self.data[0] = Int32(tiles)
        self.data[1] = Int32(ceildiv(depth, stage_length))
        self.data[2] = Int32(columns)
        self.data[3] = Int32(1 if p.is_deep() else 0)
        comptime for axis in range(3):
            self.data[4 + axis] = Int32(source_step[axis])
            self.data[7 + axis] = Int32(out[axis])
            self.data[10 + axis] = Int32(out_step[axis])
        self.data[_COLUMN_STEP] = Int32(column_step)
        self.data[_ENDS_SHORT] = Int32(
            1 if short_stages and ends_short(depth, stage_length) else 0
        )
        self._set_divisor(_COLUMN_DIVISOR, column_tiles)

    def set_shared_taps(mut self, taps: Int):
        """Sets the number of taps along W that a pipeline stage serves."""
        self.data[_SHARED_TAPS] = Int32(taps)

    def set_parts(mut self, parts: Int):
        """Sets how many blocks share each tile's reduction, a power of two."""
        var bits = 0
        while 1 << bits < parts:
            bits += 1
        self.data[_SPLIT_BITS] = Int32(bits)

    def _set_divisor(mut self, index: Int, value: Int):
        var divisor = Divisor(max(value, 1))
        self.data[index] = divisor.value
        self.data[index + 1] = Int32(divisor.multiplier)
        self.data[index + 2] = Int32(divisor.shift)

    def set_groups(mut self, groups: Int):
        """Sets the groups of a launch whose phases are groups', after `set_launch`: along W the result has a pixel for
        each of them."""
        self.data[7 + AXIS_W] *= Int32(groups)
        self.data[10 + AXIS_W] *= Int32(groups)

    def set_group(
        mut self, index: Int, group: Int, groups: Int, filter_rows: Int
    ):
        """Sets a group's result and filter, whose rows are counted in taps, after `set_phase`.
        """
        comptime at = _HEADER + FIRST + AXIS_W
        comptime tap = _HEADER + TAP
        self.data[at + _PHASE * index] = self.data[at + _PHASE * index] * Int32(
            groups
        ) + Int32(group)
        self.data[tap + _PHASE * index] += Int32(group * filter_rows)

    def set_first_tile(mut self, index: Int, tile: Int):
        """Sets a phase's first tile. A phase that begins past the last tile is never reached.
        """
        self.data[_HEADER + _PHASE * index + FIRST_TILE] = Int32(tile)

    def set_phase(
        mut self,
        index: Int,
        problem: ConvolutionProblem,
        phase: Im2colPhase,
        first_tile: Int,
    ):
        var p = problem
        var d = phase.d
        var h = phase.h
        var w = phase.w
        var axes: Array[Im2colAxis, 3] = [d, h, w]
        var pitches = IndexList[3](p.r * p.s, p.s, 1)
        var deep = p.is_deep()
        var at = _HEADER + _PHASE * index
        self.data[at + ROWS] = Int32(p.n * phase.pixels())
        self.data[at + FIRST_TILE] = Int32(first_tile)
        self.data[at + TAP] = Int32((d.tap * p.r + h.tap) * p.s + w.tap)
        self.data[at + OFFSETS] = Int32(
            packed_offsets(deep, d.offset, h.offset, w.offset)
        )
        comptime for i in range(3):
            var axis = axes[i]
            self._set_divisor(at + _DIVISORS + 3 * i, axis.extent)
            self.data[at + _DIVISORS + 3 * i] = Int32(axis.extent)
            self.data[at + LOWER + i] = Int32(axis.lower)
            self.data[at + TAPS + i] = Int32(axis.taps)
            self.data[at + FIRST + i] = Int32(axis.first)
            if axis.taps > 0:
                var step = IndexList[3]()
                step[i] = axis.offset_step
                self.data[_TAP_STEP + i] = Int32(axis.tap_step * pitches[i])
                self.data[_OFFSET_STEP + i] = Int32(
                    packed_offsets(deep, step[0], step[1], step[2])
                )


# Axes of a launch's and a phase's fields.
comptime AXIS_D = 0
comptime AXIS_H = 1
comptime AXIS_W = 2

# Fields of a phase; one for each axis where an axis is to be added.
comptime ROWS = 0
comptime FIRST_TILE = 1
comptime _DIVISORS = 2
"""Index of three integers for each axis: its extent as a divisor."""
comptime LOWER = 11
comptime TAPS = 14
comptime FIRST = 17
comptime TAP = 20
"""Index of the first tap, counted in the filter's taps."""
comptime OFFSETS = 21
"""Index of the packed offsets of the first tap."""
