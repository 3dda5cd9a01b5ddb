"""The walk of gpu_tiles.mojo with the next row's loads under way while a row of windows is added, for maxima whose
windows overlap.

Sums never move: the rows of sums stand for other pixels after each row of windows, and the compiler writes out as many
rows of windows as it takes until they stand for the same again. No load hangs on a condition but those at the edges of
a run: windows that are not there repeat others and are dropped after. This takes about half of the instructions of
the other walk and more registers, so it pays where entries are small.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    thread_idx,
)
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .direct import Data
from .gpu_problem import GpuProblem
from .gpu_tiles import BLOCK, TileShape, Tiles, store_row
from .gpu_windows import (
    WindowRow,
    add_tap,
    add_where,
    fits_word,
    narrow,
    one_bit,
)


def ahead_blocks(S: TileShape, data: Int, entry: Int) -> Int:
    """Blocks that a multiprocessor shall hold: otherwise the compiler has so many rows' loads under way at once that
    few fit. `data` and `entry` are the bytes of a window's gradient and entry.
    """
    var row = S.windows() * S.channels * (data + entry) // 4
    var registers = (
        S.kept() * S.columns * S.channels
        + 2 * row
        + S.windows() * (S.channels + 2)
        + 48
    )
    return max(65536 // (BLOCK * ((registers + 7) // 8 * 8)), 1)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK)),
    `nvvm.minctasm`=SIMDLength(
        ahead_blocks(S, size_of[dtype](), size_of[index]())
    ),
)
def max_pool_dgrad_ahead[
    dtype: DType,
    index: DType,
    S: TileShape,
    planes: Bool,
    offsets: Bool,
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Tiles,
):
    """One thread's item in one unit of dx. Planes have rows of whole tiles."""
    var rest, block = t.by_blocks.divmod(Int32(block_idx.x))
    var item = block * Int32(block_dim.x) + Int32(thread_idx.x)
    var unit = rest * Int32(block_dim.y) + Int32(thread_idx.y)
    if item >= t.items or unit >= t.units:
        return
    var strip: Int32
    var slab: Int32
    comptime if S.ld > 1:
        strip, slab = t.by_inner.divmod(unit)
    else:
        slab, strip = t.by_inner.divmod(unit)
    comptime KH = S.kh
    comptime SH = S.sh
    comptime KW = S.kw
    comptime TW = S.columns
    comptime V = S.channels
    comptime LD = S.ld
    comptime ROW = S.run()
    comptime FIRST = S.first()
    comptime N = S.windows()
    comptime ABOVE = S.above()
    comptime KEPT = S.kept()
    comptime Sums = SIMD[DType.float32, V]
    comptime Row = WindowRow[dtype, index, N, V, ROW]

    var place, lane = t.by_chunk.divmod(item)
    var chunk, tile = t.by_tiles.divmod(place)
    var c = (chunk * t.by_chunk.divisor + lane) * Int32(V)
    var column = tile * Int32(TW)
    var first_group = strip * t.groups
    var end_group = min(first_group + t.groups, t.all_groups)
    # The rows that this strip stores.
    var first_h = max(p.h.origin_by[SH](first_group), 0)
    var stored = UInt32(
        max(min(p.h.origin_by[SH](end_group), p.h.input) - first_h, 0)
    )

    # Whole vectors of windows begin at the thread's own; elsewhere windows that are not there repeat others.
    var start = tile * Int32(ROW)
    var places = Array[Int32, N](fill=0)
    var inside = Array[Bool, N](fill=True)
    comptime for i in range(N):
        var o = start + Int32(FIRST + i)
        inside[i] = o >= 0 and o < p.w.output
        comptime if planes:
            places[i] = Int32(FIRST + i)
        else:
            places[i] = min(max(o, 0), p.w.output - 1) * p.channels
    comptime if planes:
        start = min(start, p.w.output - Int32(ROW))
    else:
        start = 0

    var n, d = p.d.by_input.divmod(slab)
    var above_d = p.d.outputs_over[False](d)
    var steps = above_d[1] - above_d[0]
    var dx_rows = dx.unsafe_offset(
        Int(slab) * Int(p.h.input * p.w.input * p.channels)
    )
    var group = max(first_group - Int32(ABOVE - 1), 0)
    var row_size = p.w.output * p.channels
    var slab_size = p.h.output * row_size
    var sample = (
        Int(n) * Int(p.output_plane()) * Int(p.channels)
        + Int(
            (
                min(above_d[0], p.d.output - 1) * p.h.output
                + min(group, p.h.output - 1)
            )
            * row_size
        )
        + Int(start + c)
    )
    var dy_row = dy.unsafe_offset(sample)
    var found_row = indices.unsafe_offset(sample)

    # By offset: the number of the slab's first tap; by index: that of the tile's first pixel in the plane.
    var base = Int32(0)
    comptime if offsets:
        base = (d - p.d.origin(above_d[0])) * p.h.window * Int32(KW)
    elif KH > 1:
        # Rows of a 1-D problem are no rows of a plane.
        base = d * p.h.input * p.w.input

    var sums = Array[Sums, KEPT * TW](fill=Sums(0))
    var row = Row()
    row.load[first=FIRST, aligned=planes](dy_row, found_row, places, inside)
    while group < end_group:
        comptime for turn in range(S.turns()):
            var top = p.h.origin_by[SH](group)
            comptime for step in range(LD):
                var now = row.copy()
                # To the next slab of windows or the first of the next row, and no further than the last.
                var hop = row_size if group + 1 < p.h.output else 0
                comptime if LD > 1:
                    comptime if step + 1 < LD:
                        hop = slab_size if Int32(step + 1) < steps else 0
                    else:
                        hop -= max(steps - 1, 0) * slab_size
                dy_row = dy_row.unsafe_offset(Int(hop))
                found_row = found_row.unsafe_offset(Int(hop))
                row.load[first=FIRST, aligned=planes](
                    dy_row, found_row, places, inside
                )
                if group < p.h.output and Int32(step) < steps:
                    var origin = base
                    comptime if offsets:
                        comptime if step > 0:
                            origin -= (
                                Int32(step)
                                * p.d.stride()
                                * p.h.window
                                * Int32(KW)
                            )
                    else:
                        origin += column
                        comptime if KH > 1:
                            origin += top * p.w.input
                    comptime for i in range(N):
                        _add_window[S=S, i=i, turn=turn, offsets=offsets](
                            sums,
                            now.gradient[i, first=FIRST, aligned=planes](),
                            now.entries[i, first=FIRST, aligned=planes](),
                            inside[i],
                            origin,
                            p.w.input,
                        )
            comptime for r in range(SH):
                var h = top + Int32(r)
                comptime own = S.place[r, turn]() * TW
                if UInt32(h - first_h) < stored:
                    store_row[TW=TW, planes=planes, staged=False, own=own](
                        dx_rows, sums, h, column, c, p
                    )
                comptime for j in range(TW):
                    sums[own + j] = Sums(0)
            group += 1


@always_inline
def _add_window[
    index: DType,
    V: Int,
    M: Int,
    //,
    *,
    S: TileShape,
    i: Int,
    turn: Int,
    offsets: Bool,
](
    mut sums: Array[SIMD[DType.float32, V], M],
    g: SIMD[DType.float32, V],
    found: SIMD[index, V],
    inside: Bool,
    origin: Int32,
    width: Int32,
):
    """Adds the gradient of the tile's window `i` to the pixels that its entries name.
    """
    comptime KW = S.kw
    comptime TW = S.columns
    comptime LEFT = (S.first() + i) * S.sw - S.pw
    comptime if S.overlaps() and offsets:
        var numbers = found.cast[DType.int32]() - origin
        comptime for v in range(V):
            comptime for word in range((S.kh * KW + 31) // 32):
                # The tests of one window side by side: only those share an instruction.
                var bits = one_bit(numbers[v] - Int32(32 * word), inside)
                comptime for tap in range(
                    32 * word, min(32 * word + 32, S.kh * KW)
                ):
                    comptime j = LEFT + tap % KW * S.dilation
                    comptime if j >= 0 and j < TW:
                        comptime at = S.place[
                            tap // KW * S.dilation, turn
                        ]() * TW + j
                        sums[at][v] = add_tap[tap % 32](sums[at][v], bits, g[v])
    elif S.overlaps() and KW > 2:
        # One bit for each pixel of a row under the window.
        comptime begin = max(LEFT, 0)
        var numbers = found.cast[DType.int32]() - (origin + Int32(begin))
        var live = fits_word[index, V](found, inside)
        comptime for v in range(V):
            comptime for r in range(S.kh):
                var bits = one_bit(
                    numbers[v] - Int32(r * S.dilation) * width, Bool(live[v])
                )
                comptime for tap in range(KW):
                    comptime j = LEFT + tap * S.dilation
                    comptime if j >= 0 and j < TW:
                        comptime at = S.place[r * S.dilation, turn]() * TW + j
                        sums[at][v] = add_tap[j - begin](
                            sums[at][v], bits, g[v]
                        )
    else:
        var numbers = narrow(found)
        if not inside:
            numbers = SIMD[DType.int32, V](-1)
        numbers -= origin
        comptime for r in range(S.kh):
            comptime for tap in range(KW):
                comptime j = LEFT + tap * S.dilation
                comptime if j >= 0 and j < TW:
                    comptime at = S.place[r * S.dilation, turn]() * TW + j
                    var wanted = Int32(r * S.dilation) * width + Int32(j)
                    comptime if offsets:
                        wanted = Int32(r * KW + tap)
                    comptime if S.overlaps():
                        sums[at] = add_where(sums[at], numbers, wanted, g)
                    else:
                        sums[at] = numbers.eq(
                            SIMD[DType.int32, V](wanted)
                        ).select(g, SIMD[DType.float32, V](0))
