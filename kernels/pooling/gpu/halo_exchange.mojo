"""Pooling gradients on a GPU for overlapping windows that networks use, by halo exchange: lanes hand each other the
sums that their windows add beyond their own pixels.

A thread owns a tile of dx, some columns of one row (contiguous) or by a vector of channels (channels-last) of one or
more D slabs, and walks down H. It takes the windows that start in its tile and no others: their contributions to the
columns beside it are kept in columns of its own, and once no later window reaches a row, lanes whose tiles touch hand
those sums over. So every window of a row is loaded and looked at by one thread, at the price of two exchanges for each
column and channel on either side. Sums never move, and the first window that reaches a pixel sets its sum. Lanes of one
row of dx form a team; a warp holds several.
"""

import max.gpu.primitives.warp as warp
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.host import DeviceAttribute, DeviceContext
from std.sys import size_of
from std.sys.info import is_nvidia_gpu
from std.utils.static_tuple import StaticTuple

from ...common.pointer import Ptr
from ..kernel import (
    INDEX,
    NO_ARGMAX,
    OFFSET,
    PoolingTensors,
    PoolingKernel,
    argmax_bytes,
)
from ..problem import PoolingProblem
from .halo_exchange_lane import Lane, LoadedRow
from .halo_exchange_plan import (
    THREADS,
    HaloShape,
    Teams,
    halo_blocks,
    halo_shapes,
    halo_takes,
    plan_teams,
)
from .params import PoolingParams, fits_32_bits, uniform_scale
from .primitives import (
    add_if,
    add_tap,
    fits_word,
    one_bit,
    set_tap,
    twice,
)


struct WindowsAbove[S: HaloShape, count: Int](Movable):
    """The windows that start in a thread's tile, in the slabs above its own."""

    var places: Array[Int32, Self.count]
    """The place in a row of windows that each load reads."""
    var ones: Array[Int32, Self.S.run()]
    """One for each window, and zero for windows that do not exist."""
    var slab_at: Array[Int32, Self.S.slabs()]
    var slab_there: Array[Int32, Self.S.slabs()]
    var scale_w: Array[Float32, Self.S.run()]
    """For averages: one over each window's contribution to its divisor."""
    var scale_d: Array[Float32, Self.S.slabs()]

    @always_inline
    def __init__(out self, p: PoolingParams, start: Int32, c: Int32, d: Int32):
        """Finds the windows from window `start` of a row on, of channel `c` and slab `d`.
        """
        comptime ROW = Self.S.run()
        comptime ND = Self.S.slabs()
        self.places = Array[Int32, Self.count](fill=0)
        self.ones = Array[Int32, ROW](fill=1)
        comptime for i in range(Self.count):
            self.places[i] = (
                min(max(start + Int32(i), 0), p.w.output - 1) * p.channels + c
            )
        comptime for i in range(ROW):
            self.ones[i] = Int32(1) if UInt32(start + Int32(i)) < UInt32(
                p.w.output
            ) else Int32(0)
        comptime if Self.S.channels == 1:
            self.places[0] = min(start, p.w.output - Int32(ROW))
        self.slab_at = Array[Int32, ND](fill=0)
        self.slab_there = Array[Int32, ND](fill=1)
        var row_size = p.w.output * p.channels
        comptime for step in range(ND):
            var od = d // Int32(Self.S.sd) + Int32(Self.S.first_slab() + step)
            self.slab_there[step] = Int32(1) if UInt32(od) < UInt32(
                p.d.output
            ) else Int32(0)
            self.slab_at[step] = (
                min(max(od, 0), p.d.output - 1) * p.h.output * row_size
            )
        self.scale_w = Array[Float32, ROW](fill=p.scale)
        self.scale_d = Array[Float32, ND](fill=1)

    @always_inline
    def weigh(
        mut self, p: PoolingParams, start: Int32, d: Int32, include: Bool
    ):
        """Finds the scales of averages that differ."""
        comptime for i in range(Self.S.run()):
            self.scale_w[i] = p.w.scale[False](start + Int32(i), include)
        comptime if Self.S.kd > 1:
            comptime for step in range(Self.S.slabs()):
                self.scale_d[step] = p.d.scale[False](
                    d // Int32(Self.S.sd) + Int32(Self.S.first_slab() + step),
                    include,
                )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(
        halo_blocks(S, size_of[dtype](), argmax_bytes[argmax]())
    ),
)
@__name(
    t"pool_dgrad_halo_exchange_{dtype}_{argmax}_d{S.kd}s{S.sd}p{S.pd}_h{S.kh}s{S.sh}_w{S.kw}s{S.sw}p{S.pw}_{S.columns}x{S.channels}x{S.depth}_a{S.ahead}"
)
def pool_dgrad_halo_exchange[
    dtype: DType, argmax: DType, S: HaloShape
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    t: Teams,
):
    """Computes one thread's tile in one strip."""
    comptime vector = S.channels == 1
    comptime V = S.channels
    comptime TW = S.columns
    comptime ROW = S.run()
    comptime ND = S.slabs()
    comptime AHEAD = S.ahead
    comptime AT = S.pw
    comptime Sums = SIMD[DType.float32, V]
    comptime Row = LoadedRow[dtype, argmax, S]

    var me = Lane.of[S](p, t)
    var n = me.n
    var tile = me.tile
    var strip = me.strip
    var c = me.c
    var d = me.slab * Int32(S.depth)
    var has_left = me.has_left
    var has_right = me.has_right
    var column = tile * Int32(TW) + me.moved

    # The rows that this strip stores.
    var first_group, end_group = t.stored[S](strip)
    var first_h = max(p.h.origin_by[S.sh](first_group), 0)
    var stored = UInt32(
        max(min(p.h.origin_by[S.sh](end_group), p.h.input) - first_h, 0)
    )
    if not me.live:
        stored = 0

    var row_size = p.w.output * p.channels
    var start = tile * Int32(ROW)
    var above = WindowsAbove[S, Row.count](p, start, c, d)
    var sample = Int(n) * Int(p.output_plane()) * Int(p.channels)
    var dy_n = dy.unsafe_offset(sample)
    var argmaxes_n = argmaxes
    comptime if argmax != NO_ARGMAX:
        argmaxes_n = argmaxes.unsafe_offset(sample)
    var slab_size = Int(p.h.input * p.w.input * p.channels)
    var dx_slab = dx.unsafe_offset(
        (Int(n) * Int(p.d.input) + Int(d)) * slab_size
    )
    var dx_rows = dx_slab.unsafe_offset(Int(column * p.channels + c))
    var include = p.include_pad != 0
    comptime if argmax == NO_ARGMAX:
        if p.scale == 0:
            above.weigh(p, start, d, include)
    var sums = Array[Sums, S.depth * S.kept() * S.width()](fill=Sums(0))
    var rows = Array[Row, AHEAD * ND](fill=Row())
    var group = strip * t.groups
    # Rows that are not there, or another strip's, are read as the strip's last.
    var last_row = min(end_group, p.h.output) - 1
    comptime for k in range(AHEAD):
        var at = max(min(group + Int32(k), last_row), 0) * row_size
        comptime for step in range(ND):
            rows[k * ND + step].load(
                dy_n, argmaxes_n, at + above.slab_at[step], above.places
            )
    var left = t.rows
    while True:
        comptime for turn in range(S.turns()):
            var top = p.h.origin_by[S.sh](group)
            var row_there = Int32(1) if UInt32(group) < UInt32(
                p.h.output
            ) else Int32(0)
            var at = max(min(group + Int32(AHEAD), last_row), 0) * row_size
            # What no window reaches.
            comptime for r in range(S.kept() - S.sh, S.kept()):
                comptime for j in range(S.width()):
                    comptime if not S.reached(r, j):
                        comptime for ds in range(S.depth):
                            sums[S.sum_at(ds, r, turn, j)] = Sums(0)
            var totals = Array[Sums, S.depth * ROW](fill=Sums(0))
            comptime for step in range(ND):
                comptime slot = turn % AHEAD * ND + step
                var base = Int32(0)
                comptime if argmax == INDEX:
                    base = column
                    # Rows of a 1-D problem are no rows of a plane.
                    comptime if not S.is_line():
                        base += (d * p.h.input + top) * p.w.input
                var slab_row = row_there & above.slab_there[step]
                comptime if argmax == NO_ARGMAX:
                    var scale = Float32(1)
                    if p.scale == 0:
                        scale = (
                            p.h.scale[False](group, include)
                            * above.scale_d[step]
                        )
                    _add_to_totals[step=step](
                        totals, rows[slot], above, slab_row, scale
                    )
                else:
                    comptime for i in range(ROW):
                        add_window[S=S, step=step, i=i, turn=turn](
                            sums,
                            rows[slot].gradient[i](),
                            rows[slot].argmaxes[i](),
                            # Of a vector all of them or none.
                            slab_row & above.ones[0 if vector else i],
                            base,
                            p.w.input,
                            p.h.input,
                        )
                rows[slot].load(
                    dy_n, argmaxes_n, at + above.slab_at[step], above.places
                )
            comptime if argmax == NO_ARGMAX:
                add_totals[S=S, turn=turn](sums, totals)
            comptime for r in range(S.sh):
                var h = top + Int32(r)
                comptime for ds in range(S.depth):
                    exchange[S=S, own=S.sum_at(ds, r, turn, 0)](
                        sums, t.by_wide.value, has_left, has_right
                    )
                if UInt32(h - first_h) < stored:
                    _store_slabs[S=S, own=S.sum_at(0, r, turn, AT)](
                        dx_rows,
                        sums,
                        h * p.w.input,
                        column,
                        p,
                        d,
                        slab_size,
                    )
            group += 1
            # All lanes end together.
            left -= 1
            if left == 0:
                return


@always_inline
def _add_to_totals[
    dtype: DType,
    argmax: DType,
    S: HaloShape,
    count: Int,
    V: Int,
    N: Int,
    //,
    *,
    step: Int,
](
    mut totals: Array[SIMD[DType.float32, V], N],
    row: LoadedRow[dtype, argmax, S],
    above: WindowsAbove[S, count],
    row_there: Int32,
    scale: Float32,
):
    """Adds a row of averages' gradients, of slab `step` of windows, to the totals of the slabs that it reaches.
    """
    comptime for i in range(S.run()):
        # Of a vector all windows are there, or none.
        var there = row_there & above.ones[0 if S.channels == 1 else i]
        var value = rebind[SIMD[DType.float32, V]](row.gradient[i]()) * (
            scale * above.scale_w[i]
        )
        if there == 0:
            value = SIMD[DType.float32, V](0)
        comptime for ds in range(S.depth):
            comptime if S.reaches(step, ds):
                totals[ds * S.run() + i] += value


@always_inline
def exchange[
    V: Int, M: Int, //, *, S: HaloShape, own: Int
](
    mut sums: Array[SIMD[DType.float32, V], M],
    distance: Int32,
    has_left: Int32,
    has_right: Int32,
):
    """Exchanges a row's sums beyond the tile, of which the first has place `own`, with the tiles beside it, whose lanes
    are `distance` away: each lane adds the sums that it receives."""
    comptime for j in range(S.pw):
        comptime for v in range(V):
            comptime at = own + S.columns + j
            var given = warp.shuffle_down(sums[own + j][v], UInt32(distance))
            sums[at][v] = add_if(sums[at][v], given, has_right)
    comptime for j in range(S.right()):
        comptime for v in range(V):
            comptime at = own + S.pw + j
            var given = warp.shuffle_up(
                sums[at + S.columns][v], UInt32(distance)
            )
            sums[at][v] = add_if(sums[at][v], given, has_left)


@always_inline
def add_totals[
    V: Int, M: Int, N: Int, //, *, S: HaloShape, turn: Int
](
    mut sums: Array[SIMD[DType.float32, V], M],
    totals: Array[SIMD[DType.float32, V], N],
):
    """Adds a row of windows' totals for each column under it to the sums of all rows under it.
    """
    comptime for ds in range(S.depth):
        comptime for j in range(S.width()):
            var sum = SIMD[DType.float32, V](0)
            comptime for i in range(S.run()):
                comptime if S.covers(i, j):
                    sum += totals[ds * S.run() + i]
            comptime for r in range(S.kh):
                comptime at = S.sum_at(ds, r, turn, j)
                comptime if r >= S.kept() - S.sh:
                    sums[at] = sum
                else:
                    sums[at] += sum


@always_inline
def add_window[
    argmax: DType,
    V: Int,
    M: Int,
    //,
    *,
    S: HaloShape,
    step: Int,
    i: Int,
    turn: Int,
](
    mut sums: Array[SIMD[DType.float32, V], M],
    g: SIMD[DType.float32, V],
    found: SIMD[argmax, V],
    there: Int32,
    base: Int32,
    width: Int32,
    height: Int32,
):
    """Adds the gradient of the thread's window `i` to the pixels that its argmaxes name.
    """

    @always_inline
    def give[
        bit: Int, ds: Int, r: Int, kw: Int, v: Int
    ](bits: Int32) {mut sums, imm}:
        comptime at = S.sum_at(ds, r, turn, i * S.sw + kw)
        comptime if S.sets(step, ds, i, r, i * S.sw + kw):
            sums[at][v] = set_tap[bit](bits, g[v])
        else:
            sums[at][v] = add_tap[bit](sums[at][v], bits, g[v])

    comptime if argmax == OFFSET:
        comptime for v in range(V):
            comptime for word in range((S.taps() + 31) // 32):
                # The tests of one window side by side: only those share an instruction.
                var bits = one_bit(
                    there, found[v].cast[DType.int32]() - Int32(32 * word)
                )
                # Every eighth bit would cost a test of its own, and those after it another test of seven.
                var higher = twice(bits)
                comptime for ds in range(S.depth):
                    comptime if S.reaches(step, ds):
                        comptime first = S.tap(step, ds) * S.kh * S.kw
                        comptime for r in range(S.kh):
                            comptime for kw in range(S.kw):
                                comptime tap = first + r * S.kw + kw
                                comptime if tap // 32 != word:
                                    continue
                                comptime if (
                                    is_nvidia_gpu()
                                    and S.kh * S.kw <= 9
                                    and tap >= first + (7 - first) % 8
                                ):
                                    give[tap + 1, ds, r, kw, v](higher)
                                else:
                                    give[tap % 32, ds, r, kw, v](bits)
    else:
        # One bit for each pixel of a row under the window.
        var numbers = found.cast[DType.int32]() - (
            base + Int32(i * S.sw - S.pw)
        )
        var fits = fits_word[argmax, V](found, True)
        comptime for v in range(V):
            comptime for ds in range(S.depth):
                comptime if S.reaches(step, ds):
                    comptime for r in range(S.kh):
                        var bits = one_bit(
                            there if fits[v] else Int32(0),
                            numbers[v]
                            - (Int32(ds) * height + Int32(r)) * width,
                        )
                        comptime for kw in range(S.kw):
                            give[kw, ds, r, kw, v](bits)


@always_inline
def _store_slabs[
    dtype: DType, V: Int, M: Int, //, *, S: HaloShape, own: Int
](
    dx: Ptr[dtype],
    sums: Array[SIMD[DType.float32, V], M],
    row: Int32,
    column: Int32,
    p: PoolingParams,
    d: Int32,
    slab_size: Int,
):
    """Row `row` of a thread's slabs, of which `d` is the first; place `own` has its first sum.
    """
    comptime for ds in range(S.depth):
        comptime at = own + ds * S.kept() * S.width()
        if S.depth == 1 or d + Int32(ds) < p.d.input:
            _store[S=S, own=at](
                dx.unsafe_offset(ds * slab_size),
                sums,
                row,
                column,
                p.w.input,
                p.channels,
            )


@always_inline
def _store[
    dtype: DType,
    V: Int,
    M: Int,
    //,
    *,
    S: HaloShape,
    own: Int,
](
    dx: Ptr[dtype],
    sums: Array[SIMD[DType.float32, V], M],
    row: Int32,
    column: Int32,
    width: Int32,
    channels: Int32,
):
    """Stores the part of a tile's sums of one row that lies in the row: the tile begins with `column`; dx points at
    that column in row 0."""
    comptime TW = S.columns
    comptime if V == 1:
        comptime piece = TW & -TW
        comptime for first in range(0, TW, piece):
            var values = SIMD[DType.float32, piece](0)
            comptime for j in range(piece):
                values[j] = sums[own + first + j][0]
            dx.unsafe_store[alignment=piece * size_of[dtype]()](
                Int(row) + first, values.cast[dtype]()
            )
    else:
        comptime bytes = V * size_of[dtype]()
        comptime for j in range(TW):
            if UInt32(column + Int32(j)) < UInt32(width):
                dx.unsafe_store[alignment=bytes](
                    Int((row + Int32(j)) * channels),
                    sums[own + j].cast[dtype](),
                )


comptime MAX_PIXELS = 1 << 33
"""Elements of dx: a team takes sixteen or more, and numbers of teams have 31 bits, one of them to spare."""


def _as_planes(p: PoolingProblem) -> PoolingProblem:
    """The problem as it is walked: the rows of a 1-D one are its batch."""
    return p.rows_together() if p.is_line() else p


struct HaloExchange[deep: Bool](PoolingKernel):
    """`deep` with windows over several slabs of D."""

    comptime NAME: StaticString = "halo_exchange"
    comptime SHAPES[dtype: DType, argmax: DType] = halo_shapes(
        size_of[dtype](), argmax_bytes[argmax](), Self.deep
    )

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        comptime SHAPES = Self.SHAPES[dtype, argmax]
        if not fits_32_bits(_as_planes(p)):
            return String("rows together have too many elements for 32 bits")
        if p.input_size() >= MAX_PIXELS:
            return String("there are too many teams for 32 bits")
        comptime for i in range(len(SHAPES)):
            comptime S = SHAPES[i]
            if halo_takes(S, p):
                return None
        return String("no shape has this window, or rows are no whole tiles")

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime SHAPES = Self.SHAPES[dtype, argmax]
        comptime for i in range(len(SHAPES)):
            comptime S = SHAPES[i]
            if halo_takes(S, p):
                _launch[S](ctx, t, p)
                return


def _launch[
    dtype: DType, argmax: DType, //, S: HaloShape
](
    ctx: DeviceContext, t: PoolingTensors[dtype, argmax], given: PoolingProblem
) raises:
    var p = _as_planes(given)
    var teams = plan_teams(
        S,
        p,
        data=size_of[dtype](),
        argmax=argmax_bytes[argmax](),
        processors=ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    comptime kernel = pool_dgrad_halo_exchange[dtype, argmax, S]
    ctx.enqueue_function[kernel](
        t.result,
        t.source,
        t.argmaxes,
        PoolingParams(
            p,
            extent_d=p.d.input,
            vector=S.channels,
            scale=uniform_scale[argmax, False](given),
        ),
        teams,
        grid_dim=teams.blocks(),
        block_dim=THREADS,
    )
