"""Programs over the same rows in one launch, one after the other: sums of a row and what is computed from them.

Softmax and normalization read a row two or three times. Here a team of threads has some rows from the first program to
the last: those behind the first find the rows in the nearest cache, and what earlier ones have written of these rows.
"""

from std.math import ceildiv

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.sys.info import is_nvidia_gpu

from ..common.argument import KernelArgument
from ..common.arithmetic import divide
from ..common.gpu import VECTOR_BYTES
from ..common.library import Arguments
from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from ..common.ptx import syncwarp
from ..pointwise.cpu import walk
from ..pointwise.entries import operands_of
from ..pointwise.program import ProgramOperands, RunPositions
from .cpu import row_values
from .gpu import MIN_VECTORS, THREADS, WARP, lanes_reduce
from .program import Reduction
from .values import Values

comptime _WARP_VECTORS = 8
"""Vectors of a row that each thread of a warp reads at most; of longer rows a block has them."""
comptime CACHED_ELEMENTS = 4096
"""Elements of rows that a core takes through all programs at once."""


@fieldwise_init
struct Team(ImplicitlyCopyable, TrivialRegisterPassable):
    """The threads that take rows through all programs: of a warp where they suffice, so that no warp waits for others,
    else of a block."""

    var thread: Int
    """Number of this thread in the team."""
    var threads: Int
    var lanes: Int
    """Threads that add up one row."""

    @always_inline
    def meet(self):
        """Waits until what was written is there for all threads of the team."""
        comptime if is_nvidia_gpu():
            if self.threads == WARP:
                syncwarp()
                return
        barrier()


trait RowProgram(KernelArgument):
    """What a launch does with rows; elements and rows are counted from the tensors' beginning.
    """

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        """With its operands, as the program's own entry takes them behind its sizes.
        """
        ...

    def is_aligned(self) -> Bool:
        """Whether vectors may be moved."""
        ...

    def on_gpu[wide: Bool](self, first: Int, rows: Int, extent: Int, by: Team):
        """Of `rows` rows of `extent` elements, by the threads of a team; by vectors if `wide`.
        """
        ...

    def on_cpu(self, first: Int, rows: Int, extent: Int):
        ...


def _is_aligned[
    count: Int, dims: Int, tensors: Int
](operands: ProgramOperands[count, dims]) -> Bool:
    var joined = 0
    comptime for n in range(tensors):
        joined |= operands.data[n]
    return joined % VECTOR_BYTES == 0


@fieldwise_init
struct ReducedRows[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
    parts: Int,
    guards: Int,
    numbers: Int,
](RowProgram):
    """A reduction of each row."""

    comptime Program = Reduction[
        Self.acc,
        Self.result,
        Self.kinds,
        Self.results,
        Self.count,
        Self.dims,
        Self.run,
    ]

    var operands: ProgramOperands[Self.count, Self.dims]

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        var loop_nest = arguments.take_list()
        return Self(
            operands_of[Self.count, Self.dims, Self.guards, Self.numbers](
                loop_nest, arguments
            )
        )

    def is_aligned(self) -> Bool:
        return _is_aligned[
            Self.count, Self.dims, Self.count - Self.guards - Self.numbers
        ](self.operands)

    @always_inline
    def _store[n: Int](self, row: Int, value: Scalar[Self.acc]):
        Ptr[Self.result](unsafe_from_address=self.operands.data[n])[
            unsafe_offset=row
        ] = value.cast[Self.result]()

    @always_inline
    def on_gpu[wide: Bool](self, first: Int, rows: Int, extent: Int, by: Team):
        comptime width = Self.vector if wide else 1
        var lanes = by.lanes
        var mine = divide(Int32(by.thread), Int32(lanes))
        var lane = Int(mine[1])
        var row = Int(mine[0])
        var values = Values[Self.acc, width, Self.results].start[Self.kinds]()
        if row < rows:
            var vectors = extent // width
            var start = (first + row) * extent
            for vector in range(lane, vectors, lanes * Self.parts):
                var places = RunPositions[Self.dims, Self.parts](
                    self.operands.place(start + vector * width)
                )
                comptime for part in range(1, Self.parts):
                    var next = vector + part * lanes
                    places.put[part](
                        self.operands.place(
                            start + min(next, vectors - 1) * width
                        ),
                        next < vectors,
                    )
                values.fold_runs[Self.kinds, Self.parts](
                    Self.run[width * Self.parts, Self.parts](
                        self.operands, places
                    ),
                    places.live,
                )
        var own = values.across[Self.kinds]()
        comptime for n in range(Self.results):
            var value = lanes_reduce[Self.acc, Self.kinds, n](
                own.data[n], lanes
            )
            if lane == 0 and row < rows:
                self._store[n](first + row, value[0])

    @always_inline
    def on_cpu(self, first: Int, rows: Int, extent: Int):
        for row in range(first, first + rows):
            var values = row_values[Self.Program, Self.vector](
                self.operands, row * extent, (row + 1) * extent
            )
            comptime for n in range(Self.results):
                self._store[n](row, values.data[n][0])


@fieldwise_init
struct ComputedRows[
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    vector: Int,
    guards: Int,
    numbers: Int,
    whole: Bool,
](RowProgram):
    """A pointwise program over the `whole` rows, or over one element for each.
    """

    var operands: ProgramOperands[Self.count, Self.dims]

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        var loop_nest = arguments.take_list()
        return Self(
            operands_of[Self.count, Self.dims, Self.guards, Self.numbers](
                loop_nest, arguments
            )
        )

    def is_aligned(self) -> Bool:
        return _is_aligned[
            Self.count, Self.dims, Self.count - Self.guards - Self.numbers
        ](self.operands)

    @always_inline
    def on_gpu[wide: Bool](self, first: Int, rows: Int, extent: Int, by: Team):
        comptime width = Self.vector if wide and Self.whole else 1
        var each = extent if Self.whole else 1
        var start = first * each
        for vector in range(by.thread, rows * each // width, by.threads):
            Self.run[width, 1](
                self.operands, self.operands.place(start + vector * width)
            )

    @always_inline
    def on_cpu(self, first: Int, rows: Int, extent: Int):
        var each = extent if Self.whole else 1
        walk[Self.count, Self.dims, Self.run, Self.vector](
            self.operands, first * each, (first + rows) * each
        )


@fieldwise_init
struct Then[A: RowProgram, B: RowProgram](RowProgram):
    """One program after another."""

    var a: Self.A
    var b: Self.B

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        var a = Self.A.take(arguments)
        var b = Self.B.take(arguments)
        return Self(a, b)

    def is_aligned(self) -> Bool:
        return self.a.is_aligned() and self.b.is_aligned()

    @always_inline
    def on_gpu[wide: Bool](self, first: Int, rows: Int, extent: Int, by: Team):
        self.a.on_gpu[wide](first, rows, extent, by)
        by.meet()
        self.b.on_gpu[wide](first, rows, extent, by)

    @always_inline
    def on_cpu(self, first: Int, rows: Int, extent: Int):
        self.a.on_cpu(first, rows, extent)
        self.b.on_cpu(first, rows, extent)


@__name(t"rows_{name}")
def rows_kernel[
    P: RowProgram, wide: Bool, name: StaticString
](program: P, outer: Int64, extent: Int64, lanes: Int64):
    var threads = THREADS if lanes > WARP else WARP
    var team, thread = divide(Int32(thread_idx.x), Int32(threads))
    var rows = threads // Int(lanes)
    var first = (Int(block_idx.x) * (THREADS // threads) + Int(team)) * rows
    program.on_gpu[wide](
        first,
        min(rows, Int(outer) - first),
        Int(extent),
        Team(Int(thread), threads, Int(lanes)),
    )


@always_inline
def _launch[
    P: RowProgram, wide: Bool, name: StaticString
](program: P, outer: Int, extent: Int, vector: Int, ctx: DeviceContext) raises:
    var most = THREADS if WARP * vector * _WARP_VECTORS < extent else WARP
    var lanes = 1
    while lanes < most and lanes * vector * MIN_VECTORS < extent:
        lanes *= 2
    ctx.enqueue_function[rows_kernel[P, wide, name]](
        program,
        Int64(outer),
        Int64(extent),
        Int64(lanes),
        grid_dim=ceildiv(outer, THREADS // lanes),
        block_dim=THREADS,
    )


def rows[
    target: StaticString, P: RowProgram, name: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The programs over rows: how many there are, how long they are, and the vector of a GPU's thread come first.
    """
    var outer = arguments.take_word()
    var extent = arguments.take_word()
    var vector = arguments.take_word()
    var program = P.take(arguments)
    comptime if is_cpu[target]():
        var near = max(1, CACHED_ELEMENTS // extent)
        var blocks = ceildiv(outer, near)
        var workers = workers_for(outer * extent)

        @always_inline
        def task(worker: Int) {imm}:
            for block in range(
                blocks * worker // workers, blocks * (worker + 1) // workers
            ):
                var first = block * near
                program.on_cpu(first, min(near, outer - first), extent)

        sync_parallelize(task, workers)
    else:
        if program.is_aligned():
            _launch[P, True, name](program, outer, extent, vector, ctx)
        else:
            _launch[P, False, name](program, outer, extent, 1, ctx)
