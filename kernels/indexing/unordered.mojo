"""y [outer, places, inner] with source [outer, count, inner] added in any order to the places that an index names, on a
GPU.

Additions are atomic. A thread has several rows of an element, or of a vector of neighbouring ones, and first adds up
elements that go to the same place: a place that is hit often is written to less often.
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ..common.arithmetic import Divisor
from ..common.atomics import add_atomically
from ..common.bounds import Bounds, current_bounds
from ..common.pointer import Ptr
from .extents import THREADS, Rows

comptime TOGETHER = 8
"""Rows of a thread."""
comptime VECTOR = 4
"""Elements that one instruction of Hopper adds."""
comptime is_atomic[dtype: DType]: Bool = (
    dtype == DType.float32
    or dtype == DType.float64
    or dtype == DType.int32
    or dtype == DType.int64
)


@always_inline
def scatter_unordered[
    dtype: DType, accumulate: Bool, by_rows: Bool, width: Int
](
    y: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    places: Int64,
    count: Int64,
    groups: Divisor,
    vectors: Divisor,
    threads: Int64,
    bounds: Bounds,
    thread: Int,
):
    """Runs thread number `thread` of `threads`. An item is TOGETHER of the list's rows, which form `groups` such
    groups, and one of the `vectors` of a row, of `width` elements. A place is a row's own (`index` [count]) or an
    element's ([outer, count, inner]). Where elements are put, a column has one.
    """
    comptime assert by_rows or width == 1, "each element has a place"
    if Int64(thread) >= threads:
        return
    var row, n = vectors.divide(Int32(thread))
    var o, group = groups.divide(row)
    var inner = Int(vectors.value) * width
    var from_ = Int(o) * Int(count) * inner + Int(n) * width
    var to = Array[Int64, TOGETHER](fill=-1)
    var values = Array[SIMD[dtype, width], TOGETHER](fill=0)
    # Rows next to each other often go to one place; short ones are read by neighbouring threads.
    var first = Int(group) * (1 if width == 1 else TOGETHER)
    var step = Int(groups.value) if width == 1 else 1
    var at = from_ + first * inner
    # Nothing depends on what is read before all of it has been asked for.
    comptime for k in range(TOGETHER):
        if first + k * step < Int(count):
            to[k] = index[unsafe_offset=first + k * step if by_rows else at]
            values[k] = source.unsafe_load[
                width=width, alignment=width * size_of[dtype]()
            ](at)
        at += step * inner
    comptime for k in range(TOGETHER):
        if first + k * step < Int(count) and not bounds.holds(to[k], places):
            to[k] = -1
    comptime for k in range(TOGETHER):
        comptime for earlier in range(k):
            if to[k] >= 0 and to[earlier] == to[k]:
                values[earlier] += values[k]
                to[k] = -1
    var base = y.unsafe_offset(Int(o) * Int(places) * inner + Int(n) * width)
    comptime for k in range(TOGETHER):
        if to[k] >= 0:
            var at = base.unsafe_offset(Int(to[k]) * inner)
            comptime if accumulate:
                add_atomically(at, values[k])
            else:
                at.unsafe_store(values[k])


@__name(t"scatter_unordered_{accumulate}_{by_rows}_{width}_{dtype}")
def unordered_kernel[
    dtype: DType, accumulate: Bool, by_rows: Bool, width: Int
](
    y: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    places: Int64,
    count: Int64,
    groups: Divisor,
    vectors: Divisor,
    threads: Int64,
    bounds: Bounds,
):
    scatter_unordered[dtype, accumulate, by_rows, width](
        y,
        index,
        source,
        places,
        count,
        groups,
        vectors,
        threads,
        bounds,
        Int(global_idx.x),
    )


@always_inline
def _enqueue[
    dtype: DType, accumulate: Bool, by_rows: Bool, width: Int
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    var groups = ceildiv(rows.count, TOGETHER)
    var vectors = rows.inner // width
    var threads = rows.outer * groups * vectors
    ctx.enqueue_function[unordered_kernel[dtype, accumulate, by_rows, width]](
        y,
        index,
        source,
        Int64(rows.places),
        Int64(rows.count),
        Divisor(groups),
        Divisor(vectors),
        Int64(threads),
        current_bounds(),
        grid_dim=ceildiv(threads, THREADS),
        block_dim=THREADS,
    )


@no_inline
def unordered_refusal(rows: Rows) -> Optional[String]:
    """Returns None, or why elements cannot be added in any order."""
    var total = rows.columns() * rows.count
    if total == 0 or total > Int(Int32.MAX):
        return String("there are no elements, or too many for 32 bits")
    return None


@no_inline
def unordered_gpu[
    dtype: DType, accumulate: Bool, by_rows: Bool
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """Adds (or puts) the source's elements in any order. `y` already holds the values that they are added to. The
    source has 1 to 2^31 - 1 elements, one per column where they are put."""
    comptime if by_rows and dtype == DType.float32:
        var addresses = Int(y.unsafe_ptr()) | Int(source.unsafe_ptr())
        if (
            rows.inner % VECTOR == 0
            and addresses % (VECTOR * size_of[dtype]()) == 0
        ):
            _enqueue[dtype, accumulate, by_rows, VECTOR](
                y, index, source, rows, ctx
            )
            return
    _enqueue[dtype, accumulate, by_rows, 1](y, index, source, rows, ctx)
