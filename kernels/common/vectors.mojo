"""Helpers of CPU kernels of several families: rows as vectors with masked ends, and work shares."""

from std.atomic import Ordering, fence
from std.math import ceildiv, iota
from std.ffi import external_call
from std.sys import simd_width_of, size_of
from std.sys.intrinsics import (
    PrefetchOptions,
    masked_load,
    masked_store,
    prefetch,
)

from .parallel import sync_parallelize, workers_for
from .pointer import Ptr, accumulation_type

comptime lanes[dtype: DType] = simd_width_of[accumulation_type[dtype]]()
"""Elements of one vector of sums or maxima."""


@always_inline
def first_lanes[V: Int](live: Int) -> SIMD[DType.bool, V]:
    """Returns which lanes of a vector are among its first `live` ones."""
    return iota[DType.int32, V]().lt(SIMD[DType.int32, V](Int32(live)))


@always_inline
def load_part[
    dtype: DType, //, V: Int
](row: Ptr[dtype], at: Int, extent: Int) -> SIMD[dtype, V]:
    """Loads the V elements from `at` on; zeros, unread, from `extent` on."""
    if at + V <= extent:
        return row.unsafe_load[width=V, alignment=1](at)
    return masked_load[V](
        row.unsafe_offset(at), first_lanes[V](extent - at), SIMD[dtype, V](0)
    )


@always_inline
def store_part[
    dtype: DType, V: Int, //
](row: Ptr[dtype], at: Int, extent: Int, value: SIMD[dtype, V]):
    """Stores those of the V elements from `at` on that lie before `extent`."""
    if at + V <= extent:
        row.unsafe_store[alignment=1](at, value)
    else:
        masked_store(value, row.unsafe_offset(at), first_lanes[V](extent - at))


@always_inline
def store_past_cache[
    dtype: DType, V: Int, //
](row: Ptr[dtype], at: Int, extent: Int, value: SIMD[dtype, V]):
    """Stores as `store_part` does, for data that is read much later: whole lines go straight to memory, so that none is
    read first and none displaces what is needed sooner. `end_past_cache` ends a share that did so.
    """
    if at + V <= extent and Int(row.unsafe_offset(at)) % CACHE_LINE == 0:
        row.unsafe_store[alignment=CACHE_LINE, non_temporal=True](at, value)
    else:
        store_part(row, at, extent, value)


@always_inline
def end_past_cache():
    """Ends a share of `store_past_cache`. Such stores come in no order: other threads see them only behind a fence.
    """
    fence[Ordering.SEQUENTIAL]()


@always_inline
def is_nan[
    dtype: DType, W: SIMDLength, //
](v: SIMD[dtype, W]) -> SIMD[DType.bool, W]:
    # `ne` is an ordered comparison, false for NaN.
    return ~v.eq(v)


comptime CACHE_LINE = 64
"""Bytes of a line of the caches."""
comptime PREFETCH_DISTANCE = 2048
"""Bytes by which data is asked for before it is needed: the processor by itself asks too late, or not beyond a page of
the memory."""


@always_inline
def ask_ahead[dtype: DType, //, W: Int](data: Ptr[dtype], at: Int):
    """Asks for the W elements that lie PREFETCH_DISTANCE bytes after element `at`. Nothing is read: they need not
    exist."""
    ask_for[W](data, at + PREFETCH_DISTANCE // size_of[dtype]())


@always_inline
def ask_for[dtype: DType, //, W: Int](data: Ptr[dtype], at: Int):
    """Asks for the W elements from `at` on."""
    comptime step = CACHE_LINE // size_of[dtype]()
    comptime for k in range(max(W // step, 1)):
        prefetch[PrefetchOptions().for_read().high_locality().to_data_cache()](
            data.unsafe_offset(at + k * step)
        )


comptime LONG_RUN = 4096
"""Bytes from which on the C library clears faster: it need not read the lines that it writes."""


@always_inline
def clear_run[dtype: DType, //](data: Ptr[dtype], length: Int):
    comptime V = lanes[dtype]
    if length * size_of[dtype]() >= LONG_RUN:
        _ = external_call["memset", Ptr[dtype]](
            data, Int32(0), length * size_of[dtype]()
        )
        return
    for at in range(0, length, V):
        store_part(data, at, length, SIMD[dtype, V](0))


comptime CLEARED_BYTES = 16 * 1024
"""Bytes that are cleared at once: few enough to stay in the nearest cache, enough to be cleared fast."""


@fieldwise_init
struct ClearedAhead(TrivialRegisterPassable):
    """Clears a run of results, which vectors fill in the order of memory, piece by piece shortly before they are
    stored, so that no line of it is read. The C library clears whole lines without reading them; a store reads first.
    """

    var length: Int
    var end: Int

    @always_inline
    def reach[dtype: DType, //](mut self, run: Ptr[dtype], to: Int):
        """Clears the run as far as needed before the elements before `to` are stored. Short runs are left as they are.
        """
        comptime STEP = CLEARED_BYTES // size_of[dtype]()
        while self.end < to:
            var count = min(STEP, self.length - self.end)
            if count * size_of[dtype]() >= LONG_RUN:
                clear_run(run.unsafe_offset(self.end), count)
            self.end += count


@always_inline
def round_run[
    dtype: DType, Acc: DType, //
](dx: Ptr[dtype], sums: Ptr[Acc], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(dx, at, length, load_part[V](sums, at, length).cast[dtype]())


@always_inline
def load_even[
    dtype: DType, //, V: Int
](row: Ptr[dtype], at: Int) -> SIMD[dtype, V]:
    """Loads elements at, at + 2, at + 4, ...: V of them, out of 2 V that are read.
    """
    var both = row.unsafe_load[width=2 * V, alignment=1](at)
    return rebind[SIMD[dtype, V]](both.deinterleave()[0])


@always_inline
def pointer_to[dtype: DType, //](mut list: List[Scalar[dtype]]) -> Ptr[dtype]:
    return rebind[Ptr[dtype]](list.unsafe_ptr())


comptime FALSE_SHARING_BYTES = 2 * CACHE_LINE
"""Bytes between what one core writes and another touches: lines go from core to core in pairs."""


@always_inline
def apart(most: Int) -> Int:
    """Returns the capacity of a small list of up to `most` that one core writes again and again: no two of such lists
    come to share a line."""
    return most + 2 * (FALSE_SHARING_BYTES // size_of[Int]())


@always_inline
def own_lines[
    dtype: DType
](length: Int, fill: Scalar[dtype] = 0) -> List[Scalar[dtype]]:
    """Returns room that one core writes again and again, with room around it: small lists of several cores may come to
    lie side by side. `pointer_inside` points to it."""
    return List[Scalar[dtype]](
        length=length + 2 * (FALSE_SHARING_BYTES // size_of[dtype]()), fill=fill
    )


@always_inline
def pointer_inside[
    dtype: DType, //
](mut list: List[Scalar[dtype]]) -> Ptr[dtype]:
    return pointer_to(list).unsafe_offset(
        FALSE_SHARING_BYTES // size_of[dtype]()
    )


@always_inline
def for_each_share[
    Body: def(Int, Int) -> None, //
](body: Body, total: Int, least: Int = 1):
    """Calls body(first, end) over shares of range(total), one for each thread, none smaller than `least`.
    """
    var shares = workers_for(total, grain=max(least, 1))
    if shares == 1:
        body(0, total)
        return

    @always_inline
    def task(t: Int) {imm}:
        body(total * t // shares, total * (t + 1) // shares)

    sync_parallelize(task, shares)


# Below this many elements a second core costs more than it gives.
comptime SMALLEST_SHARE = 8192


@always_inline
def smallest_share(elements: Int, units: Int) -> Int:
    """Returns the least number of units, out of `units` with `elements` in all, that is worth a core.
    """
    return ceildiv(SMALLEST_SHARE * units, max(elements, 1))


@always_inline
def merge_row[
    dtype: DType, accumulate: Bool
](y: Ptr[dtype], source: Ptr[dtype], first: Int, last: Int):
    """Puts the elements [first, last) of `source` in y's, or adds them."""
    comptime width = simd_width_of[dtype]()
    var i = first
    while i + width <= last:
        var value = source.unsafe_offset(i).unsafe_load[width=width]()
        comptime if accumulate:
            value += y.unsafe_offset(i).unsafe_load[width=width]()
        y.unsafe_offset(i).unsafe_store(value)
        i += width
    while i < last:
        comptime if accumulate:
            y[unsafe_offset=i] += source[unsafe_offset=i]
        else:
            y[unsafe_offset=i] = source[unsafe_offset=i]
        i += 1


@always_inline
def copy_row[dtype: DType](y: Ptr[dtype], x: Ptr[dtype], count: Int):
    """Copies `count` neighbouring elements."""
    merge_row[dtype, False](y, x, 0, count)


@always_inline
def transpose[
    dtype: DType, size: Int
](mut rows: Array[SIMD[dtype, size], size]):
    """Transposes in place; `size` is a power of two. Each round interleaves row i with row i + size / 2.
    """
    comptime half = size // 2

    @always_inline
    def round() {mut rows}:
        var mixed = Array[SIMD[dtype, size], size](fill=0)
        comptime for i in range(half):
            var both = rows[i].interleave(rows[i + half])
            mixed[2 * i] = both.slice[size, offset=0]()
            mixed[2 * i + 1] = both.slice[size, offset=size]()
        rows = mixed^

    comptime if size >= 2:
        round()
    comptime if size >= 4:
        round()
    comptime if size >= 8:
        round()
    comptime if size >= 16:
        round()
    comptime assert size <= 16, "transpose: at most 16 rows"
