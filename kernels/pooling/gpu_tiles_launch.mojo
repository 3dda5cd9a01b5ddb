"""Which pooling gradients the kernels of gpu_tiles.mojo take, and how they are launched."""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    GRID_LIMIT,
    THREADS,
    FastDivisor,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .gpu_tiles import (
    PIECE_BYTES,
    TileShape,
    Tiles,
    pool_dgrad_pieces,
    pool_dgrad_tiles,
)
from .problem import PoolingAxis, PoolingProblem

comptime ENOUGH_THREADS = 1 << 20
"""Strips of H are cut until so many threads run, a few times what a large GPU holds."""
comptime SHORTEST_STRIP = 8
"""Rows of windows; each strip loads those above its first row again."""
comptime CHUNK = 16
"""Most vectors of channels side by side in a block; columns beside each other share windows through the L1 cache."""


def _chunk(vectors: Int) -> Int:
    """The most vectors, at most CHUNK, that divide them all."""
    for size in range(min(vectors, CHUNK), 0, -1):
        if vectors % size == 0:
            return size
    return 1


def _groups(p: PoolingProblem, stride: Int) -> Int:
    """Rows of windows that a walk over H takes; past the last window they stand for rows that none reaches.
    """
    return ceildiv(Int(p.h.input) + Int(p.h.padding), stride)


struct TilePlan[S: TileShape]:
    """The launch of pool_dgrad_tiles."""

    var tiles: Tiles
    var x: Int
    var y: Int
    var grid_x: Int
    var grid_y: Int

    def __init__(out self, p: PoolingProblem, slabs: Int):
        comptime overlap = Self.S.kh > Self.S.sh
        var vectors = Int(p.channels) // Self.S.channels
        var columns = ceildiv(Int(p.w.input), Self.S.columns)
        var items = columns * vectors
        var groups = _groups(p, Self.S.sh)
        var shortest = SHORTEST_STRIP if overlap else SHORTEST_STRIP // 4
        var strips = max(
            min(ENOUGH_THREADS // (items * slabs), groups // shortest), 1
        )
        var strip = ceildiv(groups, strips)
        strips = ceildiv(groups, strip)
        self.x = min(THREADS, items)
        comptime if Self.S.ld > 1:
            # Neighbouring slabs load the same windows: together they find them in the L1 cache.
            self.x = min(self.x, THREADS // 4)
        self.y = THREADS // self.x
        var blocks = ceildiv(items, self.x)
        self.grid_x = blocks * strips
        self.grid_y = min(ceildiv(slabs, self.y), GRID_LIMIT)
        self.tiles = Tiles(
            Int32(items),
            Int32(strip),
            Int32(groups),
            FastDivisor(blocks),
            FastDivisor(_chunk(vectors)),
            FastDivisor(columns),
            Int32(Int(p.w.output) % Self.S.run() == 0),
        )


struct PiecePlan[S: TileShape]:
    """The launch of pool_dgrad_pieces."""

    var tiles: Tiles
    var x: Int
    var y: Int
    var group: Int
    """Slabs of a block."""
    var fits: Bool

    def __init__(out self, p: PoolingProblem, slabs: Int, width: Int):
        """`width` is the bytes of an element."""
        comptime overlap = Self.S.kh > Self.S.sh
        self.x = ceildiv(Int(p.w.input), Self.S.columns)
        var slab_bytes = Int(p.h.input) * Int(p.w.input) * width
        self.fits = self.x <= THREADS and slab_bytes <= PIECE_BYTES
        var groups = _groups(p, Self.S.sh)
        self.group = max(
            min(
                min(PIECE_BYTES // slab_bytes, THREADS // self.x),
                # Not so many that few blocks remain.
                slabs // 1024,
            ),
            1,
        )
        var strips = max(
            min(
                THREADS // (self.x * self.group),
                groups // (4 if overlap else 2),
            ),
            1,
        )
        var strip = ceildiv(groups, strips)
        strips = ceildiv(groups, strip)
        self.y = self.group * strips
        self.tiles = Tiles(
            Int32(self.x),
            Int32(strip),
            Int32(groups),
            FastDivisor(1),
            FastDivisor(1),
            FastDivisor(self.x),
            Int32(Int(p.w.output) % Self.S.run() == 0),
        )


def _axis_is[K: Int, S: Int](axis: PoolingAxis) -> Bool:
    return (
        Int(axis.window) == K and Int(axis.stride) == S and axis.dilation == 1
    )


def _is_trivial(axis: PoolingAxis) -> Bool:
    """An axis that a problem of lower rank has not got."""
    return axis.input == 1 and axis.window == 1 and axis.padding == 0


def launch_pool_dgrad_tiles[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """Launches the kernel that knows the problem's window; False where there is none.

    Averages have no indices: any pointer does.
    """
    comptime WIDE = 16 // size_of[dtype]()
    # Eight channels would take so many registers that too few threads fit.
    comptime V = 4
    var planes = p.channels == 1
    var above = min(ceildiv(Int(p.d.window), Int(p.d.stride)), Int(p.d.output))
    if not fits_32_bits(p) or p.d.dilation != 1:
        return False
    if Int(dx) % 16 != 0 or Int(dy) % 16 != 0:
        return False
    comptime if not averaging:
        if Int(indices) % 16 != 0:
            return False
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](p)
    var done = False

    @always_inline
    def launch[S: TileShape]() raises {mut done, imm}:
        comptime S1 = TileShape(
            S.kh, S.sh, S.kw, S.sw, S.pw, S.ld, max(2, S.sw), V
        )
        comptime SP = TileShape(S.kh, S.sh, S.kw, S.sw, S.pw, S.ld, WIDE, 1)

        if not planes:
            if Int(p.channels) % V != 0:
                return
            var problem = GpuProblem(
                p, extent_d=p.d.input, vector=V, scale=scale
            )
            var plan = TilePlan[S1](p, Int(problem.slabs))
            comptime kernel = pool_dgrad_tiles[
                dtype, index, S1, False, averaging, offsets
            ]
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                problem,
                plan.tiles,
                grid_dim=(plan.grid_x, plan.grid_y),
                block_dim=(plan.x, plan.y),
            )
            done = True
            return
        var problem = GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale)
        if Int(p.w.input) % WIDE == 0:
            var plan = TilePlan[SP](p, Int(problem.slabs))
            comptime kernel = pool_dgrad_tiles[
                dtype, index, SP, True, averaging, offsets
            ]
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                problem,
                plan.tiles,
                grid_dim=(plan.grid_x, plan.grid_y),
                block_dim=(plan.x, plan.y),
            )
            done = True
            return
        var plan = PiecePlan[SP](p, Int(problem.slabs), size_of[dtype]())
        if plan.fits:
            comptime kernel = pool_dgrad_pieces[
                dtype, index, SP, averaging, offsets
            ]
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                problem,
                plan.tiles,
                Int32(plan.group),
                grid_dim=ceildiv(Int(problem.slabs), plan.group),
                block_dim=(plan.x, plan.y),
            )
            done = True

    @always_inline
    def consider[KH: Int, SH: Int, KW: Int, SW: Int, PW: Int]() raises {imm}:
        comptime most = (KH + SH - 1) // SH
        if done or not (_axis_is[KW, SW](p.w) and Int(p.w.padding) == PW):
            return
        if not (_is_trivial(p.h) or _axis_is[KH, SH](p.h)):
            return
        if above == 1:
            launch[TileShape(KH, SH, KW, SW, PW, 1, 0, 0)]()
        elif above <= most:
            comptime if most > 1:
                launch[TileShape(KH, SH, KW, SW, PW, most, 0, 0)]()

    consider[2, 2, 2, 2, 0]()
    consider[3, 2, 3, 2, 1]()
    consider[3, 2, 3, 2, 0]()
    consider[3, 1, 3, 1, 1]()
    return done
