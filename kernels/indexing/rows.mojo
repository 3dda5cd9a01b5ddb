"""y [outer, places, inner] = x, or zeros, with source [outer, count, inner] added to (or put in) the places of index
[count], on the CPU: the columns are shared out, each core walks the whole list.
"""

from std.ffi import external_call
from std.sys import size_of
from std.sys.info import simd_width_of

from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..common.vectors import copy_row, merge_row
from .extents import Rows


@always_inline
def start_row[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], zeros: Bool, count: Int):
    """Initializes `count` neighbouring elements of y: zeros, or a copy of x."""
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
    """Scatters rows on a CPU. `index` has been checked."""
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
