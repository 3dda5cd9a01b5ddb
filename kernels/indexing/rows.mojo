"""y [outer, places, inner] = x, or zeros, with source [outer, count, inner] added to (or put in) the places of index [count].

On the CPU the columns are shared out, each core walks the whole list. On a GPU no addition is atomic: a short list is searched
by blocks that own a place and a stretch of columns each, a long one is sorted first (sorted_rows.mojo).
"""

from std.ffi import external_call
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.sys.info import simd_width_of

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.bounds import Bounds, current_bounds
from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..common.vectors import copy_row, merge_row
from .extents import Rows
from .few_columns import COLUMNS, MOST_COLUMNS, few_columns_gpu
from .sorted_rows import sorted_rows_gpu

comptime BLOCK = 256
# Columns that a thread carries: the list is searched once for BLOCK * CARRIED of them.
comptime CARRIED = 4
comptime SHORT_LIST = 128
"""Places of a list that is searched rather than sorted: all of them may be the same, whose rows a block adds one by one.
"""
comptime SEARCHES = 1 << 14
"""Of few columns: blocks times rounds that reading the list takes them, above which sorting costs less.
"""


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


def rows_kernel[
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
    stretches: Int64,
    zeros: Int64,
    bounds: Bounds,
):
    var found = stack_allocation[
        BLOCK, Scalar[DType.uint8], address_space=AddressSpace.SHARED
    ]()
    var hits = stack_allocation[
        2, Scalar[DType.int32], address_space=AddressSpace.SHARED
    ]()
    var place = block_idx.x // Int(stretches)
    var stretch = block_idx.x % Int(stretches)
    var columns = Int(outer) * Int(inner)
    var values = Array[Scalar[dtype], CARRIED](fill=0)
    comptime for k in range(CARRIED):
        var column = (stretch * CARRIED + k) * BLOCK + thread_idx.x
        if column < columns and zeros == 0:
            values[k] = x[
                unsafe_offset=(column // Int(inner) * Int(places) + place)
                * Int(inner)
                + column % Int(inner)
            ]
    if thread_idx.x < 2:
        hits[unsafe_offset=thread_idx.x] = 0
    barrier()
    var turn = 0
    for first in range(0, Int(count), BLOCK):
        var i = first + thread_idx.x
        var at = Int(index[unsafe_offset=i]) if i < Int(count) else 0
        # Every block sees the whole list: one of them tells.
        if block_idx.x == 0:
            _ = bounds.holds(Int64(at), places)
        var hit = i < Int(count) and at == place
        found[unsafe_offset=thread_idx.x] = UInt8(1 if hit else 0)
        if hit:
            # Every writer writes the same.
            hits[unsafe_offset=turn] = 1
        barrier()
        var some = hits[unsafe_offset=turn] != 0
        if thread_idx.x == 0:
            hits[unsafe_offset=1 - turn] = 0
        if some:
            for j in range(min(BLOCK, Int(count) - first)):
                if found[unsafe_offset=j] == 0:
                    continue
                comptime for k in range(CARRIED):
                    var column = (stretch * CARRIED + k) * BLOCK + thread_idx.x
                    if column < columns:
                        var value = source[
                            unsafe_offset=(
                                column // Int(inner) * Int(count) + first + j
                            )
                            * Int(inner)
                            + column % Int(inner)
                        ]
                        comptime if accumulate:
                            values[k] += value
                        else:
                            values[k] = value
        barrier()
        turn = 1 - turn
    comptime for k in range(CARRIED):
        var column = (stretch * CARRIED + k) * BLOCK + thread_idx.x
        if column < columns:
            y[
                unsafe_offset=(column // Int(inner) * Int(places) + place)
                * Int(inner)
                + column % Int(inner)
            ] = values[k]


@no_inline
def rows_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    var stretches = ceildiv(rows.outer * rows.inner, BLOCK * CARRIED)
    if rows.places * stretches == 0:
        return
    var columns = rows.outer * rows.inner
    comptime if accumulate:
        var searches = (
            rows.places * ceildiv(columns, COLUMNS) * ceildiv(rows.count, BLOCK)
        )
        if columns <= MOST_COLUMNS and searches <= SEARCHES:
            few_columns_gpu[dtype](y, x, index, source, rows, ctx)
            return
    if rows.count > SHORT_LIST:
        sorted_rows_gpu[dtype, accumulate](
            y, x, index, source, rows, current_bounds(), ctx
        )
        return
    ctx.enqueue_function[rows_kernel[dtype, accumulate]](
        y,
        x,
        index,
        source,
        Int64(rows.outer),
        Int64(rows.places),
        Int64(rows.count),
        Int64(rows.inner),
        Int64(stretches),
        Int64(rows.zeros),
        current_bounds(),
        grid_dim=rows.places * stretches,
        block_dim=BLOCK,
    )
