"""y [outer, places, inner] = x, or zeros, with source [outer, count, inner] added to (or put in) the places of a list
that has been sorted, on a GPU.

The sorted list is cut into pieces of equal length. A thread adds up the rows of a piece that go to the same place, one
place after the other. Where all rows of a place lie in one piece, it writes the sum to y; else it keeps the sum of the
piece's part, and a second kernel adds the parts in their order. So a place that is hit often costs no longer than
others, and results are the same in every run.

What a thread computes is a function of its number: tests run them on a CPU (tests/kernels/sorted_rows_walk.mojo).
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.argument import KernelArgument
from ..common.atomics import add_atomically
from ..common.bounds import Bounds
from ..common.library import scratch
from ..common.pointer import Ptr
from .extents import THREADS, Rows, sum_type
from .order import order_gpu

comptime CARRIED = 4
"""Columns of a thread."""
comptime LOADS_IN_FLIGHT = 4
"""Rows, or parts, that a thread reads before it adds the first of them."""
comptime SATURATING_THREADS = 1 << 16
"""Enough for a large GPU: there are more pieces where columns are few."""
comptime MIN_PIECE = 16
comptime COMBINED = 32
"""Columns of a block that adds up parts."""
comptime SHARES = THREADS // COMBINED
"""Threads that share the parts of a column."""


@fieldwise_init
struct Pieces(KernelArgument):
    """The division of the work into pieces."""

    var rows: Rows
    var length: Int
    """Rows of a piece."""
    var lanes: Int
    """Threads of a piece that lie side by side."""
    var stretches: Int
    """Stretches into which the columns are divided where `lanes` threads do not cover them."""

    def __init__(out self, rows: Rows):
        self.rows = rows
        var wanted = ceildiv(rows.columns(), CARRIED)
        self.stretches = ceildiv(wanted, THREADS)
        self.lanes = ceildiv(wanted, self.stretches)
        self.length = max(
            ceildiv(
                rows.count * self.lanes * self.stretches, SATURATING_THREADS
            ),
            MIN_PIECE,
        )

    @always_inline
    def pieces(self) -> Int:
        return ceildiv(self.rows.count, self.length)


@always_inline
def _finish[
    dtype: DType
](y: Ptr[dtype], sum: Scalar[sum_type[dtype]], zeros: Bool):
    """Adds the one sum of an element's rows to y, or stores it if `zeros`; an atomic addition spares the wait for y's
    old value."""
    comptime atomic = dtype == sum_type[dtype]
    if zeros:
        y[] = sum.cast[dtype]()
    else:
        comptime if atomic:
            add_atomically(y, sum.cast[dtype]())
        else:
            y[] = (y[].cast[sum_type[dtype]]() + sum).cast[dtype]()


@always_inline
def sum_piece[
    dtype: DType
](
    y: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
    thread: Int,
):
    """Runs thread number `thread`, counted over all blocks. `parts` [2, pieces, columns] receives the sums of the place
    within which a piece begins, and of the one that goes on behind it. `y` already holds the values that sums are added
    to."""
    comptime acc = sum_type[dtype]
    var rows = p.rows
    var lane = thread % p.lanes
    var piece = thread // p.lanes // p.stretches
    var stretch = thread // p.lanes % p.stretches
    var columns = rows.columns()
    var begin = piece * p.length
    if begin >= rows.count:
        return
    var end = min(begin + p.length, rows.count)
    var first_column = stretch * p.lanes * CARRIED + lane
    var from_ = Array[Int, CARRIED](fill=0)
    var live = Array[Bool, CARRIED](fill=False)
    var sums = Array[Scalar[acc], CARRIED](fill=0)
    comptime for k in range(CARRIED):
        var column = first_column + k * p.lanes
        live[k] = column < columns
        from_[k] = rows.at(column, 0, rows.count)
    var place = sorted[unsafe_offset=begin]
    var goes_on = begin > 0 and sorted[unsafe_offset=begin - 1] == place

    @always_inline
    def keep(is_last: Bool) {imm}:
        """Writes the sums of `place`, to the parts where others have the rest.
        """
        var continues = (
            is_last and end < rows.count and sorted[unsafe_offset=end] == place
        )
        comptime for k in range(CARRIED):
            var column = first_column + k * p.lanes
            if live[k] and Int(place) < rows.places:
                if goes_on:
                    parts[unsafe_offset=piece * columns + column] = sums[k]
                elif continues:
                    parts[
                        unsafe_offset=(p.pieces() + piece) * columns + column
                    ] = sums[k]
                else:
                    _finish(
                        y.unsafe_offset(
                            rows.at(column, Int(place), rows.places)
                        ),
                        sums[k],
                        rows.zeros,
                    )

    for i in range(begin, end, LOADS_IN_FLIGHT):
        var values = Array[Scalar[acc], LOADS_IN_FLIGHT * CARRIED](fill=0)
        comptime for u in range(LOADS_IN_FLIGHT):
            if i + u < end:
                var row = Int(sources[unsafe_offset=i + u]) * rows.inner
                comptime for k in range(CARRIED):
                    if live[k]:
                        values[u * CARRIED + k] = source[
                            unsafe_offset=from_[k] + row
                        ].cast[acc]()
        comptime for u in range(LOADS_IN_FLIGHT):
            if i + u < end:
                var next = sorted[unsafe_offset=i + u]
                if next != place:
                    keep(False)
                    goes_on = False
                    place = next
                    comptime for k in range(CARRIED):
                        sums[k] = 0
                comptime for k in range(CARRIED):
                    sums[k] += values[u * CARRIED + k]
    keep(True)


@always_inline
def last_piece(sorted: Ptr[DType.int32], p: Pieces, piece: Int) -> Int:
    """Returns the last piece that begins within the place that goes on behind `piece`; -1 if that place began before
    `piece`, if none goes on, or if it lies outside."""
    var begin = piece * p.length
    var end = begin + p.length
    if end >= p.rows.count:
        return -1
    var place = sorted[unsafe_offset=end]
    if sorted[unsafe_offset=end - 1] != place or Int(place) >= p.rows.places:
        return -1
    if begin > 0 and sorted[unsafe_offset=begin - 1] == place:
        return -1
    # Most places end soon.
    var low = piece + 1
    var high = p.pieces() - 1
    var step = 1
    while low + step <= high:
        if sorted[unsafe_offset=(low + step) * p.length] != place:
            high = low + step - 1
            break
        low += step
        step *= 2
    while low < high:
        var middle = (low + high + 1) // 2
        if sorted[unsafe_offset=middle * p.length] == place:
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
    share: Int,
) -> Scalar[sum_type[dtype]]:
    """Adds up one of SHARES shares of the parts of a place, in their order."""
    var total = Scalar[sum_type[dtype]](0)
    var columns = p.rows.columns()
    var number = last - piece
    if share == 0:
        total = parts[unsafe_offset=(p.pieces() + piece) * columns + column]
    var end = piece + 1 + number * (share + 1) // SHARES
    for first in range(
        piece + 1 + number * share // SHARES, end, 2 * LOADS_IN_FLIGHT
    ):
        var values = Array[Scalar[sum_type[dtype]], 2 * LOADS_IN_FLIGHT](fill=0)
        comptime for u in range(2 * LOADS_IN_FLIGHT):
            if first + u < end:
                values[u] = parts[unsafe_offset=(first + u) * columns + column]
        comptime for u in range(2 * LOADS_IN_FLIGHT):
            total += values[u]
    return total


@__name(t"scatter_sum_pieces_{dtype}")
def sum_pieces_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    p: Pieces,
):
    sum_piece[dtype](y, parts, sorted, sources, source, p, Int(global_idx.x))


@__name(t"scatter_sum_parts_{dtype}")
def sum_parts_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    parts: Ptr[sum_type[dtype]],
    sorted: Ptr[DType.int32],
    p: Pieces,
):
    """A block has a piece and COMBINED columns."""
    comptime acc = sum_type[dtype]
    var shared = stack_allocation[
        THREADS, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var rows = p.rows
    var stretches = ceildiv(rows.columns(), COMBINED)
    var piece = Int(block_idx.x) // stretches
    var column = Int(block_idx.x) % stretches * COMBINED + thread % COMBINED
    var last = last_piece(sorted, p, piece)
    if last < 0:
        return
    var share = thread // COMBINED
    var total = Scalar[acc](0)
    if column < rows.columns():
        total = sum_parts[dtype](parts, p, piece, last, column, share)
    shared[unsafe_offset=thread] = total
    barrier()
    if share > 0 or column >= rows.columns():
        return
    for other in range(1, SHARES):
        total += shared[unsafe_offset=thread + other * COMBINED]
    var place = Int(sorted[unsafe_offset=(piece + 1) * p.length])
    _finish[dtype](
        y.unsafe_offset(rows.at(column, place, rows.places)), total, rows.zeros
    )


@always_inline
def put_row[
    dtype: DType
](
    y: Ptr[dtype],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    rows: Rows,
    item: Int,
):
    """Element `item` of all rows in sorted order: the last row of a place is put there.
    """
    var columns = rows.columns()
    var i = item // columns
    var column = item % columns
    if i >= rows.count:
        return
    var place = sorted[unsafe_offset=i]
    if Int(place) >= rows.places:
        return
    if i + 1 < rows.count and sorted[unsafe_offset=i + 1] == place:
        return
    var row = Int(sources[unsafe_offset=i])
    y[unsafe_offset=rows.at(column, Int(place), rows.places)] = source[
        unsafe_offset=rows.at(column, row, rows.count)
    ]


@__name(t"scatter_put_rows_{dtype}")
def put_rows_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    source: Ptr[dtype],
    rows: Rows,
):
    put_row[dtype](y, sorted, sources, source, rows, Int(global_idx.x))


@no_inline
def sorted_rows_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    bounds: Bounds,
    ctx: DeviceContext,
) raises:
    """Adds (or puts) rows by a sorted list. `y` already holds the values that they are added to. There are places,
    columns and a list of at least one place."""
    if max(rows.count, rows.places) >= Int(Int32.MAX):
        raise Error(
            t"scatter: {rows.count} rows go to {rows.places} places: must be"
            t" below 2^31"
        )
    var p = Pieces(rows)
    var order = order_gpu(index, rows.count, rows.places, bounds, ctx)
    comptime if accumulate:
        var parts = scratch[sum_type[dtype]](
            ctx, 2 * p.pieces() * rows.columns()
        )
        var threads = p.pieces() * p.lanes * p.stretches
        ctx.enqueue_function[sum_pieces_kernel[dtype]](
            y,
            parts,
            order.places,
            order.sources,
            source,
            p,
            grid_dim=ceildiv(threads, THREADS),
            block_dim=THREADS,
        )
        if p.pieces() > 1:
            ctx.enqueue_function[sum_parts_kernel[dtype]](
                y,
                parts,
                order.places,
                p,
                grid_dim=(p.pieces() - 1) * ceildiv(rows.columns(), COMBINED),
                block_dim=THREADS,
            )
    else:
        ctx.enqueue_function[put_rows_kernel[dtype]](
            y,
            order.places,
            order.sources,
            source,
            rows,
            grid_dim=ceildiv(rows.count * rows.columns(), THREADS),
            block_dim=THREADS,
        )
