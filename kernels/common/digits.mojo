"""Sorting by digits on a GPU: the parts that the two kernels of a pass share.

A block has a tile of elements, a thread neighbouring ones of it. `table` [DIGITS, THREADS], at places that `slot`
tells, has how often each digit stands in each thread's elements; from the counts of all tiles follows where each
element goes, so that elements of the same digit stay in their order.
"""

from max.gpu import barrier, thread_idx

from .pointer import Ptr, Shared

comptime THREADS = 256
comptime ITEMS = 16
"""Number of neighbouring elements of a thread."""
comptime TILE = THREADS * ITEMS
comptime Counts = Shared[DType.int32]
comptime BANKS = 32

comptime table_size[
    DIGITS: Int
]: Int = DIGITS * THREADS + DIGITS * THREADS // BANKS
"""Places of a table."""


@always_inline
def slot(entry: Int) -> Int:
    """Returns the place of an entry of the table. One place in BANKS is left out, so that a warp's threads, each at a
    stretch of entries of its own, read from different banks."""
    return entry + entry // BANKS


@always_inline
def count_digits[
    DIGITS: Int
](counts: Ptr[DType.int32], table: Counts, shares: Counts, tile: Int,):
    """Writes the tile's row of counts [tiles, DIGITS], the sums of its table's entries for each digit. shares has
    THREADS places."""
    comptime SHARES = THREADS // DIGITS
    var thread = Int(thread_idx.x)
    var digit = thread // SHARES
    var total = Int32(0)
    for i in range(thread % SHARES, THREADS, SHARES):
        total += table[unsafe_offset=slot(digit * THREADS + i)]
    shares[unsafe_offset=thread] = total
    barrier()
    if thread < DIGITS:
        total = 0
        for i in range(SHARES):
            total += shares[unsafe_offset=thread * SHARES + i]
        counts[unsafe_offset=tile * DIGITS + thread] = total


@always_inline
def begin_digits[
    DIGITS: Int
](
    starts: Counts,
    shares: Counts,
    counts: Ptr[DType.int32],
    tile: Int,
    tiles: Int,
):
    """Writes starts [DIGITS], the places where the tile's elements of each digit begin when all are sorted. shares has
    2 * THREADS places."""
    comptime SHARES = THREADS // DIGITS
    var thread = Int(thread_idx.x)
    var digit = thread % DIGITS
    var all = Int32(0)
    var earlier = Int32(0)
    for other in range(thread // DIGITS, tiles, SHARES):
        var found = counts[unsafe_offset=other * DIGITS + digit]
        all += found
        if other < tile:
            earlier += found
    shares[unsafe_offset=thread] = all
    shares[unsafe_offset=THREADS + thread] = earlier
    barrier()
    if thread < DIGITS:
        all = 0
        earlier = 0
        for i in range(thread, THREADS, DIGITS):
            all += shares[unsafe_offset=i]
            earlier += shares[unsafe_offset=THREADS + i]
        shares[unsafe_offset=thread] = all
        starts[unsafe_offset=thread] = earlier
    barrier()
    if thread < DIGITS:
        for smaller in range(thread):
            starts[unsafe_offset=thread] += shares[unsafe_offset=smaller]
    barrier()


@always_inline
def scan_table[DIGITS: Int](table: Counts, shares: Counts):
    """Replaces every entry of the table by the sum of those before it."""
    var thread = Int(thread_idx.x)
    var first = thread * DIGITS
    var own = Int32(0)
    for i in range(first, first + DIGITS):
        own += table[unsafe_offset=slot(i)]
    var total = own
    shares[unsafe_offset=thread] = own
    barrier()
    var distance = 1
    while distance < THREADS:
        var other = Int32(0)
        if thread >= distance:
            other = shares[unsafe_offset=thread - distance]
        barrier()
        total += other
        shares[unsafe_offset=thread] = total
        barrier()
        distance *= 2
    var before = total - own
    for i in range(first, first + DIGITS):
        var entry = table[unsafe_offset=slot(i)]
        table[unsafe_offset=slot(i)] = before
        before += entry
    barrier()
