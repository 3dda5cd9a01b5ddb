"""The operands of a weight gradient's products, packed: columns of a block's pixels, and channels of dy."""

from std.math import ceildiv
from std.sys.info import size_of
from std.sys.intrinsics import (
    PrefetchOptions,
    masked_load,
    masked_store,
    prefetch,
)

from ...common.amx import TILE, has_tiles
from ...common.packed import REGISTERS
from ...common.pointer import Ptr
from ...common.vectors import first_lanes
from ..problem import ConvolutionProblem
from .microkernel import packed_length, packed_type
from .pack import pair_rows, turn_rows

# Vectors of columns in a tile, and dy channels that meet them: 24 accumulators, or 12 of 16 registers.
comptime TILE_VECTORS = 3
comptime TILE_ROWS = REGISTERS // 4
comptime tile_rows[dtype: DType]: Int = TILE if has_tiles[dtype] else TILE_ROWS
"""Channels of dy that are packed together."""
comptime tile_vectors[dtype: DType]: Int = 4 if has_tiles[
    dtype
] else TILE_VECTORS
"""Vectors of columns that are packed together."""
comptime _TILES_TOGETHER = 8
"""Tiles of dy that are packed at once."""
comptime _tiles_of_a_line[dtype: DType]: Int = 64 // (
    tile_rows[dtype] * size_of[dtype]()
)


@fieldwise_init
struct Runs(ImplicitlyCopyable, TrivialRegisterPassable):
    """The columns of one pixel as contiguous runs of the input: `length` values for each of `count` runs.

    Taps along W are one run where they are neighbours in memory (no dilation along W, one group).
    """

    var length: Int
    var count: Int
    var merged: Bool


def runs_of(p: ConvolutionProblem) -> Runs:
    var merged = p.dilation_w == 1 and p.groups == 1
    if merged:
        return Runs(p.s * p.c, p.t * p.r, True)
    return Runs(p.group_c(), p.taps(), False)


@always_inline
def _copy_run[
    dtype: DType, acc_type: DType, width: Int
](target: Ptr[acc_type], source: Ptr[dtype], length: Int):
    var i = 0
    while i + width <= length:
        target.unsafe_offset(i).unsafe_store(
            source.unsafe_offset(i).unsafe_load[width=width]().cast[acc_type]()
        )
        i += width
    if i < length:
        var mask = first_lanes[width](length - i)
        var value = masked_load[width](
            source.unsafe_offset(i), mask, SIMD[dtype, width](0)
        )
        masked_store(value.cast[acc_type](), target.unsafe_offset(i), mask)


@always_inline
def _zero_run[acc_type: DType, width: Int](target: Ptr[acc_type], length: Int):
    var zero = SIMD[acc_type, width](0)
    var i = 0
    while i + width <= length:
        target.unsafe_offset(i).unsafe_store(zero)
        i += width
    if i < length:
        masked_store(
            zero, target.unsafe_offset(i), first_lanes[width](length - i)
        )


@always_inline
def _copy_spans[
    dtype: DType, acc_type: DType, width: Int
](
    target: Ptr[acc_type],
    pitch: Int,
    source: Ptr[dtype],
    step: Int,
    count: Int,
    span: Int,
):
    """Copies `count` pixels, `step` elements apart, of `span` values each."""

    var rest = span % width
    var mask = first_lanes[width](rest)

    @always_inline
    def copy[whole: Int, masked: Bool]() {imm}:
        var a = source
        var b = target
        for _ in range(count):
            comptime for v in range(whole):
                b.unsafe_offset(v * width).unsafe_store(
                    a.unsafe_offset(v * width)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
            comptime if masked:
                var value = masked_load[width](
                    a.unsafe_offset(whole * width), mask, SIMD[dtype, width](0)
                )
                masked_store(
                    value.cast[acc_type](), b.unsafe_offset(whole * width), mask
                )
            a = a.unsafe_offset(step)
            b = b.unsafe_offset(pitch)

    comptime for whole in range(tile_vectors[dtype] + 1):
        if span // width == whole:
            if rest == 0:
                copy[whole, False]()
            else:
                copy[whole, True]()


@no_inline
def pack_columns[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    x: Ptr[dtype],
    problem: ConvolutionProblem,
    runs: Runs,
    group: Int,
    pixel: Int,
    count: Int,
    column: Int,
    length: Int,
    pitch: Int,
) -> Bool:
    """Packs columns [column, column + length) of pixels [pixel, pixel + count) into packed[count][pitch]; returns False
    if all of them are padding."""
    var inside_input = False
    if length < pitch:
        for m in range(count):
            _zero_run[acc_type, width](
                packed.unsafe_offset(m * pitch + length), pitch - length
            )
    var first = column
    while first < column + length:
        var run = first // runs.length
        var inside = first % runs.length
        var span = min(runs.length - inside, column + length - first)
        var s = 0
        var r: Int
        var t: Int
        if runs.merged:
            r = run % problem.r
            t = run // problem.r
        else:
            s = run % problem.s
            r = run // problem.s % problem.r
            t = run // problem.s // problem.r
        var q = pixel % problem.q
        var rest = pixel // problem.q
        var p = rest % problem.p
        rest //= problem.p
        var o = rest % problem.o
        var n = rest // problem.o
        # The columns of W whose pixels hold the whole span, where their row lies inside.
        var first_whole = 0
        var last_whole = problem.w - 1
        if runs.merged:
            first_whole = -(inside // problem.c)
            last_whole = problem.w - ceildiv(inside + span, problem.c)
        var shift = s * problem.dilation_w - problem.pad_w
        var whole_low = max(0, ceildiv(first_whole - shift, problem.stride_w))
        var whole_high = (last_whole - shift) // problem.stride_w + 1
        var target = packed.unsafe_offset(first - column)
        var m = 0
        while m < count:
            var row = min(problem.q - q, count - m)
            var d = (
                o * problem.stride_d + t * problem.dilation_d - problem.pad_d
            )
            var h = (
                p * problem.stride_h + r * problem.dilation_h - problem.pad_h
            )
            var line = ((n * problem.d + d) * problem.h + h) * problem.w

            @always_inline
            def edge(q: Int, target: Ptr[acc_type]) {mut inside_input, imm}:
                """Copies a pixel that may lack a part of the span."""
                var col = q * problem.stride_w + shift
                # Values of the run that lie inside the input, counted from the run's start.
                var low = 0
                var high = 0
                if runs.merged:
                    low = max(0, -col) * problem.c
                    high = min(problem.s, problem.w - col) * problem.c
                elif col >= 0 and col < problem.w:
                    high = runs.length
                low = min(max(low, inside), inside + span)
                high = max(low, min(high, inside + span))
                inside_input = inside_input or high > low
                _zero_run[acc_type, width](target, low - inside)
                _copy_run[dtype, acc_type, width](
                    target.unsafe_offset(low - inside),
                    x.unsafe_offset(
                        (line + col) * problem.c
                        + group * problem.group_c()
                        + low
                    ),
                    high - low,
                )
                _zero_run[acc_type, width](
                    target.unsafe_offset(high - inside), inside + span - high
                )

            if d < 0 or d >= problem.d or h < 0 or h >= problem.h:
                for i in range(row):
                    _zero_run[acc_type, width](
                        target.unsafe_offset(i * pitch), span
                    )
            else:
                var low = min(row, max(0, whole_low - q))
                var high = max(low, min(row, whole_high - q))
                for i in range(low):
                    edge(q + i, target.unsafe_offset(i * pitch))
                if high > low:
                    inside_input = True
                    _copy_spans[dtype, acc_type, width](
                        target.unsafe_offset(low * pitch),
                        pitch,
                        x.unsafe_offset(
                            (line + (q + low) * problem.stride_w + shift)
                            * problem.c
                            + group * problem.group_c()
                            + inside
                        ),
                        problem.stride_w * problem.c,
                        high - low,
                        span,
                    )
                for i in range(high, row):
                    edge(q + i, target.unsafe_offset(i * pitch))
            target = target.unsafe_offset(row * pitch)
            m += row
            q = 0
            p += 1
            if p == problem.p:
                p = 0
                o += 1
                if o == problem.o:
                    o = 0
                    n += 1
        first += span
    return inside_input


@no_inline
def pack_gradient_rows[
    dtype: DType
](
    packed: Ptr[packed_type[dtype]],
    dy: Ptr[dtype],
    k: Int,
    channels: Int,
    pixel: Int,
    count: Int,
):
    """Packs the `channels` channels of dy, from `dy` on, as packed[tile][pixel][row], zero beyond the last.
    """
    comptime rows = tile_rows[dtype]
    var stored = packed_length[dtype](count)
    var tiles = channels // rows
    # Some tiles at once: dy is read in whole cache lines.
    for start in range(0, tiles, _TILES_TOGETHER):
        var some = min(_TILES_TOGETHER, tiles - start)
        for m in range(count):
            var source = dy.unsafe_offset((pixel + m) * k + start * rows)
            var target = packed.unsafe_offset((start * stored + m) * rows)
            # The next block's, while this one is multiplied.
            for part in range(0, some, _tiles_of_a_line[dtype]):
                prefetch[PrefetchOptions().for_read().low_locality()](
                    source.unsafe_offset(count * k + part * rows)
                )
            for tile in range(some):
                target.unsafe_offset(tile * stored * rows).unsafe_store(
                    source.unsafe_offset(tile * rows)
                    .unsafe_load[width=rows]()
                    .cast[packed_type[dtype]]()
                )
    for tile in range(tiles):
        pair_rows[dtype](
            packed.unsafe_offset(tile * stored * rows), count, rows
        )
    var left = channels - tiles * rows
    if left > 0:
        var source = dy.unsafe_offset(pixel * k + tiles * rows)
        var target = packed.unsafe_offset(tiles * stored * rows)
        var mask = first_lanes[rows](left)
        for m in range(count):
            target.unsafe_offset(m * rows).unsafe_store(
                masked_load[rows](
                    source.unsafe_offset(m * k), mask, SIMD[dtype, rows](0)
                ).cast[packed_type[dtype]]()
            )
        pair_rows[dtype](target, count, rows)
    comptime if has_tiles[dtype]:
        turn_rows[dtype](packed, ceildiv(channels, rows) * stored)
