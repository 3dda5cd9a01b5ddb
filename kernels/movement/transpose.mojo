"""Permuted copies, in tiles: rows of the source are read in one piece, and rows of the result written in one.

The result's elements are counted in memory order, by digits; digit k moves on by `strides[k]` elements in the source.
Two digits span a tile: the result's last one, and the one that moves on by one in the source. The others number the
tiles.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..common.argument import KernelArgument
from ..common.arithmetic import Divisor
from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr

comptime MAX_DIGITS = 6
"""Digits of a permutation, at most, as in fusion/movement.py."""
comptime OTHERS = MAX_DIGITS - 2
"""Digits beside a tile's rows and columns."""
comptime CPU_TILE = 32
"""Rows, and columns, of a task's tile."""
comptime GPU_TILE = 64
"""Rows, and columns, of a block's tile."""
# A block's lanes along a tile's rows, of which each moves two elements, and its rows of lanes.
comptime LANES = 32
comptime ROWS = 8
# A digit of at most so many values leaves most of a square tile empty.
comptime NARROW = 16
comptime NARROW_ELEMENTS = 4096
"""Elements of a block's tile in shared memory."""
comptime NARROW_THREADS = 256


@fieldwise_init
struct Permutation(KernelArgument):
    """The digits that span tiles and the others, with strides in the source and steps in the result.
    """

    var rows: Int
    """Extent of the digit that moves on by one in the source."""
    var columns: Int
    """Extent of the result's last digit, which moves on by one in the result."""
    var step: Int
    """Elements from one row to the next in the result."""
    var pitch: Int
    """Elements from one column to the next in the source."""
    var extents: StaticTuple[Divisor, OTHERS]
    """Extents of the other digits, the last one first."""
    var strides: IndexList[OTHERS]
    var steps: IndexList[OTHERS]

    def __init__(
        out self,
        count: Int,
        extents: IndexList[MAX_DIGITS],
        strides: IndexList[MAX_DIGITS],
    ) raises:
        """Describes a permutation of `count` digits. Raises where no digit but the last one moves on by one in the
        source, or where an extent does not fit int32."""
        self.rows = 0
        self.columns = extents[count - 1]
        self.step = 0
        self.pitch = strides[count - 1]
        self.extents = StaticTuple[Divisor, OTHERS](fill=Divisor(1))
        self.strides = IndexList[OTHERS](0)
        self.steps = IndexList[OTHERS](0)
        var down = -1
        for k in range(count - 1):
            if strides[k] == 1:
                down = k
            if extents[k] > Int(Int32.MAX):
                raise Error(t"transpose: an extent of {extents[k]}")
        if down < 0:
            raise Error("transpose: no two digits span a tile")
        var place = 0
        var step = self.columns
        for reverse in range(count - 1):
            var k = count - 2 - reverse
            if k == down:
                self.rows = extents[k]
                self.step = step
            else:
                self.extents[place] = Divisor(extents[k])
                self.strides[place] = strides[k]
                self.steps[place] = step
                place += 1
            step *= extents[k]

    def size(self) -> Int:
        return self.rows * self.columns * self._others()

    def _others(self) -> Int:
        var count = 1
        comptime for place in range(OTHERS):
            count *= Int(self.extents[place].value)
        return count


@fieldwise_init
struct TransposeTiles(KernelArgument):
    """A permutation's tiles, numbered along the columns first, then down the rows, then along the other digits.
    """

    var permutation: Permutation
    var height: Int
    var width: Int
    var down: Divisor
    var across: Divisor

    def __init__(
        out self, permutation: Permutation, height: Int, width: Int
    ) raises:
        """Tiles of `height` rows and `width` columns. Raises where they are more than an int32 counts.
        """
        self.permutation = permutation
        self.height = height
        self.width = width
        self.down = Divisor(ceildiv(permutation.rows, height))
        self.across = Divisor(ceildiv(permutation.columns, width))
        if self.count() > Int(Int32.MAX):
            raise Error(t"transpose: {self.count()} tiles")

    def count(self) -> Int:
        return (
            self.permutation._others()
            * Int(self.down.value)
            * Int(self.across.value)
        )

    @always_inline
    def tile(self, number: Int32) -> TransposeTile:
        """Returns the position at which a tile begins."""
        var rest, across = self.across.divide(number)
        var outer, down = self.down.divide(rest)
        var row = Int(down) * self.height
        var column = Int(across) * self.width
        var source = row + column * self.permutation.pitch
        var target = column + row * self.permutation.step
        comptime for place in range(OTHERS):
            var next, digit = self.permutation.extents[place].divide(outer)
            outer = next
            source += Int(digit) * self.permutation.strides[place]
            target += Int(digit) * self.permutation.steps[place]
        return TransposeTile(
            source,
            target,
            min(self.height, self.permutation.rows - row),
            min(self.width, self.permutation.columns - column),
        )


@fieldwise_init
struct TransposeTile(ImplicitlyCopyable, TrivialRegisterPassable):
    """Offsets of the first element, and extents."""

    var source: Int
    var target: Int
    var rows: Int
    var columns: Int


@no_inline
def transpose_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation) raises:
    var tiling = TransposeTiles(permutation, CPU_TILE, CPU_TILE)
    var tiles = tiling.count()
    var workers = workers_for(permutation.size())
    var pitch = permutation.pitch
    var step = permutation.step

    @always_inline
    def task(worker: Int) {imm}:
        for number in range(
            tiles * worker // workers, tiles * (worker + 1) // workers
        ):
            var tile = tiling.tile(Int32(number))
            for i in range(tile.rows):
                var row = y.unsafe_offset(tile.target + i * step)
                var column = x.unsafe_offset(tile.source + i)
                for j in range(tile.columns):
                    row[unsafe_offset=j] = column[unsafe_offset=j * pitch]

    sync_parallelize(task, workers)


@__name(t"transpose_{dtype}")
def transpose_kernel[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], tiling: TransposeTiles):
    """Moves a block's tile through shared memory, whose rows are four bytes longer than the tile's, so that columns are
    spread over the banks."""
    comptime pitch_shared = GPU_TILE + max(1, 4 // size_of[dtype]())
    comptime repeats = GPU_TILE // LANES
    comptime V = Scalar[dtype]
    var shared = stack_allocation[
        GPU_TILE * pitch_shared, V, address_space=AddressSpace.SHARED
    ]()
    var tile = tiling.tile(Int32(block_idx.x))
    var pitch = tiling.permutation.pitch
    var step = tiling.permutation.step
    var lane = Int(thread_idx.x)
    var first = Int(thread_idx.y)
    var values = Array[V, GPU_TILE // ROWS * repeats](fill=0)
    # All loads are under way before the first of them is needed.
    comptime for turn in range(GPU_TILE // ROWS):
        comptime for half in range(repeats):
            var i = lane + half * LANES
            var j = first + turn * ROWS
            if i < tile.rows and j < tile.columns:
                values[turn * repeats + half] = x[
                    unsafe_offset=tile.source + j * pitch + i
                ]
    comptime for turn in range(GPU_TILE // ROWS):
        comptime for half in range(repeats):
            shared[
                unsafe_offset=(first + turn * ROWS) * pitch_shared
                + lane
                + half * LANES
            ] = values[turn * repeats + half]
    barrier()
    comptime for turn in range(GPU_TILE // ROWS):
        comptime for half in range(repeats):
            var i = first + turn * ROWS
            var j = lane + half * LANES
            if i < tile.rows and j < tile.columns:
                y[unsafe_offset=tile.target + i * step + j] = shared[
                    unsafe_offset=j * pitch_shared + i
                ]


@__name(t"transpose_narrow_{dtype}_c{few_columns}_{few}")
def narrow_transpose_kernel[
    dtype: DType, few_columns: Bool, few: Int
](y: Ptr[dtype], x: Ptr[dtype], tiling: TransposeTiles, by_few: Divisor):
    """Moves a block's long tile, of at most `few` columns or rows, through shared memory. On the side where the digit
    of few values is the faster one, elements are taken in the order in which they lie.
    """
    comptime length = NARROW_ELEMENTS // few
    comptime turns = length // NARROW_THREADS
    comptime V = Scalar[dtype]
    var shared = stack_allocation[
        NARROW_ELEMENTS, V, address_space=AddressSpace.SHARED
    ]()
    var tile = tiling.tile(Int32(block_idx.x))
    var step = tiling.permutation.step
    var pitch = tiling.permutation.pitch
    var thread = Int32(thread_idx.x)
    var count = by_few.value
    var long = Int32(tile.rows if few_columns else tile.columns)
    # Neighbouring threads are neighbours along the long digit; shared memory is [long][few], as the other side wants
    # it.
    comptime if few_columns:
        var values = Array[V, turns * few](fill=0)
        comptime for turn in range(turns):
            var i = thread + Int32(turn * NARROW_THREADS)
            comptime for j in range(few):
                if i < long and Int32(j) < count:
                    values[turn * few + j] = x[
                        unsafe_offset=tile.source + Int(i) + j * pitch
                    ]
        comptime for turn in range(turns):
            var i = thread + Int32(turn * NARROW_THREADS)
            comptime for j in range(few):
                if i < long and Int32(j) < count:
                    shared[unsafe_offset=Int(i * count + Int32(j))] = values[
                        turn * few + j
                    ]
        barrier()
        comptime for turn in range(turns * few):
            var at = thread + Int32(turn * NARROW_THREADS)
            if at < long * count:
                var i, j = by_few.divide(at)
                y[unsafe_offset=tile.target + Int(i) * step + Int(j)] = shared[
                    unsafe_offset=Int(at)
                ]
    else:
        var values = Array[V, turns * few](fill=0)
        comptime for turn in range(turns * few):
            var at = thread + Int32(turn * NARROW_THREADS)
            if at < long * count:
                var j, i = by_few.divide(at)
                values[turn] = x[
                    unsafe_offset=tile.source + Int(j) * pitch + Int(i)
                ]
        comptime for turn in range(turns * few):
            var at = thread + Int32(turn * NARROW_THREADS)
            if at < long * count:
                shared[unsafe_offset=Int(at)] = values[turn]
        barrier()
        comptime for turn in range(turns):
            var j = thread + Int32(turn * NARROW_THREADS)
            comptime for i in range(few):
                if j < long and Int32(i) < count:
                    y[unsafe_offset=tile.target + Int(j) + i * step] = shared[
                        unsafe_offset=Int(j * count + Int32(i))
                    ]


@no_inline
def narrow_transpose_refusal(
    permutation: Permutation,
) -> Optional[String]:
    """Returns None, or why tiles cannot be as narrow as the tensor."""
    if min(permutation.columns, permutation.rows) > NARROW:
        return String("neither rows nor columns are few")
    return None


@no_inline
def narrow_transpose_gpu[
    dtype: DType
](
    y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation, ctx: DeviceContext
) raises:
    """Permutes a tensor of few columns, or of few rows."""
    comptime for few_columns in [True, False]:
        var count = permutation.columns if few_columns else permutation.rows
        comptime for few in [4, NARROW]:
            comptime length = NARROW_ELEMENTS // few
            if count <= few:
                var tiling = TransposeTiles(
                    permutation, length, few
                ) if few_columns else TransposeTiles(permutation, few, length)
                comptime kernel = narrow_transpose_kernel[
                    dtype, few_columns, few
                ]
                ctx.enqueue_function[kernel](
                    y,
                    x,
                    tiling,
                    Divisor(count),
                    grid_dim=tiling.count(),
                    block_dim=NARROW_THREADS,
                )
                return


@no_inline
def transpose_gpu[
    dtype: DType
](
    y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation, ctx: DeviceContext
) raises:
    """Permutes a tensor in square tiles."""
    var tiling = TransposeTiles(permutation, GPU_TILE, GPU_TILE)
    ctx.enqueue_function[transpose_kernel[dtype]](
        y,
        x,
        tiling,
        grid_dim=tiling.count(),
        block_dim=(LANES, ROWS),
    )
