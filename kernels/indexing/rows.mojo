"""y [outer, places, inner] = x, or zeros, with source [outer, count, inner] added to (or put in) the places of index [count].

On the CPU the columns are shared out, each core walks the whole list. On a GPU additions are atomic (unordered.mojo) unless
they shall be made in a fixed order: then the list is sorted (sorted_rows.mojo). Rows are put by a short list as it is
(short_list.mojo), by a long one when it is sorted.
"""

from std.ffi import external_call
from std.sys import size_of
from std.sys.info import simd_width_of

from max.gpu.host import DeviceBuffer, DeviceContext

from ..common.bounds import current_bounds
from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..common.vectors import copy_row, merge_row
from .extents import Rows
from .short_list import SHORT_LIST, short_list_gpu
from .sorted_rows import sorted_rows_gpu, start_rows_gpu
from .unordered import is_atomic, unordered_gpu


@always_inline
def start_row[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], zeros: Bool, count: Int):
    """`count` neighbouring elements of what is added to."""
    if zeros:
        _ = external_call["memset", Ptr[dtype]](
            y, Int32(0), count * size_of[dtype]()
        )
    else:
        copy_row[dtype](y, x, count)


@no_inline
def rows_cpu[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
):
    """`index` has been checked."""
    comptime width = simd_width_of[dtype]()
    var workers = max(
        1,
        min(
            worker_count(),
            rows.outer * max(rows.count, rows.places) * rows.inner // 16384,
        ),
    )
    # Whole outer slices where there are enough of them, else stretches of the rows, or, of short rows, of the places.
    var by_outer = rows.outer >= workers
    var by_places = not by_outer and rows.inner < workers * 2 * width

    @always_inline
    def task(worker: Int) {imm}:
        var o_first = 0
        var o_last = rows.outer
        var first = 0
        var last = rows.inner
        var place_first = 0
        var place_last = rows.places
        if by_outer:
            o_first = rows.outer * worker // workers
            o_last = rows.outer * (worker + 1) // workers
        elif by_places:
            place_first = rows.places * worker // workers
            place_last = rows.places * (worker + 1) // workers
        else:
            first = rows.inner * worker // workers
            last = rows.inner * (worker + 1) // workers
        for o in range(o_first, o_last):
            var to = y.unsafe_offset(o * rows.places * rows.inner)
            var old = x.unsafe_offset(o * rows.places * rows.inner)
            var added = source.unsafe_offset(o * rows.count * rows.inner)
            if last - first == rows.inner:
                start_row[dtype](
                    to.unsafe_offset(place_first * rows.inner),
                    old.unsafe_offset(place_first * rows.inner),
                    rows.zeros,
                    (place_last - place_first) * rows.inner,
                )
            else:
                for place in range(rows.places):
                    start_row[dtype](
                        to.unsafe_offset(place * rows.inner + first),
                        old.unsafe_offset(place * rows.inner + first),
                        rows.zeros,
                        last - first,
                    )
            for i in range(rows.count):
                var place = Int(index[unsafe_offset=i])
                if place < place_first or place >= place_last:
                    continue
                merge_row[dtype, accumulate](
                    to.unsafe_offset(place * rows.inner),
                    added.unsafe_offset(i * rows.inner),
                    first,
                    last,
                )

    sync_parallelize(task, workers)


@no_inline
def rows_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """`deterministic`: floats are added in a fixed order, too."""
    var columns = rows.columns()
    if rows.places * columns == 0:
        return
    start_rows_gpu(y, x, rows.zeros, ctx)
    var total = columns * rows.count
    if total == 0:
        return
    comptime if accumulate and is_atomic[dtype]:
        # Whole numbers may be added in any order.
        var any_order = dtype.is_integral() or not deterministic
        if any_order and total <= Int(Int32.MAX):
            unordered_gpu[dtype, accumulate, by_rows=True](
                y, index, source, rows, ctx
            )
            return
    comptime if not accumulate:
        if rows.count <= SHORT_LIST:
            short_list_gpu[dtype](y, index, source, rows, ctx)
            return
    sorted_rows_gpu[dtype, accumulate](
        y, index, source, rows, current_bounds(), ctx
    )
