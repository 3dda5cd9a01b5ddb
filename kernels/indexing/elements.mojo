"""y [outer, places, inner] = x, then y[o, index[o, i, n], n] += (or =) source[o, i, n] for index [outer, count, inner].

Every (o, n) is a column of its own, whose elements are added in their order. A thread of a GPU walks one column; a core
walks all of its columns side by side, since neighbouring elements lie in neighbouring columns. Where `zeros`, y = 0 before.
"""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from .extents import Rows
from .rows import BLOCK, start_row


@always_inline
def _column[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    column: Int,
):
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
        var place = Int(index[unsafe_offset=at])
        if 0 <= place and place < rows.places:
            var to = base + place * rows.inner
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
    """`index` has been checked."""
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


def elements_kernel[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    outer: Int64,
    places: Int64,
    count: Int64,
    inner: Int64,
    zeros: Int64,
):
    var column = global_idx.x
    if column < Int(outer) * Int(inner):
        _column[dtype, accumulate](
            y,
            x,
            index,
            source,
            Rows(Int(outer), Int(places), Int(count), Int(inner), zeros != 0),
            column,
        )


@no_inline
def elements_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    var columns = rows.outer * rows.inner
    if columns == 0:
        return
    ctx.enqueue_function[elements_kernel[dtype, accumulate]](
        y,
        x,
        index,
        source,
        Int64(rows.outer),
        Int64(rows.places),
        Int64(rows.count),
        Int64(rows.inner),
        Int64(rows.zeros),
        grid_dim=ceildiv(columns, BLOCK),
        block_dim=BLOCK,
    )
