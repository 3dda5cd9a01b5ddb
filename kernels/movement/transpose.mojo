"""Permuted copies, in tiles: rows of the source are read in one piece, and rows of the result written in one.

The result's elements are counted in memory order, by digits; digit k moves on by `strides[k]` elements in the source. Two
digits span a tile: the result's last one, and the one that moves on by one in the source. The others number the tiles.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.utils.index import IndexList

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..argument import KernelArgument
from ..convolution.common import Ptr, worker_count
from ..parallel import sync_parallelize

comptime MOST_DIGITS = 6
comptime TILE = 32
comptime ROWS = 8
# Below this many elements a second core costs more than it gives.
comptime SMALLEST_SHARE = 16384


@fieldwise_init
struct Permutation(KernelArgument):
    """Extents, strides in the source and in the result; `down` is the digit that moves on by one in the source.
    """

    var count: Int
    var down: Int
    var extents: IndexList[MOST_DIGITS]
    var strides: IndexList[MOST_DIGITS]
    var steps: IndexList[MOST_DIGITS]

    def __init__(
        out self,
        count: Int,
        extents: IndexList[MOST_DIGITS],
        strides: IndexList[MOST_DIGITS],
    ) raises:
        """Raises where no digit moves on by one, or the last one does."""
        self.count = count
        self.extents = extents
        self.strides = strides
        self.steps = IndexList[MOST_DIGITS](0)
        self.down = -1
        var step = 1
        for reverse in range(count):
            var k = count - 1 - reverse
            self.steps[k] = step
            step *= extents[k]
            if strides[k] == 1:
                self.down = k
        if self.down < 0 or self.down == count - 1:
            raise Error("transpose: no two digits span a tile")

    @always_inline
    def size(self) -> Int:
        return self.steps[0] * self.extents[0]

    @always_inline
    def tiles_down(self) -> Int:
        return ceildiv(self.extents[self.down], TILE)

    @always_inline
    def tiles_across(self) -> Int:
        return ceildiv(self.extents[self.count - 1], TILE)

    @always_inline
    def tiles(self) -> Int:
        var others = self.size() // (
            self.extents[self.down] * self.extents[self.count - 1]
        )
        return others * self.tiles_down() * self.tiles_across()

    @always_inline
    def tile(self, number: Int) -> Tile:
        """Where a tile begins."""
        var across = number % self.tiles_across()
        var rest = number // self.tiles_across()
        var down = rest % self.tiles_down()
        rest = rest // self.tiles_down()
        var last = self.count - 1
        var source = down * TILE + across * TILE * self.strides[last]
        var target = across * TILE + down * TILE * self.steps[self.down]
        for reverse in range(self.count - 1):
            var k = last - 1 - reverse
            if k != self.down:
                var digit = rest % self.extents[k]
                rest = rest // self.extents[k]
                source += digit * self.strides[k]
                target += digit * self.steps[k]
        return Tile(
            source,
            target,
            min(TILE, self.extents[self.down] - down * TILE),
            min(TILE, self.extents[last] - across * TILE),
        )


@fieldwise_init
struct Tile(ImplicitlyCopyable, TrivialRegisterPassable):
    """Offsets of the first element, and extents."""

    var source: Int
    var target: Int
    var down: Int
    var across: Int


@no_inline
def transpose_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation):
    var tiles = permutation.tiles()
    var workers = max(
        1, min(worker_count(), permutation.size() // SMALLEST_SHARE)
    )
    var pitch = permutation.strides[permutation.count - 1]
    var step = permutation.steps[permutation.down]

    @always_inline
    def task(worker: Int) {imm}:
        for number in range(
            tiles * worker // workers, tiles * (worker + 1) // workers
        ):
            var tile = permutation.tile(number)
            for i in range(tile.down):
                var row = y.unsafe_offset(tile.target + i * step)
                var column = x.unsafe_offset(tile.source + i)
                for j in range(tile.across):
                    row[unsafe_offset=j] = column[unsafe_offset=j * pitch]

    sync_parallelize(task, workers)


def transpose_kernel[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation):
    """A block moves a tile through shared memory, one column wider than it is, so that columns lie in many banks.
    """
    var shared = stack_allocation[
        TILE * (TILE + 1), Scalar[dtype], address_space=AddressSpace.SHARED
    ]()
    var tile = permutation.tile(Int(block_idx.x))
    var pitch = permutation.strides[permutation.count - 1]
    var step = permutation.steps[permutation.down]
    var lane = Int(thread_idx.x)
    if lane < tile.down:
        for j in range(Int(thread_idx.y), tile.across, ROWS):
            shared[unsafe_offset=j * (TILE + 1) + lane] = x[
                unsafe_offset=tile.source + j * pitch + lane
            ]
    barrier()
    if lane < tile.across:
        for i in range(Int(thread_idx.y), tile.down, ROWS):
            y[unsafe_offset=tile.target + i * step + lane] = shared[
                unsafe_offset=lane * (TILE + 1) + i
            ]


@no_inline
def transpose_gpu[
    dtype: DType
](
    y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation, ctx: DeviceContext
) raises:
    ctx.enqueue_function[transpose_kernel[dtype]](
        y,
        x,
        permutation,
        grid_dim=permutation.tiles(),
        block_dim=(TILE, ROWS),
    )
