"""Products of 16-bit elements on Hopper's warpgroups (wgmma), sums in float32, for products that fill large tiles.

Tiles lie in shared memory as common/warpgroup.mojo describes: operands along the reduction or across it, in vectors of
16 bytes. They are copied asynchronously, two stages ahead of the product.
"""

from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.async_copy import commit_copies, wait_for_copies
from ...common.pointer import Ptr
from ...common.warpgroup import (
    APART,
    THREADS,
    DepthMajor,
    IndexMajor,
    WarpgroupTile,
    finish_product,
    publish_stores,
    start_product,
    steps_of,
    sum_column,
    sum_row,
    vector_of,
)
from ..problem import MatmulProblem
from .blocks import Blocks, blocks_refusal

comptime SHAPE = WarpgroupTile(128, 128)
comptime COUNT = SHAPE.rows // APART
"""Vectors of one operand's stage that a thread copies."""
comptime STAGES = 3
"""Stages in shared memory; two blocks share a multiprocessor."""
comptime SHARED_BYTES = STAGES * SHAPE.slot_bytes() + 1024
"""Bytes of shared memory, with room to begin at a multiple of 1024 bytes, as the swizzle requires."""


@fieldwise_init
struct _Source[dtype: DType, is_across: Bool](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """One operand's part of a tile."""

    var data: Ptr[Self.dtype]
    """The operand at the tile's first index."""
    var pitch: Int
    """Elements from one row (or column) to the next, whichever is not contiguous."""
    var count: Int32
    """Indices that exist."""
    var depth: Int32
    var begin: Int32
    """The first step of the next stage."""

    @always_inline
    def copy(mut self, tile: UInt32):
        """Starts the copy of the next stage."""
        var thread = Int32(thread_idx.x)
        comptime if Self.is_across:
            var place = IndexMajor[Self.dtype].of(thread)
            var k = self.begin + place.step
            var line = self.data.unsafe_offset(Int(k) * self.pitch)
            comptime for i in range(COUNT):
                var index = place.row + Int32(i * APART)
                place.copy(
                    tile,
                    i,
                    line,
                    Int(index),
                    k < self.depth and index < self.count,
                )
        else:
            var place = DepthMajor[Self.dtype].of(thread)
            var k = self.begin + place.step
            comptime for i in range(COUNT):
                var index = place.row + Int32(i * APART)
                place.copy(
                    tile,
                    i,
                    self.data,
                    Int(index) * self.pitch + Int(k),
                    k < self.depth and index < self.count,
                )
        self.begin += Int32(steps_of[Self.dtype]())


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
)
@__name(t"matmul_warpgroup_{dtype}_{a_across}_{b_across}")
def warpgroup_kernel[
    dtype: DType, a_across: Bool, b_across: Bool
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    blocks: Blocks,
):
    """Computes one tile of one product."""
    comptime count = SHAPE.accumulators()
    comptime slot_elements = SHAPE.slot_bytes() // size_of[dtype]()
    comptime steps = Int32(steps_of[dtype]())
    var thread = Int32(thread_idx.x)
    var warpgroup = thread // 128
    var number, row_tile, column_tile = blocks.tile(Int32(block_idx.x))
    var first_row = Int(row_tile) * SHAPE.rows
    var first_column = Int(column_tile) * SHAPE.columns
    var rows = Int32(min(p.m - first_row, SHAPE.rows))
    var columns = Int32(min(p.n - first_column, SHAPE.columns))
    var left = _Source[dtype, a_across](
        a.unsafe_offset(blocks.place(p.a, number) + first_row * p.a.row),
        p.a.column if a_across else p.a.row,
        rows,
        Int32(p.k),
        0,
    )
    var right = _Source[dtype, b_across](
        b.unsafe_offset(blocks.place(p.b, number) + first_column * p.b.column),
        p.b.row if b_across else p.b.column,
        columns,
        Int32(p.k),
        0,
    )
    var base = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=1024
    ]()
    # The swizzle counts rows from a multiple of 1024 bytes.
    var shared = base.unsafe_offset(
        (1024 - Int(base) % 1024) % 1024 // size_of[dtype]()
    )
    var start = UInt32(Int(shared))

    @always_inline
    def copy(slot: Int32) {mut left, mut right, imm}:
        var tile = start + UInt32(slot) * UInt32(SHAPE.slot_bytes())
        left.copy(tile)
        right.copy(tile + UInt32(SHAPE.rows * Int(steps) * 2))

    var sums = StaticTuple[Float32, count](fill=0)
    var stages = (Int32(p.k) + steps - 1) // steps
    comptime for ahead in range(STAGES - 1):
        if Int32(ahead) < stages:
            copy(Int32(ahead))
        commit_copies()
    var slot = Int32(0)
    var free = Int32(STAGES - 1)
    for stage in range(stages):
        wait_for_copies[STAGES - 2]()
        publish_stores()
        barrier()
        start_product[dtype, SHAPE, count, a_across, b_across](
            sums,
            shared.unsafe_offset(Int(slot) * slot_elements),
            warpgroup,
        )
        # Its product was finished before the barrier.
        if stage + Int32(STAGES - 1) < stages:
            copy(free)
        commit_copies()
        finish_product()
        slot = slot + 1 if slot < STAGES - 1 else 0
        free = free + 1 if free < STAGES - 1 else 0

    var target = c.unsafe_offset(
        blocks.place(p.c, number) + first_row * p.c.row + first_column
    )
    comptime for half in range(2):
        var row = warpgroup * 64 + sum_row(thread) + Int32(half * 8)
        if row < rows:
            var line = target.unsafe_offset(Int(row) * p.c.row)
            comptime for j in range(SHAPE.columns // 8):
                var column = Int32(j * 8) + sum_column(thread)
                comptime at = j * 4 + half * 2
                if column < columns:
                    line.unsafe_offset(Int(column)).unsafe_store[
                        alignment=2 * size_of[dtype]()
                    ](
                        SIMD[DType.float32, 2](sums[at], sums[at + 1]).cast[
                            dtype
                        ]()
                    )


def warpgroup_refusal[
    dtype: DType
](c: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: MatmulProblem) -> Optional[
    String
]:
    """Returns None, or why the kernel cannot run the problem."""
    comptime vector = vector_of[dtype]()
    if p.k < 2 * steps_of[dtype]() or p.m <= 64 or p.n <= 64:
        return String("small matrices")
    if (Int(a) | Int(b)) % 16 != 0 or not (
        p.a.is_whole(vector) and p.b.is_whole(vector)
    ):
        return String("an operand's rows do not begin at multiples of 16 bytes")
    if p.k % vector != 0 or p.m % vector != 0 or p.n % vector != 0:
        return String(t"an extent is no multiple of {vector}")
    if Int(c) % 4 != 0 or p.c.column != 1 or not p.c.is_whole(2):
        return String("pairs of the result are not aligned")
    if not (p.a.row == 1 or p.a.column == 1) or not (
        p.b.row == 1 or p.b.column == 1
    ):
        return String("an operand is contiguous neither way")
    return blocks_refusal(p, SHAPE.rows, SHAPE.columns)


@always_inline
def _launch[
    dtype: DType, a_across: Bool, b_across: Bool
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    comptime kernel = warpgroup_kernel[dtype, a_across, b_across]
    var blocks = Blocks.of(p, SHAPE.rows, SHAPE.columns)
    ctx.enqueue_function[kernel](
        c,
        a,
        b,
        p,
        blocks,
        grid_dim=Int(blocks.tiles.value) * p.batch(),
        block_dim=THREADS,
        shared_mem_bytes=SHARED_BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(SHARED_BYTES)
        ),
    )


@no_inline
def warpgroup_gpu[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    """A problem without a warpgroup_refusal."""
    if p.a.column == 1:
        if p.b.row == 1:
            _launch[dtype, False, False](c, a, b, p, ctx)
        else:
            _launch[dtype, False, True](c, a, b, p, ctx)
    elif p.b.row == 1:
        _launch[dtype, True, False](c, a, b, p, ctx)
    else:
        _launch[dtype, True, True](c, a, b, p, ctx)
