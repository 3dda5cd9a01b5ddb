"""Sorting on a GPU.

Short rows: a thread for each element counts the elements of its row that come before it.

Long rows: indices are sorted by four bits of the keys after the other, the lowest first. A pass has two kernels. In the
first a block counts its tile's digits. In the second it adds the counts up: a digit's elements begin behind all smaller
digits of the row and behind the same digit in earlier tiles, and in the tile they keep their order.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..common.digits import (
    ITEMS,
    THREADS,
    TILE,
    Counts,
    begin_digits,
    count_digits,
    scan_table,
    slot,
    table_size,
)
from ..common.library import scratch
from ..common.pointer import Ptr
from .keys import Sorting, key_bits, key_of, key_type

comptime DIGIT_BITS = 4
"""Bits of a key that a pass sorts by."""
comptime DIGITS = 1 << DIGIT_BITS


@always_inline
def _index(order: Ptr[DType.int32], i: Int, row: Int, shift: Int32) -> Int:
    """The element at place i of a row; the first pass meets them in their own order.
    """
    return i if shift == 0 else Int(order[unsafe_offset=row + i])


@always_inline
def _digit[
    dtype: DType, descending: Bool
](x: Ptr[dtype], at: Int, shift: Int32) -> Int:
    var key = key_of[dtype, descending](x[unsafe_offset=at])
    return Int(key >> Scalar[key_type[dtype]](shift)) & (DIGITS - 1)


@always_inline
def _count_tile[
    dtype: DType, descending: Bool
](
    table: Counts,
    order: Ptr[DType.int32],
    x: Ptr[dtype],
    row: Int,
    first: Int,
    length: Int,
    shift: Int32,
):
    """table [DIGITS, THREADS]: how often each digit stands in each thread's elements.
    """
    var thread = Int(thread_idx.x)
    for digit in range(DIGITS):
        table[unsafe_offset=slot(digit * THREADS + thread)] = 0
    for i in range(first, min(first + ITEMS, length)):
        var at = row + _index(order, i, row, shift)
        var digit = _digit[dtype, descending](x, at, shift)
        table[unsafe_offset=slot(digit * THREADS + thread)] += 1
    barrier()


@__name(t"sort_count_{dtype}_d{descending}")
def sort_count_kernel[
    dtype: DType, descending: Bool
](
    counts: Ptr[DType.int32],
    order: Ptr[DType.int32],
    x: Ptr[dtype],
    length: Int64,
    tiles: Int64,
    shift: Int32,
):
    """counts [rows, tiles, DIGITS]."""
    var table = stack_allocation[
        table_size[DIGITS], Int32, address_space=AddressSpace.SHARED
    ]()
    var shares = stack_allocation[
        THREADS, Int32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var row = Int(block_idx.x) // Int(tiles) * Int(length)
    var first = Int(block_idx.x) % Int(tiles) * TILE + thread * ITEMS
    _count_tile[dtype, descending](
        table, order, x, row, first, Int(length), shift
    )
    count_digits[DIGITS](counts, table, shares, Int(block_idx.x))


@__name(t"sort_place_{dtype}_d{descending}")
def sort_place_kernel[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    sorted: Ptr[DType.int32],
    order: Ptr[DType.int32],
    counts: Ptr[DType.int32],
    x: Ptr[dtype],
    length: Int64,
    count: Int64,
    tiles: Int64,
    shift: Int32,
):
    """The last pass writes values and indices [rows, count], the others the order of the row's elements.
    """
    var table = stack_allocation[
        table_size[DIGITS], Int32, address_space=AddressSpace.SHARED
    ]()
    var shares = stack_allocation[
        2 * THREADS, Int32, address_space=AddressSpace.SHARED
    ]()
    var starts = stack_allocation[
        DIGITS, Int32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var number = Int(block_idx.x) // Int(tiles)
    var tile = Int(block_idx.x) % Int(tiles)
    var row = number * Int(length)
    var first = tile * TILE + thread * ITEMS
    begin_digits[DIGITS](
        starts,
        shares,
        counts.unsafe_offset(number * Int(tiles) * DIGITS),
        tile,
        Int(tiles),
    )
    _count_tile[dtype, descending](
        table, order, x, row, first, Int(length), shift
    )
    scan_table[DIGITS](table, shares)
    if thread < DIGITS:
        starts[unsafe_offset=thread] -= table[
            unsafe_offset=slot(thread * THREADS)
        ]
    barrier()
    for i in range(first, min(first + ITEMS, Int(length))):
        var index = _index(order, i, row, shift)
        var digit = _digit[dtype, descending](x, row + index, shift)
        var entry = slot(digit * THREADS + thread)
        var place = Int(
            starts[unsafe_offset=digit] + table[unsafe_offset=entry]
        )
        table[unsafe_offset=entry] += 1
        if Int(shift) + DIGIT_BITS < key_bits[dtype]:
            sorted[unsafe_offset=row + place] = Int32(index)
        elif place < Int(count):
            var to = number * Int(count) + place
            indices[unsafe_offset=to] = Int64(index)
            values[unsafe_offset=to] = x[unsafe_offset=row + index]


@__name(t"sort_short_{dtype}_d{descending}")
def sort_short_kernel[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    size: Int64,
    length: Int64,
    count: Int64,
):
    """A thread for each of `size` elements."""
    var i = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    if i >= Int(size):
        return
    var row = i // Int(length)
    var first = row * Int(length)
    var own = key_of[dtype, descending](x[unsafe_offset=i])
    var before = 0
    for other in range(first, first + Int(length)):
        var key = key_of[dtype, descending](x[unsafe_offset=other])
        if key < own or (key == own and other < i):
            before += 1
    if before < Int(count):
        var to = row * Int(count) + before
        indices[unsafe_offset=to] = Int64(i - first)
        values[unsafe_offset=to] = x[unsafe_offset=i]


@no_inline
def sort_short_gpu[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    sorting: Sorting,
    ctx: DeviceContext,
) raises:
    """Sorts short rows by counting: the time grows with the square of a row's length.
    """
    var size = sorting.rows * sorting.length
    ctx.enqueue_function[sort_short_kernel[dtype, descending]](
        values,
        indices,
        x,
        Int64(size),
        Int64(sorting.length),
        Int64(sorting.count),
        grid_dim=ceildiv(size, THREADS),
        block_dim=THREADS,
    )


@no_inline
def sort_digits_gpu[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    sorting: Sorting,
    ctx: DeviceContext,
) raises:
    """Sorts long rows by one digit after the other."""
    var tiles = ceildiv(sorting.length, TILE)
    var size = sorting.rows * sorting.length
    var counts = scratch[DType.int32](ctx, sorting.rows * tiles * DIGITS)
    var first = scratch[DType.int32](ctx, size)
    var second = scratch[DType.int32](ctx, size)
    for shift in range(0, key_bits[dtype], DIGIT_BITS):
        ctx.enqueue_function[sort_count_kernel[dtype, descending]](
            counts,
            first,
            x,
            Int64(sorting.length),
            Int64(tiles),
            Int32(shift),
            grid_dim=sorting.rows * tiles,
            block_dim=THREADS,
        )
        ctx.enqueue_function[sort_place_kernel[dtype, descending]](
            values,
            indices,
            second,
            first,
            counts,
            x,
            Int64(sorting.length),
            Int64(sorting.count),
            Int64(tiles),
            Int32(shift),
            grid_dim=sorting.rows * tiles,
            block_dim=THREADS,
        )
        swap(first, second)
