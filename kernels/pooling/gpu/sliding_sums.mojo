"""Gradient of average pooling on a GPU over windows of 3x3x3 that move by one pixel, by sliding sums; and over planes
of rows of any length, for windows of 3x3.

A thread owns a tile of one slab, RH rows by TW columns by V channels, and walks down D. Of each slab of windows it
takes the sums over W and then over H of those that reach into its tile, once, and keeps the two slabs before it: a
pixel is the sum of three; of one over a plane. So every window is loaded once for each tile that it reaches into, and
what neighbouring tiles load too comes from the first-level cache.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.pointer import Ptr
from ..kernel import NO_ARGMAX, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .primitives import fetch
from .params import LIMIT_32, PoolingParams, uniform_scale

comptime THREADS = 128
comptime SATURATING_THREADS = 1 << 17
"""Threads that keep a large GPU busy: strips are cut shorter until there are as many."""
comptime K = 3
"""The window's extent along every axis."""
comptime PADDING = 1
"""Padding along every axis."""


comptime MIN_STRIP_SLABS = 8
"""Slabs of a strip, at least: each begins with two that another adds up too."""


def strip_length(extent: Int, beside: Int, enough: Int) -> Int:
    """Returns how many slabs of `extent` a strip takes: the extent is halved repeatedly, down to the shortest strip,
    while there are fewer threads than `enough`, with `beside` threads for each strip.
    """
    var length = extent
    while (
        length > MIN_STRIP_SLABS and beside * ceildiv(extent, length) < enough
    ):
        length = ceildiv(length, 2)
    return length


@fieldwise_init
struct SlidingSumsPlan(KernelArgument):
    """The division of dx into strips of D of each sample, of tiles by V channels.
    """

    var total: Int32
    """Threads."""
    var slabs: Int32
    """Slabs of a strip."""
    var by_columns: Divisor
    """Divides by the tiles side by side."""
    var by_rows: Divisor
    """Divides by the tiles below each other."""
    var by_strips: Divisor

    def __init__(out self, p: PoolingProblem, tw: Int, rh: Int, vector: Int):
        var columns = ceildiv(Int(p.w.input), tw)
        var rows = ceildiv(Int(p.h.input), rh)
        var vectors = Int(p.channels) // vector
        var tiles = columns * rows * vectors * Int(p.batch)
        # Each strip begins with two slabs of windows that the one before it has loaded too.
        var slabs = strip_length(Int(p.d.input), tiles, SATURATING_THREADS)
        var strips = ceildiv(Int(p.d.input), slabs)
        self.total = Int32(min(tiles * strips, LIMIT_32 - 1))
        self.slabs = Int32(slabs)
        self.by_columns = Divisor(columns)
        self.by_rows = Divisor(rows)
        self.by_strips = Divisor(strips)


@fieldwise_init
struct SlidingShape(TrivialRegisterPassable):
    """The part of a problem that is known at compile time: a thread's columns, rows and channels, slabs under a window,
    whether rows are whole vectors of columns (of one channel), and whether one divisor serves all windows.
    """

    var columns: Int
    var rows: Int
    var channels: Int
    var kd: Int
    var aligned: Bool
    var uniform: Bool

    def together(self) -> Bool:
        """Returns whether one channel's columns are loaded and stored together.
        """
        return self.channels == 1 and self.aligned


struct SlabWindows[S: SlidingShape](Movable):
    """The rows and columns of windows above a tile: where they lie in a slab, whether they are there, and, where
    divisors differ, the contribution of each to one over its divisor."""

    comptime ROWS = Self.S.rows + K - 1
    comptime COLUMNS = Self.S.columns + K - 1
    comptime FIRST = PADDING - K + 1
    """The first column of windows, counted from the tile's."""

    var row_at: Array[Int32, Self.ROWS]
    var live: Array[Bool, Self.ROWS]
    var columns: Array[Int32, Self.COLUMNS]
    var inside: Array[Bool, Self.COLUMNS]
    var scale_w: Array[Float32, Self.COLUMNS]
    var scale_h: Array[Float32, Self.ROWS]

    @always_inline
    def __init__(out self, p: PoolingParams, w0: Int32, h0: Int32):
        self.row_at = Array[Int32, Self.ROWS](fill=0)
        self.live = Array[Bool, Self.ROWS](fill=False)
        self.columns = Array[Int32, Self.COLUMNS](fill=0)
        self.inside = Array[Bool, Self.COLUMNS](fill=False)
        self.scale_w = Array[Float32, Self.COLUMNS](fill=1)
        self.scale_h = Array[Float32, Self.ROWS](fill=1)
        var include = p.include_pad != 0
        comptime if not Self.S.uniform:
            comptime for i in range(Self.COLUMNS):
                self.scale_w[i] = p.w.scale[False](
                    w0 + Int32(Self.FIRST + i), include
                )
            comptime for r in range(Self.ROWS):
                self.scale_h[r] = p.h.scale[False](
                    h0 + p.h.padding + Int32(r - (K - 1)), include
                )
        comptime for r in range(Self.ROWS):
            var oh = h0 + p.h.padding + Int32(r - (K - 1))
            self.live[r] = oh >= 0 and oh < p.h.output
            self.row_at[r] = (
                min(max(oh, 0), p.h.output - 1) * p.w.output * p.channels
            )
        comptime for i in range(Self.COLUMNS):
            var ow = w0 + Int32(Self.FIRST + i)
            self.inside[i] = ow >= 0 and ow < p.w.output
            self.columns[i] = min(max(ow, 0), p.w.output - 1)


@always_inline
def _fetch_slab[
    dtype: DType, S: SlidingShape
](dy_d: Ptr[dtype], above: SlabWindows[S], p: PoolingParams, w0: Int32):
    """Prefetches a slab of windows; tiles beside this one prefetch its surroundings.
    """
    comptime for r in range(K - 1, S.rows + K - 1):
        comptime if S.together():
            fetch(dy_d.unsafe_offset(Int(above.row_at[r - 1] + w0)))
        else:
            comptime for j in range(S.columns):
                fetch(
                    dy_d.unsafe_offset(
                        Int(
                            above.row_at[r - 1]
                            + above.columns[j - above.FIRST] * p.channels
                        )
                    )
                )


@always_inline
def _box_sums[
    dtype: DType, S: SlidingShape
](
    dy_d: Ptr[dtype],
    above: SlabWindows[S],
    p: PoolingParams,
    w0: Int32,
    scale_d: Float32,
) -> Array[SIMD[DType.float32, S.channels], S.rows * S.columns]:
    """Returns for each pixel the sum over a slab's windows above it."""
    comptime TW = S.columns
    comptime V = S.channels
    comptime N = above.COLUMNS
    comptime FIRST = above.FIRST
    comptime Sums = SIMD[DType.float32, V]
    var new = Array[Sums, S.rows * TW](fill=Sums(0))
    # No load hangs on a condition, so that all are under way together; what lies outside is dropped after.
    var rows = Array[Array[SIMD[dtype, V], N], above.ROWS](
        fill=Array[SIMD[dtype, V], N](fill=SIMD[dtype, V](0))
    )
    comptime for r in range(above.ROWS):
        var row = dy_d.unsafe_offset(Int(above.row_at[r]))
        comptime if S.together():
            comptime bytes = TW * size_of[dtype]()
            var run = row.unsafe_load[width=TW, alignment=bytes](Int(w0))
            comptime for j in range(TW):
                rows[r][j - FIRST] = SIMD[dtype, V](run[j])
        comptime for i in range(N):
            comptime if not S.together() or i + FIRST < 0 or i + FIRST >= TW:
                comptime bytes = V * size_of[dtype]()
                rows[r][i] = row.unsafe_load[width=V, alignment=bytes](
                    Int(above.columns[i] * p.channels)
                )
    comptime for r in range(above.ROWS):
        var values = Array[Sums, N](fill=Sums(0))
        comptime for i in range(N):
            var value = rows[r][i].cast[DType.float32]()
            values[i] = value if above.live[r] and above.inside[i] else Sums(0)
            comptime if not S.uniform:
                values[i] *= scale_d * above.scale_h[r] * above.scale_w[i]
        comptime for j in range(TW):
            var sum = values[j] + values[j + 1] + values[j + 2]
            comptime for up in range(K):
                comptime if r - up >= 0 and r - up < S.rows:
                    new[(r - up) * TW + j] += sum
    return new^


@always_inline
def _store_row[
    dtype: DType, V: Int, TW: Int, //, S: SlidingShape
](
    dx: Ptr[dtype],
    sums: Array[SIMD[DType.float32, V], TW],
    p: PoolingParams,
    w0: Int32,
):
    """A row of a tile, as far as pixels are there."""
    comptime if S.together():
        var values = SIMD[DType.float32, TW](0)
        comptime for j in range(TW):
            values[j] = sums[j][0]
        dx.unsafe_store[alignment=TW * size_of[dtype]()](
            0, values.cast[dtype]()
        )
    else:
        comptime for j in range(TW):
            if w0 + Int32(j) < p.w.input:
                dx.unsafe_store[alignment=V * size_of[dtype]()](
                    j * Int(p.channels), sums[j].cast[dtype]()
                )


@always_inline
def slide_tile[
    dtype: DType, S: SlidingShape
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    p: PoolingParams,
    m: SlidingSumsPlan,
    flat: Int32,
):
    """The work of thread `flat`."""
    comptime TW = S.columns
    comptime RH = S.rows
    comptime V = S.channels
    comptime Sums = SIMD[DType.float32, V]
    comptime Tile = Array[Sums, RH * TW]
    # Slabs that are fetched into the second-level cache before they are loaded, as measured on one H200.
    comptime AHEAD = 1 if size_of[dtype]() < 4 else 0
    # Channels lie beside each other, then columns, then rows.
    var pixels, vector = p.by_vectors.divide(flat)
    var place, tile = m.by_columns.divide(pixels)
    var unit, tile_row = m.by_rows.divide(place)
    var n, strip = m.by_strips.divide(unit)
    var c = vector * Int32(V)
    var w0 = tile * Int32(TW)
    var h0 = tile_row * Int32(RH)
    var d0 = strip * m.slabs
    var d1 = min(d0 + m.slabs, p.d.input)
    var dy_n = dy.unsafe_offset(
        Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(c)
    )
    var dx_n = dx.unsafe_offset(
        Int(n) * Int(p.input_plane()) * Int(p.channels) + Int(c)
    )
    var above = SlabWindows[S](p, w0, h0)
    var older = Tile(fill=Sums(0))
    var old = Tile(fill=Sums(0))
    for od in range(d0 + p.d.padding - Int32(S.kd - 1), d1 + p.d.padding):
        var new = Tile(fill=Sums(0))
        if od >= 0 and od < p.d.output:
            var slab = Int(p.h.output * p.w.output * p.channels)
            var dy_d = dy_n.unsafe_offset(
                Int(od * p.h.output * p.w.output * p.channels)
            )
            var scale_d = Float32(1)
            comptime if not S.uniform:
                scale_d = p.d.scale[False](od, p.include_pad != 0)
            comptime if AHEAD > 0:
                if od + Int32(AHEAD) < p.d.output:
                    _fetch_slab(dy_d.unsafe_offset(AHEAD * slab), above, p, w0)
            new = _box_sums(dy_d, above, p, w0, scale_d)
        var d = od - p.d.padding
        if d >= d0:
            comptime for r in range(RH):
                var h = h0 + Int32(r)
                if h < p.h.input:
                    var at = Int(
                        ((d * p.h.input + h) * p.w.input + w0) * p.channels
                    )
                    var sums = Array[Sums, TW](fill=Sums(0))
                    comptime for j in range(TW):
                        comptime i = r * TW + j
                        sums[j] = new[i]
                        comptime if S.kd == K:
                            sums[j] += older[i] + old[i]
                        comptime if S.uniform:
                            sums[j] *= p.scale
                    _store_row[S](dx_n.unsafe_offset(at), sums, p, w0)
        comptime for i in range(RH * TW):
            older[i] = old[i]
            old[i] = new[i]


@__name(
    t"pool_dgrad_sliding_sums_{dtype}_{S.columns}x{S.rows}x{S.channels}_d{S.kd}_a{S.aligned}_u{S.uniform}"
)
def avg_pool_dgrad_sliding_sums[
    dtype: DType, S: SlidingShape
](dx: Ptr[dtype], dy: Ptr[dtype], p: PoolingParams, m: SlidingSumsPlan):
    var flat = Int32(block_idx.x) * THREADS + Int32(thread_idx.x)
    if flat < m.total:
        slide_tile[dtype, S](dx, dy, p, m, flat)


comptime CHANNELS = 4
"""Channels of a thread's vector, or columns where there is one channel to a pixel."""


struct SlidingSums(PoolingKernel):
    comptime NAME: StaticString = "sliding_sums"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax == NO_ARGMAX and not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if (
            not p.h.is_window(K, 1)
            or not p.w.is_window(K, 1)
            or Int(p.w.padding) != PADDING
        ):
            return String("windows are not 3x3 that move by one")
        if _is_flat(p):
            if p.channels > 1:
                return String("channels lie between a plane's pixels")
        elif not p.d.is_window(K, 1):
            return String("windows are not 3x3x3 that move by one")
        elif p.channels == 1:
            if Int(p.w.input) % CHANNELS != 0:
                return String("rows are no whole vectors")
        elif Int(p.channels) % CHANNELS != 0:
            return String("channels are no whole vectors")
        # Its smallest tile is four elements.
        if p.input_size() >= LIMIT_32:
            return String("pixels are too many for 32 bits")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        var scale = uniform_scale[argmax, False](p)

        @always_inline
        def run[S: SlidingShape]() raises {imm}:
            var cut = SlidingSumsPlan(p, S.columns, S.rows, S.channels)
            ctx.enqueue_function[avg_pool_dgrad_sliding_sums[dtype, S]](
                t.result,
                t.source,
                PoolingParams(
                    p, extent_d=p.d.input, vector=S.channels, scale=scale
                ),
                cut,
                grid_dim=ceildiv(Int(cut.total), THREADS),
                block_dim=THREADS,
            )

        comptime for uniform in [True, False]:
            if (scale != 0) == uniform:
                if _is_flat(p):
                    run[SlidingShape(4, 4, 1, 1, False, uniform)]()
                elif p.channels == 1:
                    run[SlidingShape(CHANNELS, 4, 1, K, True, uniform)]()
                else:
                    run[SlidingShape(2, 2, CHANNELS, K, True, uniform)]()


def _is_flat(p: PoolingProblem) -> Bool:
    """Returns whether windows lie in one slab each."""
    return p.d.is_window(1, 1) and p.d.padding == 0
