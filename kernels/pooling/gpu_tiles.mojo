"""Pooling gradients on a GPU for the windows that networks use, their sizes known to the compiler.

A thread owns a tile of dx: a few columns of one row and, channels-last, a vector of channels. It walks down H, one
row of windows at a time: loads the windows that reach into its columns, adds each dy where its index points, in
registers, and stores the rows that no later window reaches. Every dy and index is loaded once by the thread whose
columns it covers, halos apart; nothing is atomic, so the bits are the same on every run. An index that points outside
its window never equals a pixel that it is compared with.

What bounds these kernels beside the memory is how many threads fit (registers) and how many instructions an element
takes: two for each window and tap, a comparison and a predicated addition; by offset little more than one.
"""

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import stack_allocation
from std.sys import size_of

from .direct import Data
from .gpu_problem import FastDivisor, GpuProblem
from .gpu_windows import (
    Windows,
    add_tap,
    add_where,
    load_windows,
    narrow,
    one_bit,
)

comptime BLOCK = 128
"""Threads; small blocks leave no registers unused."""
comptime PIECE_BYTES = 32 * 1024
"""Shared memory for the whole slabs of a block."""


@fieldwise_init
struct TileShape(TrivialRegisterPassable):
    """What the compiler knows: the window on H and W, the most windows above a slab, a tile's columns and
    channels."""

    var kh: Int
    var sh: Int
    var kw: Int
    var sw: Int
    var pw: Int
    var ld: Int
    var columns: Int
    var channels: Int
    var ahead: Int
    """Rows of windows that are on the way while others are added."""

    def run(self) -> Int:
        """Windows that start in a tile."""
        return self.columns // self.sw

    def first(self) -> Int:
        """The first window that reaches into a tile, counted from the first that starts in it.
        """
        return -((self.kw - 1 - self.pw) // self.sw)

    def windows(self) -> Int:
        """Windows of a row that reach into a tile."""
        return (self.columns - 1 + self.pw) // self.sw - self.first() + 1

    def overlaps(self) -> Bool:
        """Whether a pixel may lie under several windows."""
        return self.kh > self.sh or self.kw > self.sw or self.ld > 1

    def above(self) -> Int:
        """The most rows of windows above a pixel."""
        return (self.kh + self.sh - 1) // self.sh


@fieldwise_init
struct Tiles(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: items (a tile of columns by a vector of channels) along x, units (a strip of H of one slab).
    """

    var items: Int32
    var units: Int32
    var groups: Int32
    """Rows of windows in a strip."""
    var all_groups: Int32
    var by_blocks: FastDivisor
    """Divides by the blocks that one unit's items take."""
    var by_chunk: FastDivisor
    var by_tiles: FastDivisor
    var by_inner: FastDivisor
    """Divides units by the strips of a slab; by the slabs where slabs share what they load."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Tiles"


def pool_dgrad_tiles[
    dtype: DType,
    index: DType,
    S: TileShape,
    planes: Bool,
    averaging: Bool,
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
    walk_tile[dtype, index, S, planes, averaging, offsets, False](
        dx, dy, indices, p, t, 0, item, strip, slab
    )


def pool_dgrad_pieces[
    dtype: DType,
    index: DType,
    S: TileShape,
    averaging: Bool,
    offsets: Bool,
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Tiles,
    group: Int32,
):
    """For contiguous NCHW whose rows are no whole vectors: a block computes `group` whole slabs in shared memory and
    then writes them as one run."""
    comptime W = 16 // size_of[dtype]()
    var piece = stack_allocation[
        PIECE_BYTES // size_of[dtype]() + W,
        Scalar[dtype],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var slab = Int32(block_idx.x) * group
    var count = min(group, p.slabs - slab)
    var plane = Int(p.h.input * p.w.input)
    var target = dx.unsafe_offset(Int(slab) * plane)
    # Vectors are aligned in both places when the run starts equally far from one.
    var shift = Int32((Int(target) // size_of[dtype]()) % W)
    var strip = Int32(UInt32(thread_idx.y) // UInt32(group))
    var own = Int32(thread_idx.y) - strip * group
    if own < count:
        walk_tile[dtype, index, S, True, averaging, offsets, True](
            piece.unsafe_offset(Int(shift)),
            dy,
            indices,
            p,
            t,
            slab,
            Int32(thread_idx.x),
            strip,
            slab + own,
        )
    barrier()
    var thread = Int32(thread_idx.y * block_dim.x + thread_idx.x)
    var threads = Int32(block_dim.x * block_dim.y)
    var end = shift + count * Int32(plane)
    var start = target.unsafe_offset(-Int(shift))
    var v = thread
    while v * Int32(W) < end:
        var at = v * Int32(W)
        if at >= shift and at + Int32(W) <= end:
            start.unsafe_store[alignment=16](
                Int(at), piece.unsafe_load[width=W, alignment=16](Int(at))
            )
        else:
            for i in range(max(at, shift), min(at + Int32(W), end)):
                start[unsafe_offset=Int(i)] = piece[unsafe_offset=Int(i)]
        v += threads


@always_inline
def walk_tile[
    dtype: DType,
    index: DType,
    S: TileShape,
    planes: Bool,
    averaging: Bool,
    offsets: Bool,
    staged: Bool,
](
    dx: MutPointer[Scalar[dtype], _, address_space=_],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Tiles,
    dx_slab: Int32,
    item: Int32,
    strip: Int32,
    slab: Int32,
):
    """Averages have no indices. dx points at slab `dx_slab`; `staged`: in shared memory, where nothing is aligned.
    """
    comptime KH = S.kh
    comptime SH = S.sh
    comptime KW = S.kw
    comptime TW = S.columns
    comptime V = S.channels
    comptime LD = S.ld
    comptime ROW = S.run()
    comptime FIRST = S.first()
    comptime N = S.windows()
    comptime ABOVE = (KH + SH - 1) // SH
    comptime KEPT = max(KH, SH)
    comptime Sums = SIMD[DType.float32, V]
    # Averages take the rows of all slabs above together, maxima, whose indices are wide, one after the other.
    comptime DEPTH = LD if averaging else 1
    comptime Row = Array[Windows[dtype, index, N, V], DEPTH]
    comptime AHEAD = S.ahead

    var place, lane = t.by_chunk.divmod(item)
    var chunk, tile = t.by_tiles.divmod(place)
    var c = (chunk * t.by_chunk.divisor + lane) * Int32(V)
    var column = tile * Int32(TW)
    var first_group = strip * t.groups
    var end_group = min(first_group + t.groups, t.all_groups)
    var include = p.include_pad != 0
    var uniform = p.scale != 0

    # One over what each window contributes on W to an average's divisor; everything else where all are alike.
    var scale_w = Array[Float32, N](fill=p.scale)
    comptime if averaging:
        if not uniform:
            comptime for i in range(N):
                scale_w[i] = p.w.scale[False](
                    tile * Int32(ROW) + Int32(FIRST + i), include
                )

    var n, d = p.d.by_input.divmod(slab)
    var above_d = p.d.outputs_over[False](d)
    var dx_rows = dx.unsafe_offset(
        Int(slab - dx_slab) * Int(p.h.input * p.w.input * p.channels)
    )
    var sample = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(c)
    var dy_n = dy.unsafe_offset(sample)
    var indices_n = indices
    comptime if not averaging:
        indices_n = indices.unsafe_offset(sample)

    @always_inline
    def load(oh: Int32, step: Int) {imm} -> Row:
        var row = Row(fill=Windows[dtype, index, N, V]())
        comptime for k in range(DEPTH):
            var od = above_d[0] + Int32(step + k)
            if oh < p.h.output and od < above_d[1]:
                var at = Int((od * p.h.output + oh) * p.w.output * p.channels)
                var indices_row = indices_n
                comptime if not averaging:
                    indices_row = indices_n.unsafe_offset(at)
                load_windows[
                    first=FIRST,
                    run=ROW,
                    aligned=planes and not staged,
                    averaging=averaging,
                ](
                    row[k],
                    dy_n.unsafe_offset(at),
                    indices_row,
                    tile * Int32(ROW),
                    p.w.output,
                    p.channels,
                )
        return row^

    var sums = Array[Sums, KEPT * TW](fill=Sums(0))
    var group = max(first_group - Int32(ABOVE - 1), 0)

    @always_inline
    def add(row: Row, step: Int) {mut sums, imm}:
        # The first input row that no later window reaches.
        var top = p.h.origin_by[SH](group)
        comptime if averaging:
            var scale_h = Float32(1)
            if not uniform:
                scale_h = p.h.scale[False](group, include)
            var totals = Array[Sums, N](fill=Sums(0))
            comptime for k in range(DEPTH):
                var scale = scale_h
                if not uniform:
                    scale *= p.d.scale[False](above_d[0] + Int32(k), include)
                comptime for i in range(N):
                    totals[i] += row[k].dy[i].cast[DType.float32]() * scale
            comptime for i in range(N):
                totals[i] *= scale_w[i]
            comptime for j in range(TW):
                var sum = Sums(0)
                comptime for i in range(N):
                    comptime tap = j + S.pw - (FIRST + i) * S.sw
                    comptime if tap >= 0 and tap < KW:
                        sum += totals[i]
                comptime for r in range(KH):
                    sums[r * TW + j] += sum
        else:
            var origin = column
            comptime if offsets:
                origin = (
                    (d - p.d.origin(above_d[0] + Int32(step)))
                    * p.h.window
                    * Int32(KW)
                )
            elif KH > 1:
                # Rows of a 1-D problem are no rows of a plane.
                origin += (d * p.h.input + top) * p.w.input
            comptime by_bits = offsets and S.overlaps() and KH * KW <= 32
            comptime for i in range(N):
                var g = row[0].dy[i].cast[DType.float32]()
                var found = narrow(row[0].found[i]) - origin
                comptime if by_bits:
                    # The tests of one window side by side: only those share an instruction.
                    comptime for v in range(V):
                        var bits = one_bit(1, found[v])
                        comptime for r in range(KH):
                            comptime for tap in range(KW):
                                comptime j = (FIRST + i) * S.sw - S.pw + tap
                                comptime if j >= 0 and j < TW:
                                    sums[r * TW + j][v] = add_tap[r * KW + tap](
                                        sums[r * TW + j][v], bits, g[v]
                                    )
                    continue
                comptime for r in range(KH):
                    comptime for tap in range(KW):
                        comptime j = (FIRST + i) * S.sw - S.pw + tap
                        comptime if j >= 0 and j < TW:
                            var wanted = Int32(r) * p.w.input + Int32(j)
                            comptime if offsets:
                                wanted = Int32(r * KW + tap)
                            comptime if S.overlaps():
                                sums[r * TW + j] = add_where(
                                    sums[r * TW + j], found, wanted, g
                                )
                            else:
                                sums[r * TW + j] = found.eq(
                                    SIMD[DType.int32, V](wanted)
                                ).select(g, Sums(0))

    @always_inline
    def finish() {mut sums, mut group, imm}:
        var top = p.h.origin_by[SH](group)
        if group >= first_group:
            comptime for r in range(SH):
                var h = top + Int32(r)
                if h >= 0 and h < p.h.input:
                    store_row[TW=TW, planes=planes, staged=staged, own=r * TW](
                        dx_rows, sums, h, column, c, p
                    )
        comptime for r in range(KEPT):
            comptime for j in range(TW):
                comptime if r + SH < KEPT:
                    sums[r * TW + j] = sums[(r + SH) * TW + j]
                else:
                    sums[r * TW + j] = Sums(0)
        group += 1

    comptime if AHEAD == 0:
        # Slabs of windows that are taken one after the other.
        var steps = 1
        comptime if LD > DEPTH:
            steps = Int(above_d[1] - above_d[0])
        while group < end_group:
            for step in range(steps):
                add(load(group, step), step)
            finish()
    else:
        comptime assert LD == DEPTH, "rows of one slab are loaded ahead"
        var rows = Array[Row, AHEAD](
            fill=Row(fill=Windows[dtype, index, N, V]())
        )
        comptime for slot in range(AHEAD):
            rows[slot] = load(group + Int32(slot), 0)
        while True:
            comptime for slot in range(AHEAD):
                var row = rows[slot].copy()
                rows[slot] = load(group + Int32(AHEAD), 0)
                add(row, 0)
                finish()
                if group >= end_group:
                    return


@always_inline
def store_row[
    dtype: DType,
    V: Int,
    M: Int,
    //,
    *,
    TW: Int,
    planes: Bool,
    staged: Bool,
    own: Int,
](
    dx: MutPointer[Scalar[dtype], _, address_space=_],
    sums: Array[SIMD[DType.float32, V], M],
    h: Int32,
    column: Int32,
    c: Int32,
    p: GpuProblem,
):
    comptime if staged:
        comptime for j in range(TW):
            if column + Int32(j) < p.w.input:
                dx[unsafe_offset=Int(h * p.w.input + column + Int32(j))] = sums[
                    own + j
                ][0].cast[dtype]()
    elif planes:
        comptime piece = TW & -TW
        comptime for first in range(0, TW, piece):
            var values = SIMD[DType.float32, piece](0)
            comptime for j in range(piece):
                values[j] = sums[own + first + j][0]
            dx.unsafe_store[alignment=piece * size_of[dtype]()](
                Int(h * p.w.input + column) + first, values.cast[dtype]()
            )
    else:
        comptime bytes = V * size_of[dtype]()
        comptime for j in range(TW):
            if column + Int32(j) < p.w.input:
                dx.unsafe_store[alignment=bytes](
                    Int((h * p.w.input + column + Int32(j)) * p.channels + c),
                    sums[own + j].cast[dtype](),
                )
