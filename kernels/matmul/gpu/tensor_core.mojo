"""Products of 16-bit elements on tensor cores (mma m16n8k16), sums in float32: NVIDIA's GPUs since sm_80.

A block of warps has a tile of C. Stages of DEPTH steps of the reduction are copied to shared memory while earlier ones
are multiplied. An operand's stage lies as the operand does in memory:

    along    [index][DEPTH]    the reduction is contiguous (or nothing is)
    across   [DEPTH][index]    the index is

in pieces of 16 bytes that are exchanged by an XOR with the row's number, so that neither copies nor ldmatrix meet bank
conflicts. Operands whose rows begin at multiples of 16 bytes are copied asynchronously, others element by element. Sums
pass through shared memory on their way out: a warp writes whole rows of C, or whole columns where those are contiguous.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
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

from ...convolution.common import Ptr
from ...convolution.gpu.pipeline import (
    Shared,
    commit_copies,
    pairs_compile,
    wait_for_copies,
)
from ...ptx import load_matrices
from ..problem import Matrices, MatmulProblem
from std.sys._assembly import inlined_assembly

comptime DEPTH = 32
"""Steps of the reduction in a stage."""
comptime STAGES = 3
comptime PIECE = 8
"""Elements of 16 bytes."""
comptime PAD = 8
"""Elements between rows of C in shared memory, beside the tile's."""


@fieldwise_init
struct TileShape(Equatable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The tile of a block, and the part of it that one warp has."""

    var rows: Int
    var columns: Int
    var warp_rows: Int
    var warp_columns: Int

    def threads(self) -> Int:
        return (
            self.rows
            // self.warp_rows
            * (self.columns // self.warp_columns)
            * 32
        )

    def shared_bytes(self) -> Int:
        var stages = STAGES * (self.rows + self.columns) * DEPTH
        var result = self.rows * (self.columns + PAD)
        return 2 * max(stages, result)


comptime LARGE = TileShape(128, 128, 64, 32)
comptime SMALL = TileShape(64, 64, 32, 32)


# An operand's stage.


@always_inline
def _along(index: Int32, piece: Int32) -> Int32:
    """Where a piece of an index's steps lies: two rows of DEPTH are 128 bytes.
    """
    return index * DEPTH + (piece ^ (index // 2 % 4)) * PIECE


@always_inline
def _across[size: Int](step: Int32, piece: Int32) -> Int32:
    """Where a piece of a step's indices lies."""
    return step * Int32(size) + (piece ^ (step % 8)) * PIECE


@always_inline
def _copy_piece[
    dtype: DType
](target: UInt32, source: Ptr[dtype], offset: Int, valid: Int32):
    """Starts the copy of 16 bytes, of which the first `valid` elements are read and the others zero.
    """
    inlined_assembly[
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](
        target,
        UInt64(Int(source)) + UInt64((offset if valid > 0 else 0) * 2),
        2 * valid,
    )


@fieldwise_init
struct Operand[dtype: DType, size: Int, threads: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """One operand's part of a tile: `size` indices from `first` on, of which `count` are left.
    """

    var data: Ptr[Self.dtype]
    """Of this product, at the tile's first index."""
    var index: Int
    """Elements from one index to the next."""
    var step: Int
    """Elements from one step of the reduction to the next."""
    var count: Int32
    var across: Bool
    """Whether the index is contiguous, not the reduction."""
    var whole: Bool
    """Whether pieces begin at multiples of 16 bytes."""

    @always_inline
    def load(self, stage: Shared[Self.dtype], begin: Int32, depth: Int32):
        """Starts the copy of the stage that begins with step `begin` of `depth`.
        """
        if self.whole:
            self._load_pieces(stage, begin, depth)
        else:
            self._load_elements(stage, begin, depth)

    @always_inline
    def _load_pieces(
        self, stage: Shared[Self.dtype], begin: Int32, depth: Int32
    ):
        comptime turns = Self.size * (DEPTH // PIECE) // Self.threads
        comptime pieces = Self.size // PIECE
        var thread = Int32(thread_idx.x)
        comptime for i in range(turns):
            var number = thread + Int32(i * Self.threads)
            var place: Int32
            var offset: Int
            var valid: Int32
            if self.across:
                var step = number // Int32(pieces)
                var piece = number % Int32(pieces)
                place = _across[Self.size](step, piece)
                offset = Int(begin + step) * self.step + Int(piece * PIECE)
                valid = self.count - piece * PIECE
                if begin + step >= depth:
                    valid = 0
            else:
                var index = number // (DEPTH // PIECE)
                var piece = number % (DEPTH // PIECE)
                place = _along(index, piece)
                offset = Int(index) * self.index + Int(begin + piece * PIECE)
                valid = depth - begin - piece * PIECE
                if index >= self.count:
                    valid = 0
            _copy_piece[Self.dtype](
                UInt32(Int(stage.unsafe_offset(Int(place)))),
                self.data,
                offset,
                max(Int32(0), min(Int32(PIECE), valid)),
            )

    @always_inline
    def _load_elements(
        self, stage: Shared[Self.dtype], begin: Int32, depth: Int32
    ):
        comptime turns = Self.size * DEPTH // Self.threads
        var thread = Int32(thread_idx.x)
        var values = Array[Scalar[Self.dtype], turns](fill=0)
        var first: Int32
        var step: Int32
        if self.across:
            first = thread % Int32(Self.size)
            step = thread // Int32(Self.size)
        else:
            first = thread // DEPTH
            step = thread % DEPTH
        comptime for i in range(turns):
            var index = first
            var k = step
            if self.across:
                k += Int32(i * Self.threads // Self.size)
            else:
                index += Int32(i * Self.threads // DEPTH)
            if index < self.count and begin + k < depth:
                values[i] = self.data[
                    unsafe_offset=Int(index) * self.index
                    + Int(begin + k) * self.step
                ]
        comptime for i in range(turns):
            var place: Int32
            if self.across:
                var k = step + Int32(i * Self.threads // Self.size)
                place = _across[Self.size](k, first // PIECE) + first % PIECE
            else:
                var index = first + Int32(i * Self.threads // DEPTH)
                place = _along(index, step // PIECE) + step % PIECE
            stage[unsafe_offset=Int(place)] = values[i]

    @always_inline
    def left(
        self, stage: Shared[Self.dtype], row: Int32, k: Int, lane: Int32
    ) -> SIMD[Self.dtype, 8]:
        """The fragment of 16 rows from `row` on, 16 steps from 16 * k on."""
        if self.across:
            return bitcast[Self.dtype, 8](
                load_matrices[4, True](
                    UInt32(
                        Int(
                            stage.unsafe_offset(
                                Int(
                                    _across[Self.size](
                                        Int32(16 * k)
                                        + lane // 16 * 8
                                        + lane % 8,
                                        row // PIECE + lane // 8 % 2,
                                    )
                                )
                            )
                        )
                    )
                )
            )
        return bitcast[Self.dtype, 8](
            load_matrices[4](
                UInt32(
                    Int(
                        stage.unsafe_offset(
                            Int(
                                _along(
                                    row + lane % 16, Int32(2 * k) + lane // 16
                                )
                            )
                        )
                    )
                )
            )
        )

    @always_inline
    def right(
        self, stage: Shared[Self.dtype], column: Int32, k: Int, lane: Int32
    ) -> SIMD[Self.dtype, 8]:
        """The fragments of 8 columns from `column` on and of the 8 behind them, 16 steps from 16 * k on.
        """
        if self.across:
            return bitcast[Self.dtype, 8](
                load_matrices[4, True](
                    UInt32(
                        Int(
                            stage.unsafe_offset(
                                Int(
                                    _across[Self.size](
                                        Int32(16 * k) + lane % 16,
                                        column // PIECE + lane // 16,
                                    )
                                )
                            )
                        )
                    )
                )
            )
        return bitcast[Self.dtype, 8](
            load_matrices[4](
                UInt32(
                    Int(
                        stage.unsafe_offset(
                            Int(
                                _along(
                                    column + lane // 16 * 8 + lane % 8,
                                    Int32(2 * k) + lane // 8 % 2,
                                )
                            )
                        )
                    )
                )
            )
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(shape.threads())
    ),
)
@__name(t"matmul_tensor_core_{dtype}_{shape.rows}x{shape.columns}")
def tensor_core_kernel[
    dtype: DType, shape: TileShape
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    row_tiles: Int32,
    column_tiles: Int32,
    whole: Int32,
):
    """One tile of one product; `whole` has a bit for each of A, B and C whose rows may be read or written in pieces.
    """
    comptime threads = shape.threads()
    comptime high = shape.warp_rows // 16
    comptime wide = shape.warp_columns // 8
    comptime a_stage = shape.rows * DEPTH
    comptime stage_elements = (shape.rows + shape.columns) * DEPTH

    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var warp = thread // 32
    var tile = Int(block_idx.x)
    var column_tile = tile % Int(column_tiles)
    var rest = tile // Int(column_tiles)
    var row_tile = rest % Int(row_tiles)
    var number = rest // Int(row_tiles)
    var first_row = row_tile * shape.rows
    var first_column = column_tile * shape.columns
    var rows = Int32(min(p.m - first_row, shape.rows))
    var columns = Int32(min(p.n - first_column, shape.columns))
    var depth = Int32(p.k)

    var left = Operand[dtype, shape.rows, threads](
        a.unsafe_offset(p.place(p.a, number) + first_row * p.a.row),
        p.a.row,
        p.a.column,
        rows,
        p.a.row == 1 and p.a.column != 1,
        whole & 1 != 0,
    )
    var right = Operand[dtype, shape.columns, threads](
        b.unsafe_offset(p.place(p.b, number) + first_column * p.b.column),
        p.b.column,
        p.b.row,
        columns,
        p.b.column == 1 and p.b.row != 1,
        whole & 2 != 0,
    )
    var shared = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]()
    var warp_row = (
        warp
        // Int32(shape.columns // shape.warp_columns)
        * Int32(shape.warp_rows)
    )
    var warp_column = (
        warp
        % Int32(shape.columns // shape.warp_columns)
        * Int32(shape.warp_columns)
    )

    var sums = Array[SIMD[DType.float32, 4], high * wide](fill=0)
    var stages = ceildiv(depth, Int32(DEPTH))
    comptime for s in range(STAGES - 1):
        if Int32(s) < stages:
            var at = shared.unsafe_offset(s * stage_elements)
            left.load(at, Int32(s * DEPTH), depth)
            right.load(at.unsafe_offset(a_stage), Int32(s * DEPTH), depth)
        commit_copies()
    var slot = Int32(0)
    for stage in range(stages):
        wait_for_copies[STAGES - 2]()
        barrier()
        var next = stage + Int32(STAGES - 1)
        if next < stages:
            var at = shared.unsafe_offset(
                Int((slot + Int32(STAGES - 1)) % STAGES) * stage_elements
            )
            left.load(at, next * DEPTH, depth)
            right.load(at.unsafe_offset(a_stage), next * DEPTH, depth)
        commit_copies()
        var a_tile = shared.unsafe_offset(Int(slot) * stage_elements)
        var b_tile = a_tile.unsafe_offset(a_stage)
        comptime for k in range(DEPTH // 16):
            var columns_of = Array[SIMD[dtype, 8], wide // 2](fill=0)
            comptime for j in range(wide // 2):
                columns_of[j] = right.right(
                    b_tile, warp_column + Int32(16 * j), k, lane
                )
            comptime for i in range(high):
                var row_of = left.left(
                    a_tile, warp_row + Int32(16 * i), k, lane
                )
                comptime for j in range(wide):
                    mma(
                        sums[i * wide + j],
                        row_of,
                        columns_of[j // 2].slice[4, offset=j % 2 * 4](),
                        sums[i * wide + j],
                    )
        slot = (slot + 1) % STAGES
    wait_for_copies[0]()
    barrier()

    # Through shared memory, so that a warp writes whole rows.
    comptime pitch = shape.columns + PAD
    comptime for i in range(high):
        comptime for half in range(2):
            var row = warp_row + Int32(16 * i + 8 * half) + lane // 4
            comptime for j in range(wide):
                var column = warp_column + Int32(8 * j) + lane % 4 * 2
                shared.unsafe_offset(
                    Int(row * Int32(pitch) + column)
                ).unsafe_store[alignment=4](
                    SIMD[DType.float32, 2](
                        sums[i * wide + j][2 * half],
                        sums[i * wide + j][2 * half + 1],
                    ).cast[dtype]()
                )
    barrier()
    var target = c.unsafe_offset(
        p.place(p.c, number) + first_row * p.c.row + first_column * p.c.column
    )
    if p.c.column == 1:
        if whole & 4 != 0:
            comptime pieces = shape.columns // PIECE
            for i in range(Int(thread), shape.rows * pieces, threads):
                var row = i // pieces
                var column = i % pieces * PIECE
                if Int32(row) < rows and Int32(column) < columns:
                    target.unsafe_offset(row * p.c.row + column).unsafe_store[
                        alignment=16
                    ](
                        shared.unsafe_offset(row * pitch + column).unsafe_load[
                            width=PIECE, alignment=16
                        ]()
                    )
        else:
            var row = warp
            while row < rows:
                var column = lane
                while column < columns:
                    target[
                        unsafe_offset=Int(row) * p.c.row + Int(column)
                    ] = shared[unsafe_offset=Int(row * Int32(pitch) + column)]
                    column += 32
                row += Int32(threads // 32)
    else:
        var column = warp
        while column < columns:
            var row = lane
            while row < rows:
                target[
                    unsafe_offset=Int(row) * p.c.row + Int(column) * p.c.column
                ] = shared[unsafe_offset=Int(row * Int32(pitch) + column)]
                row += 32
            column += Int32(threads // 32)


def tensor_core_can_implement[
    dtype: DType
](p: MatmulProblem) -> Optional[String]:
    """None, or why not."""
    comptime if not pairs_compile[dtype]():
        return String("the GPU has no products of such elements")
    # Indices within a product are counted in 32 bits; elements are not.
    if max(p.m, p.n, p.k) >= 1 << 30:
        return String("an extent of 2^30 or more")
    return None


def _is_whole[dtype: DType](data: Ptr[dtype], matrices: Matrices) -> Bool:
    """Whether all pieces of 16 bytes begin at multiples of that."""
    return (
        Int(data) % 16 == 0
        and (matrices.row == 1 or matrices.column == 1)
        and matrices.is_whole(PIECE)
    )


@always_inline
def _launch[
    dtype: DType, shape: TileShape
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    var row_tiles = ceildiv(p.m, shape.rows)
    var column_tiles = ceildiv(p.n, shape.columns)

    var whole = Int32(_is_whole(a, p.a)) + 2 * Int32(_is_whole(b, p.b))
    if _is_whole(c, p.c) and p.c.column == 1 and p.n % PIECE == 0:
        whole += 4
    comptime kernel = tensor_core_kernel[dtype, shape]
    ctx.enqueue_function[kernel](
        c,
        a,
        b,
        p,
        Int32(row_tiles),
        Int32(column_tiles),
        whole,
        grid_dim=row_tiles * column_tiles * p.batch(),
        block_dim=shape.threads(),
        shared_mem_bytes=shape.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shape.shared_bytes())
        ),
    )


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
    """A problem that tensor_core_can_implement takes."""
    if p.m > SMALL.rows and p.n > SMALL.columns and _waste(p) < 1.25:
        _launch[dtype, LARGE](c, a, b, p, ctx)
    else:
        _launch[dtype, SMALL](c, a, b, p, ctx)


def _waste(p: MatmulProblem) -> Float64:
    """What large tiles cover over what small ones do."""
    var large = (
        ceildiv(p.m, LARGE.rows)
        * ceildiv(p.n, LARGE.columns)
        * LARGE.rows
        * LARGE.columns
    )
    var small = (
        ceildiv(p.m, SMALL.rows)
        * ceildiv(p.n, SMALL.columns)
        * SMALL.rows
        * SMALL.columns
    )
    return Float64(large) / Float64(small)
