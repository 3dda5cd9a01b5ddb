"""y [outer, places, inner] = x, or zeros, with source [outer, count, inner] added to (or put in) the places of a list that has
been sorted, on a GPU.

The sorted list is cut into pieces of equal length. A thread adds up the rows of a piece that go to the same place, one place
after the other. Where all rows of a place lie in one piece, it writes the sum to y; else it keeps the sum of the piece's part,
and a second kernel adds the parts in their order. So a place that is hit often costs no longer than others, and results are
the same in every run.

What a thread computes is a function of its number: tests run them on a CPU (tests/kernels/sorted_rows_walk.mojo).
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.argument import KernelArgument
from ..common.bounds import Bounds
from ..common.library import scratch
from ..common.pointer import Ptr
from .extents import Rows
from .few_columns import sum_type
from .order import order_gpu

comptime BLOCK = 256
comptime CARRIED = 4
"""Columns of a thread."""
comptime THREADS = 1 << 17
"""As many as a large GPU runs at a time: there are more pieces where columns are few."""
comptime LEAST_PIECE = 8
comptime COMBINED = 32
"""Columns of a block that adds up parts."""
comptime GROUPS = BLOCK // COMBINED
"""Threads that share the parts of a column."""


@fieldwise_init
struct Pieces(KernelArgument):
    """How the work is cut.

    Columns count those of all outer slices.
    """

    var outer: Int64
    var places: Int64
    var count: Int64
    var inner: Int64
    var zeros: Bool
    var length: Int64
    """Of a piece."""
    var lanes: Int64
    """Threads of a piece, a power of two up to BLOCK, unless columns are so many that there are several stretches.
    """
    var stretches: Int64

    def __init__(out self, rows: Rows):
        self.outer = Int64(rows.outer)
        self.places = Int64(rows.places)
        self.count = Int64(rows.count)
        self.inner = Int64(rows.inner)
        self.zeros = rows.zeros
        var wanted = ceildiv(rows.outer * rows.inner, CARRIED)
        self.lanes = 1
        while self.lanes < Int64(min(wanted, BLOCK)):
            self.lanes *= 2
        self.stretches = Int64(ceildiv(wanted, Int(self.lanes)))
        self.length = max(
            (self.count * self.lanes * self.stretches + THREADS - 1) // THREADS,
            LEAST_PIECE,
        )

    @always_inline
    def columns(self) -> Int:
        return Int(self.outer * self.inner)

    @always_inline
    def pieces(self) -> Int:
        return Int((self.count + self.length - 1) // self.length)

    @always_inline
    def at(self, column: Int, row: Int, rows: Int64) -> Int:
        """Where a column of a row lies in a tensor [outer, rows, inner]."""
        var inner = Int(self.inner)
        if self.outer == 1:
            return row * inner + column
        return (column // inner * Int(rows) + row) * inner + column % inner


@always_inline
def sum_piece[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
    thread: Int,
):
    """Thread number `thread`, counted over all blocks. `parts` is [2, pieces, columns]: of the place that a piece begins within,
    and of the one that goes on behind it."""
    comptime acc = sum_type[dtype]
    var lane = thread % Int(p.lanes)
    var piece = thread // Int(p.lanes) // Int(p.stretches)
    var stretch = thread // Int(p.lanes) % Int(p.stretches)
    var columns = p.columns()
    var i = piece * Int(p.length)
    if i >= Int(p.count):
        return
    var end = min(i + Int(p.length), Int(p.count))
    var first_column = stretch * Int(p.lanes) * CARRIED + lane
    var goes_on = (
        i > 0 and sorted[unsafe_offset=i - 1] == sorted[unsafe_offset=i]
    )
    while i < end:
        var place = sorted[unsafe_offset=i]
        var sums = Array[Scalar[acc], CARRIED](fill=0)
        while i < end and sorted[unsafe_offset=i] == place:
            var row = Int(sources[unsafe_offset=i])
            comptime for k in range(CARRIED):
                var column = first_column + k * Int(p.lanes)
                if column < columns:
                    sums[k] += source[
                        unsafe_offset=p.at(column, row, p.count)
                    ].cast[acc]()
            i += 1
        var is_last = i == end and end < Int(p.count)
        var ends = not (is_last and sorted[unsafe_offset=end] == place)
        comptime for k in range(CARRIED):
            var column = first_column + k * Int(p.lanes)
            if column < columns and Int(place) < Int(p.places):
                if goes_on:
                    parts[unsafe_offset=piece * columns + column] = sums[k]
                elif not ends:
                    parts[
                        unsafe_offset=(p.pieces() + piece) * columns + column
                    ] = sums[k]
                else:
                    var to = p.at(column, Int(place), p.places)
                    if not p.zeros:
                        sums[k] += x[unsafe_offset=to].cast[acc]()
                    y[unsafe_offset=to] = sums[k].cast[dtype]()
        goes_on = False


@always_inline
def last_piece(sorted: Ptr[DType.int32], p: Pieces, piece: Int) -> Int:
    """The last piece that begins within the place that goes on behind `piece`; -1 where that place began before, or none goes
    on, or it is outside."""
    var begin = piece * Int(p.length)
    var end = begin + Int(p.length)
    if end >= Int(p.count):
        return -1
    var place = sorted[unsafe_offset=end]
    if sorted[unsafe_offset=end - 1] != place or Int(place) >= Int(p.places):
        return -1
    if begin > 0 and sorted[unsafe_offset=begin - 1] == place:
        return -1
    var low = piece + 1
    var high = p.pieces() - 1
    while low < high:
        var middle = (low + high + 1) // 2
        if sorted[unsafe_offset=middle * Int(p.length)] == place:
            low = middle
        else:
            high = middle - 1
    return low


@always_inline
def sum_parts[
    dtype: DType
](
    parts: Ptr[sum_type[dtype]],
    p: Pieces,
    piece: Int,
    last: Int,
    column: Int,
    group: Int,
) -> Scalar[sum_type[dtype]]:
    """Share `group` of GROUPS of the parts of a place, in their order."""
    var total = Scalar[sum_type[dtype]](0)
    var columns = p.columns()
    var number = last - piece
    if group == 0:
        total = parts[unsafe_offset=(p.pieces() + piece) * columns + column]
    for each in range(
        piece + 1 + number * group // GROUPS,
        piece + 1 + number * (group + 1) // GROUPS,
    ):
        total += parts[unsafe_offset=each * columns + column]
    return total


@__name(t"scatter_sum_pieces_{dtype}")
def sum_pieces_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
):
    sum_piece[dtype](y, x, parts, sorted, sources, source, p, Int(global_idx.x))


@__name(t"scatter_sum_parts_{dtype}")
def sum_parts_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    p: Pieces,
):
    """A block has a piece and COMBINED columns."""
    comptime acc = sum_type[dtype]
    var shared = stack_allocation[
        BLOCK, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var stretches = ceildiv(p.columns(), COMBINED)
    var piece = Int(block_idx.x) // stretches
    var column = Int(block_idx.x) % stretches * COMBINED + thread % COMBINED
    var last = last_piece(sorted, p, piece)
    if last < 0:
        return
    var group = thread // COMBINED
    var total = Scalar[acc](0)
    if column < p.columns():
        total = sum_parts[dtype](parts, p, piece, last, column, group)
    shared[unsafe_offset=thread] = total
    barrier()
    if group > 0 or column >= p.columns():
        return
    for other in range(1, GROUPS):
        total += shared[unsafe_offset=thread + other * COMBINED]
    var place = Int(sorted[unsafe_offset=(piece + 1) * Int(p.length)])
    var to = p.at(column, place, p.places)
    if not p.zeros:
        total += x[unsafe_offset=to].cast[acc]()
    y[unsafe_offset=to] = total.cast[dtype]()


@always_inline
def put_row[
    dtype: DType
](
    y: Ptr[dtype],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
    item: Int,
):
    """Element `item` of all rows in sorted order: the last row of a place is put there.
    """
    var columns = p.columns()
    var i = item // columns
    var column = item % columns
    if i >= Int(p.count):
        return
    var place = sorted[unsafe_offset=i]
    if Int(place) >= Int(p.places):
        return
    if i + 1 < Int(p.count) and sorted[unsafe_offset=i + 1] == place:
        return
    var row = Int(sources[unsafe_offset=i])
    y[unsafe_offset=p.at(column, Int(place), p.places)] = source[
        unsafe_offset=p.at(column, row, p.count)
    ]


@__name(t"scatter_put_rows_{dtype}")
def put_rows_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
):
    put_row[dtype](y, sorted, sources, source, p, Int(global_idx.x))


@always_inline
def start_rows_gpu[
    dtype: DType, //
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    zeros: Bool,
    ctx: DeviceContext,
) raises:
    """y = what is added to."""
    if zeros:
        ctx.enqueue_memset(y, 0)
    else:
        ctx.enqueue_copy(y, x)


@no_inline
def sorted_rows_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    bounds: Bounds,
    ctx: DeviceContext,
) raises:
    """`rows` has places, columns and a list of at least one place."""
    start_rows_gpu(y, x, rows.zeros, ctx)
    if max(rows.count, rows.places) >= Int(Int32.MAX):
        raise Error(
            t"scatter: {rows.count} rows go to {rows.places} places: must be"
            t" below 2^31"
        )
    var p = Pieces(rows)
    var order = order_gpu(index, rows.count, rows.places, bounds, ctx)
    comptime if accumulate:
        var parts = scratch[sum_type[dtype]](ctx, 2 * p.pieces() * p.columns())
        var threads = p.pieces() * Int(p.lanes * p.stretches)
        ctx.enqueue_function[sum_pieces_kernel[dtype]](
            y,
            x,
            parts,
            order.places,
            order.sources,
            source,
            p,
            grid_dim=ceildiv(threads, BLOCK),
            block_dim=BLOCK,
        )
        if p.pieces() > 1:
            ctx.enqueue_function[sum_parts_kernel[dtype]](
                y,
                x,
                parts,
                order.places,
                p,
                grid_dim=(p.pieces() - 1) * ceildiv(p.columns(), COMBINED),
                block_dim=BLOCK,
            )
    else:
        ctx.enqueue_function[put_rows_kernel[dtype]](
            y,
            order.places,
            order.sources,
            source,
            p,
            grid_dim=ceildiv(rows.count * p.columns(), BLOCK),
            block_dim=BLOCK,
        )
