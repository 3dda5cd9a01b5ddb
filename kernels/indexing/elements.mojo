"""y [outer, places, inner] = x, then y[o, index[o, i, n], n] += (or =) source[o, i, n] for index [outer, count, inner].

Every (o, n) is a column of its own: one core or one thread walks it from the first element to the last.
"""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ..convolution.common import Ptr, worker_count
from ..parallel import sync_parallelize
from .rows import BLOCK, Rows


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
        y[unsafe_offset=at] = x[unsafe_offset=at]
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
    var columns = rows.outer * rows.inner
    var workers = max(
        1,
        min(
            min(worker_count(), columns),
            columns * (rows.count + rows.places) // 16384,
        ),
    )

    @always_inline
    def task(worker: Int) {imm}:
        for column in range(
            columns * worker // workers, columns * (worker + 1) // workers
        ):
            _column[dtype, accumulate](y, x, index, source, rows, column)

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
):
    var column = global_idx.x
    if column < Int(outer) * Int(inner):
        _column[dtype, accumulate](
            y,
            x,
            index,
            source,
            Rows(Int(outer), Int(places), Int(count), Int(inner)),
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
        grid_dim=ceildiv(columns, BLOCK),
        block_dim=BLOCK,
    )
