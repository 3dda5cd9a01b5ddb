"""A list of places in sorted order, on a GPU; equal places stay in their order.

In a list of some thousand, each place is compared with all others: the number that come before it is its new position.
A longer list is sorted by five bits of its places after the other, the lowest first, as sorting/gpu.mojo sorts
elements.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp

from ..common.bounds import Bounds
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

comptime DIGIT_BITS = 5
comptime DIGITS = 1 << DIGIT_BITS
comptime COMPARED = 1 << 12
"""Places of the longest list that is sorted by comparing them with each other."""
comptime SHARED_PLACES = 1024
"""Places of the list that a block has in shared memory at a time."""
comptime LANES = 32
"""Threads that share the comparisons of a place."""
comptime AT_ONCE = 4
"""Places that a thread reads at once."""


@fieldwise_init
struct SortedPlaces(Movable):
    """The places of a list in sorted order, and which of the list each was; one outside counts as the number of places.
    """

    var places: DeviceBuffer[DType.int32]
    var sources: DeviceBuffer[DType.int32]


@always_inline
def _listed(index: Ptr[DType.int64], i: Int, places: Int64) -> Int32:
    """Returns place i of the list; a place outside becomes the number of places.
    """
    var place = index[unsafe_offset=i]
    return Int32(place) if place >= 0 and place < places else Int32(places)


@always_inline
def _place(
    index: Ptr[DType.int64],
    sorted: Ptr[DType.int32],
    i: Int,
    places: Int64,
    shift: Int32,
) -> Int32:
    """Returns place i before a pass; the first pass reads the list itself."""
    if shift != 0:
        return sorted[unsafe_offset=i]
    return _listed(index, i, places)


@always_inline
def _less[
    mixed: Bool
](at_hand: Counts, lane: Int, bound: Int32, equal: Int) -> Int32:
    """Counts a lane's share of the places in shared memory that are below `bound`; if `mixed`, the first `equal` of
    them also count where they equal it."""
    var found = Int32(0)
    comptime for j in range(0, SHARED_PLACES, LANES * AT_ONCE):
        var k = j + lane * AT_ONCE
        var others = at_hand.unsafe_offset(k).unsafe_load[
            width=AT_ONCE, alignment=16
        ]()
        comptime for u in range(AT_ONCE):
            comptime if mixed:
                var own = bound + Int32(1 if k + u < equal else 0)
                found += Int32(1 if others[u] < own else 0)
            else:
                found += Int32(1 if others[u] < bound else 0)
    return found


@__name("scatter_order_compare")
def order_compare_kernel(
    new_sorted: Ptr[DType.int32],
    new_sources: Ptr[DType.int32],
    index: Ptr[DType.int64],
    count: Int64,
    places: Int64,
    bounds: Bounds,
):
    """LANES threads have a place."""
    var at_hand = stack_allocation[
        SHARED_PLACES, Int32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var thread = Int(thread_idx.x)
    var lane = thread % LANES
    var i = Int(block_idx.x) * (THREADS // LANES) + thread // LANES
    var own = Int32(-1)
    if i < Int(count):
        own = _listed(index, i, places)
        if lane == 0 and Int64(own) == places:
            bounds.report(index[unsafe_offset=i], places)
    var before = Int32(0)
    for first in range(0, Int(count), SHARED_PLACES):
        barrier()
        for j in range(thread, SHARED_PLACES, THREADS):
            # Behind the list comes what is behind all places.
            var other = Int32.MAX
            if first + j < Int(count):
                other = _listed(index, first + j, places)
            at_hand[unsafe_offset=j] = other
        barrier()
        # Equal places come before where they stand before.
        if first + SHARED_PLACES <= i:
            before += _less[False](at_hand, lane, own + 1, 0)
        elif first > i:
            before += _less[False](at_hand, lane, own, 0)
        else:
            before += _less[True](at_hand, lane, own, i - first)
    before = warp.lane_group_sum[num_lanes=LANES](before)
    if i < Int(count) and lane == 0:
        new_sorted[unsafe_offset=Int(before)] = own
        new_sources[unsafe_offset=Int(before)] = Int32(i)


@always_inline
def _count_tile(
    table: Counts,
    index: Ptr[DType.int64],
    sorted: Ptr[DType.int32],
    first: Int,
    count: Int64,
    places: Int64,
    shift: Int32,
) -> Array[Int32, ITEMS]:
    """Counts the digits of the thread's places."""
    var thread = Int(thread_idx.x)
    var own = Array[Int32, ITEMS](fill=0)
    comptime for k in range(ITEMS):
        if first + k < Int(count):
            own[k] = _place(index, sorted, first + k, places, shift)
    for digit in range(DIGITS):
        table[unsafe_offset=slot(digit * THREADS + thread)] = 0
    comptime for k in range(ITEMS):
        if first + k < Int(count):
            var digit = Int(own[k] >> shift) & (DIGITS - 1)
            table[unsafe_offset=slot(digit * THREADS + thread)] += 1
    barrier()
    return own^


@__name("scatter_order_count")
def order_count_kernel(
    counts: Ptr[DType.int32],
    index: Ptr[DType.int64],
    sorted: Ptr[DType.int32],
    count: Int64,
    places: Int64,
    shift: Int32,
):
    """counts [tiles, DIGITS]."""
    var table = stack_allocation[
        table_size[DIGITS], Int32, address_space=AddressSpace.SHARED
    ]()
    var shares = stack_allocation[
        THREADS, Int32, address_space=AddressSpace.SHARED
    ]()
    var tile = Int(block_idx.x)
    var first = tile * TILE + Int(thread_idx.x) * ITEMS
    _ = _count_tile(table, index, sorted, first, count, places, shift)
    count_digits[DIGITS](counts, table, shares, tile)


@__name("scatter_order_place")
def order_place_kernel(
    new_sorted: Ptr[DType.int32],
    new_sources: Ptr[DType.int32],
    counts: Ptr[DType.int32],
    index: Ptr[DType.int64],
    sorted: Ptr[DType.int32],
    sources: Ptr[DType.int32],
    count: Int64,
    places: Int64,
    tiles: Int64,
    shift: Int32,
    bounds: Bounds,
):
    """A pass over a tile; counts are not read where there is one tile."""
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
    var tile = Int(block_idx.x)
    var first = tile * TILE + thread * ITEMS
    if tiles > 1:
        begin_digits[DIGITS](starts, shares, counts, tile, Int(tiles))
    var own = _count_tile(table, index, sorted, first, count, places, shift)
    scan_table[DIGITS](table, shares)
    if thread < DIGITS:
        # Of one tile the table says all.
        var begin = table[unsafe_offset=slot(thread * THREADS)]
        starts[unsafe_offset=thread] = starts[
            unsafe_offset=thread
        ] - begin if tiles > 1 else Int32(0)
    barrier()
    comptime for k in range(ITEMS):
        var i = first + k
        if i < Int(count):
            if shift == 0 and Int64(own[k]) == places:
                bounds.report(index[unsafe_offset=i], places)
            var digit = Int(own[k] >> shift) & (DIGITS - 1)
            var entry = slot(digit * THREADS + thread)
            var to = Int(
                starts[unsafe_offset=digit] + table[unsafe_offset=entry]
            )
            table[unsafe_offset=entry] += 1
            new_sorted[unsafe_offset=to] = own[k]
            new_sources[unsafe_offset=to] = (
                Int32(i) if shift == 0 else sources[unsafe_offset=i]
            )


@no_inline
def order_gpu(
    index: DeviceBuffer[DType.int64],
    count: Int,
    places: Int,
    bounds: Bounds,
    ctx: DeviceContext,
) raises -> SortedPlaces:
    """Sorts the list of places. Both counts are from 1 to 2^31 - 1."""
    var new = SortedPlaces(
        scratch[DType.int32](ctx, count), scratch[DType.int32](ctx, count)
    )
    if count <= COMPARED:
        ctx.enqueue_function[order_compare_kernel](
            new.places,
            new.sources,
            index,
            Int64(count),
            Int64(places),
            bounds,
            grid_dim=ceildiv(count, THREADS // LANES),
            block_dim=THREADS,
        )
        return new^
    var tiles = ceildiv(count, TILE)
    var counts = scratch[DType.int32](ctx, tiles * DIGITS)
    var old = SortedPlaces(
        scratch[DType.int32](ctx, count), scratch[DType.int32](ctx, count)
    )
    var shift = 0
    while shift == 0 or places >> shift > 0:
        if tiles > 1:
            ctx.enqueue_function[order_count_kernel](
                counts,
                index,
                old.places,
                Int64(count),
                Int64(places),
                Int32(shift),
                grid_dim=tiles,
                block_dim=THREADS,
            )
        ctx.enqueue_function[order_place_kernel](
            new.places,
            new.sources,
            counts,
            index,
            old.places,
            old.sources,
            Int64(count),
            Int64(places),
            Int64(tiles),
            Int32(shift),
            bounds,
            grid_dim=tiles,
            block_dim=THREADS,
        )
        swap(old, new)
        shift += DIGIT_BITS
    return old^
