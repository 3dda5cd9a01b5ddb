"""Products of 16-bit elements on tensor cores (mma m16n8k16), sums in float32: NVIDIA's GPUs since sm_80.

A block of warps has a tile of C. Stages of the reduction are copied to shared memory (stages.mojo) while earlier ones
are multiplied. Sums pass through shared memory on their way out: a warp writes whole rows of C.

Where the tiles of C are few and the reduction is long, it is split: each part's sums go to memory in float32, and a
second kernel adds them up in order.
"""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.async_copy import commit_copies, wait_for_copies
from ...common.library import scratch
from ...common.pointer import Ptr, Shared
from ...common.ptx import compiling_for_hopper
from ...common.tensor_cores import pairs_compile
from ..problem import Matrices, MatmulProblem
from .blocks import Blocks, blocks_refusal
from .stages import PIECE, FragmentOffsets, Source

comptime STAGES = 3
"""Stages in shared memory: one is multiplied while the others are being copied."""
comptime PAD = 8
"""Elements between rows of C in shared memory, beside the tile's."""
comptime SATURATING_BLOCKS = 396
"""Blocks that keep a large GPU busy: a reduction is split until there are as many."""
comptime MIN_PART = 192
"""Steps of one part of a split reduction."""
comptime SUM_THREADS = 256
"""Threads of a block that adds up parts."""


@fieldwise_init
struct BlockTile(Equatable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The tile of a block, and the part of it that one warp has."""

    var rows: Int
    var columns: Int
    var warp_rows: Int
    var warp_columns: Int
    var depth: Int
    """Steps of the reduction in a stage."""
    var blocks: Int
    """Blocks that share a multiprocessor: their registers must fit."""

    def threads(self) -> Int:
        return (
            self.rows
            // self.warp_rows
            * (self.columns // self.warp_columns)
            * 32
        )

    def fragments(self) -> Int:
        """16 x 8 fragments of sums of a warp."""
        return self.warp_rows // 16 * (self.warp_columns // 8)

    def shared_bytes(self) -> Int:
        var stages = STAGES * (self.rows + self.columns) * self.depth
        var result = self.rows * (self.columns + PAD)
        return 2 * max(stages, result)


comptime LARGE = BlockTile(128, 128, 64, 32, 64, 1)
comptime SMALL = BlockTile(64, 64, 32, 32, 32, 5)
comptime NARROW = BlockTile(64, 32, 32, 16, 32, 6)
# Not of pieces: single elements pass through registers.
comptime SMALL_UNITS = BlockTile(64, 64, 32, 32, 32, 4)
comptime NARROW_SINGLES = BlockTile(64, 32, 32, 16, 32, 5)


@fieldwise_init
struct _LaneSums(TrivialRegisterPassable):
    """The position of a lane's sums in the block's tile: two rows of each fragment of 16, and two columns of each of
    8."""

    var row: Int32
    """The row of the first fragment."""
    var column: Int32

    @staticmethod
    @always_inline
    def of(warp_row: Int32, warp_column: Int32, lane: Int32) -> Self:
        return Self(warp_row + lane // 4, warp_column + lane % 4 * 2)


@always_inline
def _store_sums[
    shape: BlockTile
](
    target: Ptr[DType.float32],
    pitch: Int,
    sums: Array[SIMD[DType.float32, 4], shape.fragments()],
    at: _LaneSums,
    rows: Int32,
    columns: Int32,
):
    """Writes a tile's sums as they are; rows of the target lie `pitch` apart.
    """
    comptime wide = shape.warp_columns // 8
    comptime for i in range(shape.warp_rows // 16):
        comptime for half in range(2):
            var row = at.row + Int32(16 * i + 8 * half)
            comptime for j in range(wide):
                comptime for e in range(2):
                    var column = at.column + Int32(8 * j + e)
                    if row < rows and column < columns:
                        target[
                            unsafe_offset=Int(row) * pitch + Int(column)
                        ] = sums[i * wide + j][2 * half + e]


@always_inline
def _store_tile[
    dtype: DType, shape: BlockTile
](
    target: Ptr[dtype],
    c: Matrices,
    shared: Shared[dtype],
    sums: Array[SIMD[DType.float32, 4], shape.fragments()],
    at: _LaneSums,
    rows: Int32,
    columns: Int32,
    whole: Bool,
):
    """Writes a tile of C through shared memory, so that a warp writes whole rows; it writes 16 bytes at a time if
    `whole`."""
    comptime threads = shape.threads()
    comptime pitch = shape.columns + PAD
    comptime wide = shape.warp_columns // 8
    var thread = Int32(thread_idx.x)
    barrier()
    comptime for i in range(shape.warp_rows // 16):
        comptime for half in range(2):
            var row = at.row + Int32(16 * i + 8 * half)
            comptime for j in range(wide):
                var column = at.column + Int32(8 * j)
                shared.unsafe_offset(
                    Int(row * Int32(pitch) + column)
                ).unsafe_store[alignment=4](
                    SIMD[DType.float32, 2](
                        sums[i * wide + j][2 * half],
                        sums[i * wide + j][2 * half + 1],
                    ).cast[dtype]()
                )
    barrier()
    if whole:
        comptime pieces = Int32(shape.columns // PIECE)
        comptime for turn in range(
            shape.rows * shape.columns // PIECE // threads
        ):
            var i = thread + Int32(turn * threads)
            var row = i // pieces
            var column = i % pieces * PIECE
            if row < rows and column < columns:
                target.unsafe_offset(
                    Int(row) * c.row + Int(column)
                ).unsafe_store[alignment=16](
                    shared.unsafe_offset(
                        Int(row * Int32(pitch) + column)
                    ).unsafe_load[width=PIECE, alignment=16]()
                )
    else:
        var row = thread // 32
        while row < rows:
            var line = target.unsafe_offset(Int(row) * c.row)
            comptime for turn in range(shape.columns // 32):
                var column = thread % 32 + Int32(32 * turn)
                if column < columns:
                    line[unsafe_offset=Int(column) * c.column] = shared[
                        unsafe_offset=Int(row * Int32(pitch) + column)
                    ]
            row += Int32(threads // 32)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(min(1024, shape.blocks * shape.threads()))
    ),
)
@__name(t"matmul_tensor_core_{dtype}_{shape.rows}x{shape.columns}_{unit}")
def tensor_core_kernel[
    dtype: DType, shape: BlockTile, unit: Int
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    sums_of_parts: Ptr[DType.float32],
    p: MatmulProblem,
    blocks: Blocks,
    a_in_pieces: Int32,
    b_in_pieces: Int32,
    c_whole: Int32,
    part: Int32,
):
    """Computes one tile of one product, or of one part's sums over `part` steps: [part][product][M][N].

    A and B are read in pieces, or in units of `unit` elements; `c_whole` says that C may be written in pieces.
    """
    comptime threads = shape.threads()
    comptime high = shape.warp_rows // 16
    comptime wide = shape.warp_columns // 8
    comptime a_bytes = 2 * shape.rows * shape.depth
    comptime stage_bytes = 2 * (shape.rows + shape.columns) * shape.depth

    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var warp = thread // 32
    var number, row_tile, column_tile = blocks.tile(Int32(block_idx.x))
    var first_row = Int(row_tile) * shape.rows
    var first_column = Int(column_tile) * shape.columns
    var rows = Int32(min(p.m - first_row, shape.rows))
    var columns = Int32(min(p.n - first_column, shape.columns))
    var first = Int32(block_idx.y) * part
    var depth = min(Int32(p.k) - first, part)

    var left = Source[dtype, shape.rows, shape.depth, threads, unit](
        a.unsafe_offset(
            blocks.place(p.a, number)
            + first_row * p.a.row
            + Int(first) * p.a.column
        ),
        Int32(p.a.row),
        Int32(p.a.column),
        rows,
        depth,
        a_in_pieces != 0,
    )
    var right = Source[dtype, shape.columns, shape.depth, threads, unit](
        b.unsafe_offset(
            blocks.place(p.b, number)
            + first_column * p.b.column
            + Int(first) * p.b.row
        ),
        Int32(p.b.column),
        Int32(p.b.row),
        columns,
        depth,
        b_in_pieces != 0,
    )
    var shared = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var base = UInt32(Int(shared))
    comptime warps_across = Int32(shape.columns // shape.warp_columns)
    var warp_row = warp // warps_across * Int32(shape.warp_rows)
    var warp_column = warp % warps_across * Int32(shape.warp_columns)
    var a_places = FragmentOffsets[high, shape.rows, shape.depth].left(
        warp_row, lane, left.across
    )
    var b_places = FragmentOffsets[wide // 2, shape.columns, shape.depth].right(
        warp_column, lane, right.across
    )

    var at = _LaneSums.of(warp_row, warp_column, lane)
    var sums = Array[SIMD[DType.float32, 4], shape.fragments()](fill=0)
    var stages = (depth + Int32(shape.depth - 1)) // Int32(shape.depth)
    var slot = UInt32(0)
    var free = UInt32(0)
    for stage in range(Int32(1 - STAGES), stages):
        if stage >= 0:
            wait_for_copies[STAGES - 2]()
            barrier()
        var next = base + free * UInt32(stage_bytes)
        var more = stage + (STAGES - 1) < stages
        var a_values = left.Values(fill=0)
        var b_values = right.Values(fill=0)
        if more:
            left.start(next, a_values)
            right.start(next + UInt32(a_bytes), b_values)
        commit_copies()
        free = free + 1 if free < STAGES - 1 else 0
        if stage < 0:
            if more:
                left.finish(next, a_values)
                right.finish(next + UInt32(a_bytes), b_values)
            continue
        var a_tile = base + slot * UInt32(stage_bytes)
        var b_tile = a_tile + UInt32(a_bytes)
        comptime for k in range(shape.depth // 16):
            var factors = Array[SIMD[dtype, 8], wide // 2](fill=0)
            comptime for j in range(wide // 2):
                factors[j] = b_places.load[dtype](b_tile, j, k)
            comptime for i in range(high):
                var row = a_places.load[dtype](a_tile, i, k)
                comptime for j in range(wide):
                    mma(
                        sums[i * wide + j],
                        row,
                        factors[j // 2].slice[4, offset=j % 2 * 4](),
                        sums[i * wide + j],
                    )
        if more:
            left.finish(next, a_values)
            right.finish(next + UInt32(a_bytes), b_values)
        slot = slot + 1 if slot < STAGES - 1 else 0
    wait_for_copies[0]()

    if part < Int32(p.k):
        # [part][product] of float32.
        var products = Int(p.batch())
        _store_sums[shape](
            sums_of_parts.unsafe_offset(
                (Int(block_idx.y) * products + Int(number)) * p.m * p.n
                + first_row * p.n
                + first_column
            ),
            p.n,
            sums,
            at,
            rows,
            columns,
        )
    else:
        _store_tile[dtype, shape](
            c.unsafe_offset(
                blocks.place(p.c, number)
                + first_row * p.c.row
                + first_column * p.c.column
            ),
            p.c,
            shared,
            sums,
            at,
            rows,
            columns,
            c_whole != 0,
        )


@__name(t"matmul_add_parts_{dtype}")
def add_parts_kernel[
    dtype: DType
](c: Ptr[dtype], parts: Ptr[DType.float32], p: MatmulProblem, count: Int32,):
    """The sum of the parts' sums, in order; a thread has one element of C."""
    var size = p.batch() * p.m * p.n
    var i = Int(block_idx.x) * SUM_THREADS + Int(thread_idx.x)
    if i >= size:
        return
    var sum = Float32(0)
    for part in range(Int(count)):
        sum += parts[unsafe_offset=part * size + i]
    var column = i % p.n
    var rest = i // p.n
    c[
        unsafe_offset=p.place(p.c, rest // p.m)
        + rest % p.m * p.c.row
        + column * p.c.column
    ] = sum.cast[dtype]()


def tensor_core_refusal[dtype: DType](p: MatmulProblem) -> Optional[String]:
    """Returns None, or why the kernel cannot run the problem."""
    comptime if not pairs_compile[dtype]():
        return String("the GPU has no products of such elements")
    # Strides of a stage are counted in 32 bits.
    if max(p.a.row, p.a.column, p.b.row, p.b.column) >= 1 << 24:
        return String("a stride of 2^24 or more")
    return blocks_refusal(p, NARROW.rows, NARROW.columns)


def _tiles(p: MatmulProblem, shape: BlockTile) -> Int:
    """Returns the number of tiles of one product."""
    return ceildiv(p.m, shape.rows) * ceildiv(p.n, shape.columns)


def _unit[dtype: DType](data: Ptr[dtype], matrices: Matrices) -> Int:
    """The most elements, up to a piece, that all rows (or columns, if these are contiguous) can be read or written in.
    """
    if matrices.row != 1 and matrices.column != 1:
        return 1
    var unit = PIECE
    while unit > 1 and not (
        Int(data) % (2 * unit) == 0 and matrices.is_whole(unit)
    ):
        unit //= 2
    return unit


@always_inline
def _launch[
    dtype: DType, shape: BlockTile, unit: Int
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    var tiles = _tiles(p, shape)
    var blocks = tiles * p.batch()
    var parts = max(
        1, min(SATURATING_BLOCKS // max(blocks, 1), p.k // MIN_PART)
    )
    var part = ceildiv(ceildiv(p.k, parts), shape.depth) * shape.depth
    parts = ceildiv(p.k, part) if parts > 1 else 1
    if parts == 1:
        part = max(p.k, 1)
    var c_whole = (
        _unit(c, p.c) == PIECE and p.c.column == 1 and p.n % PIECE == 0
    )
    var size = p.batch() * p.m * p.n
    var sums = scratch[DType.float32](ctx, parts * size if parts > 1 else 1)
    var sums_at = Ptr[DType.float32](unsafe_from_address=Int(sums.unsafe_ptr()))
    comptime kernel = tensor_core_kernel[dtype, shape, unit]
    ctx.enqueue_function[kernel](
        c,
        a,
        b,
        sums_at,
        p,
        Blocks.of(p, shape.rows, shape.columns),
        Int32(_unit(a, p.a) == PIECE),
        Int32(_unit(b, p.b) == PIECE),
        Int32(c_whole),
        Int32(part),
        grid_dim=(blocks, parts),
        block_dim=shape.threads(),
        shared_mem_bytes=shape.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shape.shared_bytes())
        ),
    )
    if parts > 1:
        comptime adder = add_parts_kernel[dtype]
        ctx.enqueue_function[adder](
            c,
            sums_at,
            p,
            Int32(parts),
            grid_dim=ceildiv(size, SUM_THREADS),
            block_dim=SUM_THREADS,
        )
    _ = sums^


@no_inline
def tensor_core_gpu[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    """A problem without a tensor_core_refusal."""
    var unit = min(_unit(a, p.a), _unit(b, p.b))
    if unit == 1:
        if p.n <= NARROW.columns:
            _launch[dtype, NARROW_SINGLES, 1](c, a, b, p, ctx)
        else:
            _launch[dtype, SMALL_UNITS, 1](c, a, b, p, ctx)
    elif unit < PIECE:
        if p.n <= NARROW.columns:
            _launch[dtype, NARROW, 2](c, a, b, p, ctx)
        else:
            _launch[dtype, SMALL_UNITS, 2](c, a, b, p, ctx)
    elif p.n <= NARROW.columns:
        _launch[dtype, NARROW, PIECE](c, a, b, p, ctx)
    else:
        comptime if not compiling_for_hopper():
            # Hopper has its warpgroups for these.
            var large = _tiles(p, LARGE) * LARGE.rows * LARGE.columns
            var small = _tiles(p, SMALL) * SMALL.rows * SMALL.columns
            if 4 * large < 5 * small and p.k > LARGE.depth:
                _launch[dtype, LARGE, PIECE](c, a, b, p, ctx)
                return
        _launch[dtype, SMALL, PIECE](c, a, b, p, ctx)
