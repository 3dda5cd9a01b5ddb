"""Products of Hopper's warpgroups, and their tiles that pass through registers into shared memory.

A stage is 128 bytes of the reduction. An operand's tile is copied in vectors of 16 bytes, in one of two ways:

    along    the reduction lies last in memory: a vector of steps of one index. Rows of 128 bytes along the reduction
    across   the index lies last in memory: a vector of indices of one step. wgmma reads elements of two bytes that way too
             (rows of 64 indices for each step); TF32 only along the reduction, so float32 is transposed on its way: four rows
             get one element each

Rows are in wgmma's 128-byte swizzle, and the stores of a warp meet every bank equally. float32 is rounded to TF32 once,
in registers. While a stage is multiplied, the next one is stored to the other half of shared memory and the one after
that is on its way into registers, or several are on their way into a queue in shared memory (`VectorQueue`). Loads that
need no copy engine take any geometry: three axes, groups, any stride.
"""

from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
)

from .async_copy import copy_elements
from .pointer import Ptr, Shared
from .tensor_cores import Quad, to_tf32

comptime THREADS = 256
comptime SLOTS = 2
"""Stages in shared memory: one is multiplied while the next is written."""
# Rows between two vectors of one thread, both ways.
comptime APART = 32
comptime _ROW_BYTES = 128
comptime _PANEL = 64


def vector_of[dtype: DType]() -> Int:
    """Returns the number of elements in 16 bytes."""
    return 16 // size_of[dtype]()


def steps_of[dtype: DType]() -> Int:
    """Returns the number of steps of the reduction in a stage."""
    return _ROW_BYTES // size_of[dtype]()


comptime Vector[dtype: DType] = SIMD[dtype, vector_of[dtype]()]


@fieldwise_init
struct WarpgroupTile(Equatable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The tile of a block of two warpgroups: of 128 rows each has half, of 64 rows each has half of the columns.
    """

    var rows: Int
    var columns: Int

    def group_columns(self) -> Int:
        return self.columns if self.rows == 128 else self.columns // 2

    def accumulators(self) -> Int:
        """Returns the number of sums of one thread."""
        return self.group_columns() // 2

    def slot_bytes(self) -> Int:
        """Returns the bytes of both operands' tiles; a tile of fewer columns than a panel takes a panel's room.
        """
        return (self.rows + max(self.columns, _PANEL)) * _ROW_BYTES

    def shared_bytes(self) -> Int:
        """Returns the bytes of all slots, with room to begin at a multiple of 1024 bytes, as the swizzle requires.
        """
        return SLOTS * self.slot_bytes() + 1024


@always_inline
def load_vector[
    dtype: DType
](source: Ptr[dtype], offset: Int, valid: Bool) -> Vector[dtype]:
    """Loads 16 bytes, zeros where not `valid`; their address is a multiple of 16 bytes.
    """
    var value = Vector[dtype](0)
    if valid:
        value = source.unsafe_offset(offset).unsafe_load[
            width=vector_of[dtype](), alignment=16
        ]()
    return value


@fieldwise_init
struct VectorQueue[dtype: DType, count: Int, depth: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A thread's own vectors on their way to a tile, through shared memory: `count` of each of `depth` stages. More of
    them are under way than registers could hold, and no other thread waits for them.
    """

    comptime BYTES = Self.count * Self.depth * THREADS * 16
    var first: UInt32

    @staticmethod
    @always_inline
    def of(address: UInt32, thread: Int32) -> Self:
        return Self(address + UInt32(thread) * 16)

    @always_inline
    def _at(self, stage: Int32, i: Int) -> UInt32:
        var number = stage % Int32(Self.depth) * Int32(Self.count) + Int32(i)
        return self.first + UInt32(number) * UInt32(THREADS * 16)

    @always_inline
    def copy(
        self,
        stage: Int32,
        i: Int,
        source: Ptr[Self.dtype],
        offset: Int,
        valid: Bool,
    ):
        """Starts the copy of a stage's vector number i, zeros where not `valid`.
        """
        copy_elements[vector_of[Self.dtype]()](
            self._at(stage, i), source, offset, valid
        )

    @always_inline
    def vector(self, stage: Int32, i: Int) -> Vector[Self.dtype]:
        """Returns a vector that has arrived."""
        return Shared[Self.dtype](
            unsafe_from_address=Int(self._at(stage, i))
        ).unsafe_load[width=vector_of[Self.dtype](), alignment=16]()


# Places of a thread's vectors; vector number i stands APART * i rows further.


@fieldwise_init
struct DepthMajor[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """Copies of an operand whose reduction is contiguous in memory: eight threads share a row of the tile.
    """

    var row: Int32
    var step: Int32
    """The vector's first step in the stage."""
    var place: Int32

    @staticmethod
    @always_inline
    def of(thread: Int32) -> Self:
        comptime vector = Int32(vector_of[Self.dtype]())
        comptime steps = Int32(steps_of[Self.dtype]())
        var row = thread // 8
        var chunk = thread % 8
        return Self(
            row, chunk * vector, row * steps + (chunk ^ (row % 8)) * vector
        )

    @always_inline
    def store(
        self, tile: Shared[Self.dtype], i: Int, value: Vector[Self.dtype]
    ):
        var at = tile.unsafe_offset(
            Int(self.place) + i * APART * steps_of[Self.dtype]()
        )
        comptime if Self.dtype == DType.float32:
            rebind[Shared[DType.float32]](at).unsafe_store[alignment=16](
                to_tf32(rebind[Quad](value))
            )
        else:
            at.unsafe_store[alignment=16](value)

    @always_inline
    def copy(
        self,
        tile: UInt32,
        i: Int,
        source: Ptr[Self.dtype],
        offset: Int,
        valid: Bool,
    ):
        """Copies as `store` does, but straight from memory, asynchronously; elements of two bytes only.
        """
        copy_elements[8](
            tile + UInt32(self.place) * 2 + UInt32(i * APART * _ROW_BYTES),
            source,
            offset,
            valid,
        )


@fieldwise_init
struct IndexMajor[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """Copies of an operand whose rows or columns are contiguous.

    float32: a warp has 8 steps of 16 indices; half of its threads begin with the third of their four rows, so that
    together they meet 8 different rows of the swizzle. Two bytes: a warp has 8 steps of 32 indices, every other step
    four rows on, for the same reason.
    """

    var row: Int32
    """The vector's first index in the tile."""
    var step: Int32
    var late: Bool
    var places: StaticTuple[Int32, 4]

    @staticmethod
    @always_inline
    def of(thread: Int32) -> Self:
        var warp = thread // 32
        var lane = thread % 32
        var places = StaticTuple[Int32, 4](fill=0)
        comptime if Self.dtype == DType.float32:
            var row = warp // 4 * 16 + lane % 4 * 4
            var step = warp % 4 * 8 + lane // 4
            var late = lane % 4 >= 2
            comptime for e in range(4):
                var at = row + (Int32(e ^ 2) if late else Int32(e))
                places[e] = at * 32 + ((step // 4) ^ (at % 8)) * 4 + step % 4
            return Self(row, step, late, places)
        else:
            var order = lane // 4
            var step = warp * 8 + order % 2 * 4 + order // 2
            var chunk = lane % 4
            places[0] = step * _PANEL + (chunk ^ (step % 8)) * 8
            places[1] = step * _PANEL + ((chunk + 4) ^ (step % 8)) * 8
            return Self(chunk * 8, step, False, places)

    @always_inline
    def store(
        self, tile: Shared[Self.dtype], i: Int, value: Vector[Self.dtype]
    ):
        comptime if Self.dtype == DType.float32:
            var target = rebind[Shared[DType.float32]](tile)
            var rounded = to_tf32(rebind[Quad](value))
            comptime for e in range(4):
                target[
                    unsafe_offset=Int(self.places[e]) + i * APART * 32
                ] = rounded[e ^ 2] if self.late else rounded[e]
        else:
            # A panel of 64 indices has a row for every step.
            tile.unsafe_offset(
                Int(self.places[i % 2])
                + i // 2 * _PANEL * steps_of[Self.dtype]()
            ).unsafe_store[alignment=16](value)

    @always_inline
    def copy(
        self,
        tile: UInt32,
        i: Int,
        source: Ptr[Self.dtype],
        offset: Int,
        valid: Bool,
    ):
        """Copies as `store` does, but straight from memory, asynchronously; elements of two bytes only.
        """
        copy_elements[8](
            tile
            + UInt32(self.places[i % 2]) * 2
            + UInt32(i // 2 * _PANEL * _ROW_BYTES),
            source,
            offset,
            valid,
        )


# Products.


@always_inline
def _descriptor[by_step: Bool](address: UInt32) -> Int64:
    """Returns the descriptor of rows of 128 swizzled bytes, groups of 8 rows 1024 bytes apart; rows of indices
    (`by_step`) in panels, which lie one behind the other."""
    comptime leading = _PANEL * _ROW_BYTES // 16 if by_step else 1
    return (
        Int64((address & 0x3FFFF) >> 4)
        | Int64(1 << 62)
        | Int64(64 << 32)
        | Int64(leading << 16)
    )


@always_inline
def publish_stores():
    """Lets the tensor cores see this thread's stores to shared memory, once a barrier has passed.
    """
    inlined_assembly[
        "fence.proxy.async.shared::cta;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def start_product[
    dtype: DType,
    shape: WarpgroupTile,
    count: Int,
    a_across: Bool,
    b_across: Bool,
](
    mut sums: StaticTuple[Float32, count],
    slot: Shared[dtype],
    warpgroup: Int32,
):
    """Starts adding one stage's product to this warpgroup's sums. `a_across` and `b_across` say how the tiles were
    copied.
    """
    comptime columns = shape.group_columns()
    comptime two_bytes = dtype != DType.float32
    comptime a_by_step = a_across and two_bytes
    comptime b_by_step = b_across and two_bytes
    # 64 indices are as many bytes either way.
    var a_at = UInt32(Int(slot))
    var b_at = a_at + UInt32(shape.rows * _ROW_BYTES)
    comptime if shape.rows == 128:
        a_at += UInt32(warpgroup) * UInt32(64 * _ROW_BYTES)
    else:
        b_at += UInt32(warpgroup) * UInt32(columns * _ROW_BYTES)
    var a = _descriptor[a_by_step](a_at)
    var b = _descriptor[b_by_step](b_at)
    # From one instruction's steps to the next: 32 bytes of a row, or 16 rows; in units of 16 bytes.
    comptime a_step = 128 if a_by_step else 2
    comptime b_step = 128 if b_by_step else 2
    wgmma_fence_aligned()
    comptime for k in range(4):
        sums = wgmma_async[
            64,
            columns,
            32 // size_of[dtype](),
            DType.float32,
            count,
            a_type=dtype,
            b_type=dtype,
            layout_a="col" if a_by_step else "row",
            layout_b="row" if b_by_step else "col",
        ](
            WGMMADescriptor[dtype](a + Int64(a_step * k)),
            WGMMADescriptor[dtype](b + Int64(b_step * k)),
            sums,
        )
    wgmma_commit_group_sync()


@always_inline
def finish_product():
    """Waits until this warpgroup's products are done: their sums may be read, their tiles overwritten after a barrier.
    """
    inlined_assembly[
        "wgmma.wait_group.sync.aligned 0;", NoneType, constraints="~{memory}"
    ]()


# Where a thread's sums stand in its warpgroup's part: sum 4 * j + 2 * half + e is row sum_row + 8 * half,
# column 8 * j + sum_column + e.


@always_inline
def sum_row(thread: Int32) -> Int32:
    return thread % 128 // 32 * 16 + thread % 32 // 4


@always_inline
def sum_column(thread: Int32) -> Int32:
    return thread % 4 * 2
