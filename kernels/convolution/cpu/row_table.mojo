"""Rows of an implicit matrix product: where each row of a block finds its taps' pixels, and where its result goes."""

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
    """Called for what has been stored."""

    @always_inline
    def depth(self) -> Int:
        """Channels of one group of the source."""
        return self.channels // self.groups

    @always_inline
    def packed_depth(self) -> Int:
        """Steps of the reduction that a tap takes in the packed filter."""
        return packed_length[Self.dtype](self.depth())

    @always_inline
    def columns(self) -> Int:
        """Channels of one group of the result."""
        return self.result_channels // self.groups


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
    """Pointers for rows first … first + count, one line of `pitch` for each live tap; returns how many are live.
    """
    var wide = phase.w
    # Where each row's result goes.
    var q = first % wide.rows
    var rest = first // wide.rows
    var p = rest % phase.h.rows
    rest //= phase.h.rows
    var o = rest % phase.d.rows
    var n = rest // phase.d.rows
    var q0 = q
    var p0 = p
    var o0 = o
    var n0 = n
    var m = 0
    while m < count:
        var run = min(wide.rows - q, count - m)
        var pixel = (
            (n * phase.d.out_extent + phase.d.out_first + o * phase.d.out_step)
            * phase.h.out_extent
            + phase.h.out_first
            + p * phase.h.out_step
        ) * wide.out_extent + wide.out_first
        for i in range(run):
            results[unsafe_offset=m + i] = ops.result.unsafe_offset(
                (pixel + (q + i) * wide.out_step) * ops.result_channels
            )
        m += run
        q = 0
        p += 1
        if p == phase.h.rows:
            p = 0
            o += 1
            if o == phase.d.rows:
                o = 0
                n += 1

    var lines = 0
    var tap = 0
    for t in range(phase.d.taps):
        for r in range(phase.h.taps):
            for s in range(wide.taps):
                var line = table.unsafe_offset(lines * pitch)
                var any = False
                var shift = wide.offset(s)
                # Rows q with 0 <= q * step + shift < source.
                var low = max(0, ceildiv(-shift, wide.step))
                var high = min(
                    wide.rows, (wide.source - 1 - shift) // wide.step + 1
                )
                q = q0
                p = p0
                o = o0
                n = n0
                m = 0
                while m < count:
                    var run = min(wide.rows - q, count - m)
                    var d = o * phase.d.step + phase.d.offset(t)
                    var h = p * phase.h.step + phase.h.offset(r)
                    var start = run
                    var stop = run
                    if (
                        d >= 0
                        and d < phase.d.source
                        and h >= 0
                        and h < phase.h.source
                    ):
                        start = min(run, max(0, low - q))
                        stop = max(start, min(run, high - q))
                        any = any or stop > start
                    var base = (
                        (n * phase.d.source + d) * phase.h.source + h
                    ) * wide.source + shift
                    for i in range(start):
                        line[unsafe_offset=m + i] = ops.zeros
                    for i in range(start, stop):
                        line[unsafe_offset=m + i] = ops.source.unsafe_offset(
                            (base + (q + i) * wide.step) * ops.pitch
                        )
                    for i in range(stop, run):
                        line[unsafe_offset=m + i] = ops.zeros
                    m += run
                    q = 0
                    p += 1
                    if p == phase.h.rows:
                        p = 0
                        o += 1
                        if o == phase.d.rows:
                            o = 0
                            n += 1
                if any:
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
    """Calls what is to be called for `lanes` columns of the first `count` rows of a table; for whole rows that lie one
    behind the other once."""
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
    """The number of a row's first element."""
    return (Int(row) - Int(ops.result)) // size_of[dtype]()
