"""y [outer, places, inner] = x, then y[o, index[o, i, n], n] += (or =) source[o, i, n] for index [outer, count, inner].

Every (o, n) is a column of its own, whose elements are added in their order: a core walks all of its columns side by
side, since neighbouring elements lie in neighbouring columns. Where `zeros`, y = 0 before.

On a GPU a thread walks one column, or all elements are sorted by where they go, as rows of one element
(sorted_rows.mojo).
"""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ..common.arithmetic import Divisor
from ..common.bounds import Bounds, current_bounds
from ..common.library import scratch
from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from .extents import THREADS, Rows
from .rows import start_row
from .sorted_rows import sorted_rows_gpu


@always_inline
def scatter_column[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    column: Int,
    bounds: Bounds,
):
    """Column number `column`, counted over all outer slices."""
    if column >= rows.outer * rows.inner:
        return
    var o = column // rows.inner
    var n = column % rows.inner
    var base = o * rows.places * rows.inner + n
    for place in range(rows.places):
        var at = base + place * rows.inner
        y[unsafe_offset=at] = Scalar[dtype](0) if rows.zeros else x[
            unsafe_offset=at
        ]
    var from_ = o * rows.count * rows.inner + n
    for i in range(rows.count):
        var at = from_ + i * rows.inner
        var place = index[unsafe_offset=at]
        if bounds.holds(place, Int64(rows.places)):
            var to = base + Int(place) * rows.inner
            comptime if accumulate:
                y[unsafe_offset=to] += source[unsafe_offset=at]
            else:
                y[unsafe_offset=to] = source[unsafe_offset=at]


@no_inline
def elements_cpu[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
):
    """Scatters elements on a CPU. `index` has been checked."""
    var columns = rows.outer * rows.inner
    var workers = max(
        1,
        min(
            min(worker_count(), columns),
            columns * (rows.count + rows.places) // 16384,
        ),
    )

    # Whole outer slices where there are enough of them, else stretches of their columns.
    var by_outer = rows.outer >= workers

    @always_inline
    def task(worker: Int) {imm}:
        var o_first = 0
        var o_last = rows.outer
        var first = 0
        var last = rows.inner
        if by_outer:
            o_first = rows.outer * worker // workers
            o_last = rows.outer * (worker + 1) // workers
        else:
            first = rows.inner * worker // workers
            last = rows.inner * (worker + 1) // workers
        for o in range(o_first, o_last):
            var base = o * rows.places * rows.inner
            var to = y.unsafe_offset(base)
            if last - first == rows.inner:
                start_row[dtype](
                    to,
                    x.unsafe_offset(base),
                    rows.zeros,
                    rows.places * rows.inner,
                )
            else:
                for place in range(rows.places):
                    var at = place * rows.inner + first
                    start_row[dtype](
                        to.unsafe_offset(at),
                        x.unsafe_offset(base + at),
                        rows.zeros,
                        last - first,
                    )
            if rows.inner == 1:
                var places = index.unsafe_offset(o * rows.count)
                var added = source.unsafe_offset(o * rows.count)
                for i in range(rows.count):
                    var at = Int(places[unsafe_offset=i])
                    comptime if accumulate:
                        to[unsafe_offset=at] += added[unsafe_offset=i]
                    else:
                        to[unsafe_offset=at] = added[unsafe_offset=i]
                continue
            for i in range(rows.count):
                var from_ = (o * rows.count + i) * rows.inner
                var places = index.unsafe_offset(from_)
                var added = source.unsafe_offset(from_)
                for n in range(first, last):
                    var at = Int(places[unsafe_offset=n]) * rows.inner + n
                    comptime if accumulate:
                        to[unsafe_offset=at] += added[unsafe_offset=n]
                    else:
                        to[unsafe_offset=at] = added[unsafe_offset=n]

    sync_parallelize(task, workers)


@__name(t"scatter_elements_{dtype}_a{accumulate}")
def elements_kernel[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    bounds: Bounds,
):
    scatter_column[dtype, accumulate](
        y,
        x,
        index,
        source,
        rows,
        Int(global_idx.x),
        bounds,
    )


@always_inline
def flat_place(
    index: Ptr[DType.int64],
    places: Int64,
    count: Divisor,
    inner: Divisor,
    bounds: Bounds,
    item: Int,
) -> Int:
    """Returns the place in y of element `item` of the source; -1 if it lies outside.
    """
    var place = index[unsafe_offset=item]
    if not bounds.holds(place, places):
        return -1
    var row, n = inner.divide(Int32(item))
    var o = Int(count.quotient(row))
    return (o * Int(places) + Int(place)) * Int(inner.value) + Int(n)


@__name("scatter_flat_places")
def flat_places_kernel(
    flat: Ptr[DType.int64],
    index: Ptr[DType.int64],
    places: Int64,
    count: Divisor,
    inner: Divisor,
    total: Int64,
    bounds: Bounds,
):
    var item = Int(global_idx.x)
    if item < Int(total):
        flat[unsafe_offset=item] = Int64(
            flat_place(index, places, count, inner, bounds, item)
        )


@no_inline
def sorted_elements_refusal(rows: Rows) -> Optional[String]:
    """Returns None, or why elements cannot be sorted by their destinations."""
    var columns = rows.columns()
    if columns * max(rows.count, rows.places) >= Int(Int32.MAX):
        return String("elements are too many for 32 bits")
    return None


@no_inline
def sorted_elements_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """Adds (or puts) elements in sorted order. `y` already holds the values that they are added to. There is at least
    one element."""
    var total = rows.columns() * rows.count
    var flat = scratch[DType.int64](ctx, total)
    ctx.enqueue_function[flat_places_kernel](
        flat,
        index,
        Int64(rows.places),
        Divisor(rows.count),
        Divisor(rows.inner),
        Int64(total),
        current_bounds(),
        grid_dim=ceildiv(total, THREADS),
        block_dim=THREADS,
    )
    # What lies outside has been reported.
    sorted_rows_gpu[dtype, accumulate](
        y,
        flat,
        source,
        Rows(1, rows.columns() * rows.places, total, 1, rows.zeros),
        Bounds(0, 0),
        ctx,
    )


@no_inline
def columns_gpu[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """A thread for each column, which it begins with x or zeros."""
    ctx.enqueue_function[elements_kernel[dtype, accumulate]](
        y,
        x,
        index,
        source,
        rows,
        current_bounds(),
        grid_dim=ceildiv(rows.columns(), THREADS),
        block_dim=THREADS,
    )
