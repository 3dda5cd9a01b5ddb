"""Rows of an implicit matrix product: for each row of a block, pointers to its taps' pixels and to its result."""

from std.math import ceildiv
from std.sys.info import size_of

from ...common.pointer import Ptr
from ..epilogue_callback import EpilogueCallback
from ..gather import Phase
from .microkernel import PtrTable, packed_length, packed_type


@fieldwise_init
struct PassOperands[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """A pass in the engine's terms: `source` has `channels` per pixel, the result `result_channels`. One pixel of the
    source lies `pitch` elements behind the other.
    """

    var result: Ptr[Self.dtype]
    var source: Ptr[Self.dtype]
    var zeros: Ptr[Self.dtype]
    var filter: Ptr[packed_type[Self.dtype]]
    var n: Int
    var groups: Int
    var channels: Int
    var pitch: Int
    var result_channels: Int
    var epilogue: EpilogueCallback
    """Called for the elements that have been stored."""

    @always_inline
    def depth(self) -> Int:
        """Returns the channels of one group of the source."""
        return self.channels // self.groups

    @always_inline
    def packed_depth(self) -> Int:
        """Returns the steps of the reduction that a tap takes in the packed filter.
        """
        return packed_length[Self.dtype](self.depth())

    @always_inline
    def columns(self) -> Int:
        """Returns the channels of one group of the result."""
        return self.result_channels // self.groups


@fieldwise_init
struct _PixelCursor(ImplicitlyCopyable, TrivialRegisterPassable):
    """A pixel of a phase's rows, by its image and its indices on the three axes.
    """

    var n: Int
    var o: Int
    var p: Int
    var q: Int

    @staticmethod
    @always_inline
    def of(row: Int, phase: Phase) -> Self:
        var line = row // phase.w.rows
        var plane = line // phase.h.rows
        return Self(
            plane // phase.d.rows,
            plane % phase.d.rows,
            line % phase.h.rows,
            row % phase.w.rows,
        )

    @always_inline
    def next_line(mut self, phase: Phase):
        """Advances to the first pixel of the next row of pixels."""
        self.q = 0
        self.p += 1
        if self.p == phase.h.rows:
            self.p = 0
            self.o += 1
            if self.o == phase.d.rows:
                self.o = 0
                self.n += 1


@always_inline
def _fill_results[
    dtype: DType
](
    results: PtrTable[dtype],
    ops: PassOperands[dtype],
    phase: Phase,
    first: _PixelCursor,
    count: Int,
):
    """Writes pointers to the results of `count` rows."""
    var at = first
    var m = 0
    while m < count:
        var run = min(phase.w.rows - at.q, count - m)
        var pixel = (
            (
                at.n * phase.d.out_extent
                + phase.d.out_first
                + at.o * phase.d.out_step
            )
            * phase.h.out_extent
            + phase.h.out_first
            + at.p * phase.h.out_step
        ) * phase.w.out_extent + phase.w.out_first
        for i in range(run):
            results[unsafe_offset=m + i] = ops.result.unsafe_offset(
                (pixel + (at.q + i) * phase.w.out_step) * ops.result_channels
            )
        m += run
        at.next_line(phase)


@always_inline
def _fill_line[
    dtype: DType
](
    line: PtrTable[dtype],
    ops: PassOperands[dtype],
    phase: Phase,
    first: _PixelCursor,
    count: Int,
    t: Int,
    r: Int,
    s: Int,
) -> Bool:
    """Writes pointers to the values that `count` rows read through tap (t, r, s), to zeros outside the source; returns
    whether any row reads a value."""
    var wide = phase.w
    var shift = wide.offset(s)
    # Rows q with 0 <= q * step + shift < source.
    var low = max(0, ceildiv(-shift, wide.step))
    var high = min(wide.rows, (wide.source - 1 - shift) // wide.step + 1)
    var any = False
    var at = first
    var m = 0
    while m < count:
        var run = min(wide.rows - at.q, count - m)
        var d = at.o * phase.d.step + phase.d.offset(t)
        var h = at.p * phase.h.step + phase.h.offset(r)
        var start = run
        var stop = run
        if d >= 0 and d < phase.d.source and h >= 0 and h < phase.h.source:
            start = min(run, max(0, low - at.q))
            stop = max(start, min(run, high - at.q))
            any = any or stop > start
        var base = (
            (at.n * phase.d.source + d) * phase.h.source + h
        ) * wide.source + shift
        for i in range(start):
            line[unsafe_offset=m + i] = ops.zeros
        for i in range(start, stop):
            line[unsafe_offset=m + i] = ops.source.unsafe_offset(
                (base + (at.q + i) * wide.step) * ops.pitch
            )
        for i in range(stop, run):
            line[unsafe_offset=m + i] = ops.zeros
        m += run
        at.next_line(phase)
    return any


@no_inline
def fill_table[
    dtype: DType
](
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    ops: PassOperands[dtype],
    phase: Phase,
    first: Int,
    count: Int,
    pitch: Int,
) -> Int:
    """Writes pointers for rows first … first + count, one line of `pitch` for each live tap; returns how many are live.
    """
    var begin = _PixelCursor.of(first, phase)
    _fill_results(results, ops, phase, begin, count)
    var lines = 0
    var tap = 0
    for t in range(phase.d.taps):
        for r in range(phase.h.taps):
            for s in range(phase.w.taps):
                var line = table.unsafe_offset(lines * pitch)
                if _fill_line(line, ops, phase, begin, count, t, r, s):
                    # Rows beyond the last one are computed and thrown away.
                    for i in range(count, pitch):
                        line[unsafe_offset=i] = ops.zeros
                    live[unsafe_offset=lines] = tap
                    lines += 1
                tap += 1
    return lines


@no_inline
def run_epilogue_on_rows[
    dtype: DType
](
    ops: PassOperands[dtype],
    results: PtrTable[dtype],
    count: Int,
    column: Int,
    lanes: Int,
):
    """Calls the epilogue for `lanes` columns of the first `count` rows of a table; for whole rows that lie one behind
    the other once."""
    var first = _element(ops, results[]) + column
    var last = _element(ops, results[unsafe_offset=count - 1]) + column
    if (
        lanes == ops.result_channels
        and last - first == (count - 1) * ops.result_channels
    ):
        ops.epilogue.run(first, last + lanes)
        return
    for m in range(count):
        var begin = _element(ops, results[unsafe_offset=m]) + column
        ops.epilogue.run(begin, begin + lanes)


@always_inline
def _element[dtype: DType](ops: PassOperands[dtype], row: Ptr[dtype]) -> Int:
    """Returns the number of a row's first element in the result."""
    return (Int(row) - Int(ops.result)) // size_of[dtype]()
