"""Which pooling gradients the kernels of gpu_tiles.mojo take, and how they are launched."""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    LIMIT_32,
    THREADS,
    FastDivisor,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .gpu_tiles import (
    BLOCK,
    PIECE_BYTES,
    TileShape,
    Tiles,
    pool_dgrad_pieces,
    pool_dgrad_tiles,
)
from .problem import PoolingAxis, PoolingProblem

comptime ENOUGH_THREADS = 1 << 18
"""Strips of H get shorter until so many threads run, about what a large GPU holds."""
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


def tile_strip(S: TileShape, planes: Bool, averaging: Bool, data: Int) -> Int:
    """The most rows of windows that a thread of pool_dgrad_tiles takes, as measured on one H200; `data` is the bytes of an
    element."""
    # Neighbouring slabs load the same windows, each for its own strip: a longer one loads fewer of them twice.
    # Channels-last, waiting in long strips costs more than that.
    if S.ld > 1:
        if planes:
            return 16
        if averaging:
            return 4 if data >= 4 else 8
        return 8 if data >= 4 else 16
    # Averages, and the rows of a 1-D problem.
    if averaging or S.kh == 1:
        return 4 if planes else 8
    # Where no window is loaded twice, short strips leave more of them to hide each other's waiting.
    if S.above() == 1:
        return 1
    if S.sh > 1:
        if planes:
            return 3
        return 2 if data >= 4 else 4
    return 4 if planes else 8


struct TilePlan[S: TileShape, most: Int]:
    """The launch of pool_dgrad_tiles with strips of at most `most` rows of windows.
    """

    var tiles: Tiles
    var x: Int
    var y: Int
    var grid: Int

    def __init__(out self, p: PoolingProblem):
        var slabs = Int(p.batch) * Int(p.d.input)
        var vectors = Int(p.channels) // Self.S.channels
        var columns = ceildiv(Int(p.w.input), Self.S.columns)
        var items = columns * vectors
        var groups = _groups(p, Self.S.sh)
        var strip = Self.most
        var enough = ENOUGH_THREADS
        comptime if Self.S.ld > 1:
            enough //= 2
        while strip > 1 and items * slabs * ceildiv(groups, strip) < enough:
            strip //= 2
        var strips = ceildiv(groups, strip)
        var units = slabs * strips
        self.x = min(BLOCK, items)
        comptime if Self.S.ld > 1:
            # Neighbouring slabs load the same windows: together they find them in the L1 cache.
            self.x = min(self.x, BLOCK // 4)
        self.y = BLOCK // self.x
        var blocks = ceildiv(items, self.x)
        self.grid = blocks * ceildiv(units, self.y)
        self.tiles = Tiles(
            Int32(items),
            Int32(units),
            Int32(strip),
            Int32(groups),
            FastDivisor(blocks),
            FastDivisor(_chunk(vectors)),
            FastDivisor(columns),
            FastDivisor(slabs if Self.S.ld > 1 else strips),
        )


struct PiecePlan[S: TileShape]:
    """The launch of pool_dgrad_pieces."""

    var tiles: Tiles
    var x: Int
    var y: Int
    var group: Int
    """Slabs of a block."""
    var fits: Bool

    def __init__(out self, p: PoolingProblem, width: Int):
        """`width` is the bytes of an element."""
        comptime overlap = Self.S.above() > 1
        var slabs = Int(p.batch) * Int(p.d.input)
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
            Int32(slabs * strips),
            Int32(strip),
            Int32(groups),
            FastDivisor(1),
            FastDivisor(1),
            FastDivisor(self.x),
            FastDivisor(strips),
        )


def rows_ahead(
    KH: Int, SH: Int, LD: Int, *, averaging: Bool, offsets: Bool, data: Int
) -> Int:
    """Rows of windows that are on the way while others are added, channels-last, as measured on one H200: the more bytes
    windows have, the more other threads' loads are on the way, which registers cost. `data` is the bytes of an element.
    """
    if LD > 1 or KH <= SH:
        return 0
    if averaging:
        return SH if SH > 1 or data < 4 else 0
    if not offsets or data >= 4:
        return 0
    return 2 if KH == 2 else 1


def _is_trivial(axis: PoolingAxis) -> Bool:
    """An axis that a problem of lower rank has not got."""
    return axis.input == 1 and axis.window == 1 and axis.padding == 0


def rows_together(p: PoolingProblem) -> PoolingProblem:
    """A 1-D problem as one plane with the batch for its rows, which a thread then walks down.
    """
    var merged = p
    merged.batch = 1
    merged.h = PoolingAxis(Int32(p.batch), Int32(p.batch), 1, 1, 0, 1)
    return merged


def launch_pool_dgrad_tiles[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    given: PoolingProblem,
) raises -> Bool:
    """Launches the kernel that knows the problem's window; False where there is none.

    Averages have no indices: any pointer does.
    """
    comptime WIDE = 16 // size_of[dtype]()
    if not fits_32_bits(given) or given.d.dilation != 1:
        return False
    if Int(dx) % 16 != 0 or Int(dy) % 16 != 0:
        return False
    comptime if not averaging:
        if Int(indices) % 16 != 0:
            return False
    var p = given
    var one_axis = _is_trivial(p.d) and _is_trivial(p.h)
    if one_axis and Int(p.batch) < LIMIT_32:
        p = rows_together(given)
        if not fits_32_bits(p):
            return False
    var planes = p.channels == 1
    var above = min(ceildiv(Int(p.d.window), Int(p.d.stride)), Int(p.d.output))
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](given)
    var done = False

    @always_inline
    def launch[S: TileShape, planes: Bool]() raises {mut done, imm}:
        var problem = GpuProblem(
            p, extent_d=p.d.input, vector=S.channels, scale=scale
        )
        var plan = TilePlan[
            S, tile_strip(S, planes, averaging, size_of[dtype]())
        ](p)
        comptime kernel = pool_dgrad_tiles[
            dtype, index, S, planes, averaging, offsets
        ]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            problem,
            plan.tiles,
            grid_dim=plan.grid,
            block_dim=(plan.x, plan.y),
        )
        done = True

    @always_inline
    def launch_pieces[S: TileShape]() raises {mut done, imm}:
        var plan = PiecePlan[S](p, size_of[dtype]())
        if not plan.fits:
            return
        var problem = GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale)
        comptime kernel = pool_dgrad_pieces[dtype, index, S, averaging, offsets]
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
    def take[
        KH: Int, SH: Int, KW: Int, SW: Int, PW: Int, LD: Int
    ]() raises {imm}:
        comptime wide = TileShape(KH, SH, KW, SW, PW, LD, WIDE, 1, 0)
        comptime narrow = TileShape(KH, SH, KW, SW, PW, LD, 4, 1, 0)

        @always_inline
        def fits[S: TileShape]() {imm} -> Bool:
            return (
                Int(p.w.input) % S.columns == 0
                and Int(p.w.output) % S.run() == 0
                and Int(p.w.output) * SW >= Int(p.w.input)
            )

        if not planes:
            # Other maxima cost less in gpu_ring_max.mojo.
            comptime if averaging or SH > 1 or KH <= 2 or (offsets and LD == 1):
                # Eight channels would take so many registers that too few threads fit.
                if Int(p.channels) % 4 == 0:
                    comptime ahead = rows_ahead(
                        KH,
                        SH,
                        LD,
                        averaging=averaging,
                        offsets=offsets,
                        data=size_of[dtype](),
                    )
                    comptime S = TileShape(
                        KH, SH, KW, SW, PW, LD, max(2, SW), 4, ahead
                    )
                    launch[S, False]()
            return
        if fits[wide]():
            launch[wide, True]()
            return
        comptime if WIDE > 4:
            if fits[narrow]():
                launch[narrow, True]()
                return
        comptime if KH > 1 and (LD == 1 or averaging):
            launch_pieces[narrow]()

    @always_inline
    def consider[
        KH: Int,
        SH: Int,
        KW: Int,
        SW: Int,
        PW: Int,
        *,
        deep: Bool = False,
    ]() raises {imm}:
        comptime most = (KH + SH - 1) // SH
        if (
            done
            or not p.w.is_window(KW, SW)
            or Int(p.w.padding) != PW
            or not p.h.is_window(KH, SH)
        ):
            return
        if above == 1:
            take[KH, SH, KW, SW, PW, 1]()
        elif above <= most:
            comptime if deep:
                take[KH, SH, KW, SW, PW, most]()

    if one_axis:
        consider[1, 1, 2, 2, 0]()
        consider[1, 1, 3, 1, 1]()
        consider[1, 1, 4, 4, 0]()
    else:
        consider[2, 2, 2, 2, 0]()
        consider[2, 1, 2, 1, 0]()
        consider[3, 2, 3, 2, 0]()
        consider[3, 2, 3, 2, 1, deep=True]()
        consider[3, 1, 3, 1, 1, deep=True]()
    return done
