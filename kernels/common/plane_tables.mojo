"""Planes on a CPU whose rows are shorter than vectors: a table, made once, says for each element of a plane where the
elements lie that it is made of.

Runs along a row would be short; a vector's elements are gathered instead, wherever they lie in the plane.
"""

from std.math import ceildiv

from .pointer import Ptr, accumulation_type
from .vectors import for_each_share, lanes, smallest_share, store_part

comptime MIN_PLANES = 32
"""Least number of planes for which a table pays."""
comptime MAX_TABLE_ENTRIES = 1 << 15
"""Most entries of a table, which the cache holds beside a plane."""


@fieldwise_init
struct OffsetTable(Movable):
    """`depth` places in a plane for each of `count` elements, -1 for none."""

    var offsets: List[Int32]
    """[depth, count], each part of whole vectors."""
    var count: Int
    var padded: Int
    var depth: Int

    def __init__(out self, count: Int, depth: Int, vector: Int):
        self.count = count
        self.depth = depth
        self.padded = ceildiv(count, vector) * vector
        self.offsets = List[Int32](length=self.padded * depth, fill=-1)


@always_inline
def _taken[
    dtype: DType, //, V: Int
](plane: Ptr[dtype], table: OffsetTable, at: Int) -> SIMD[dtype, V]:
    """Returns V elements of the plane, zeros where there is none."""
    var places = table.offsets.unsafe_ptr().unsafe_load[width=V, alignment=4](
        at
    )
    var there = places.ge(SIMD[DType.int32, V](0))
    var inside = there.select(places, SIMD[DType.int32, V](0))
    comptime if dtype == accumulation_type[dtype]:
        return there.select(plane.gather(inside), SIMD[dtype, V](0))
    else:
        # The processor gathers whole words alone.
        var values = SIMD[dtype, V](0)
        comptime for lane in range(V):
            values[lane] = plane[unsafe_offset=Int(inside[lane])]
        return there.select(values, SIMD[dtype, V](0))


@no_inline
def take_planes[
    dtype: DType
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    table: OffsetTable,
    source_plane: Int,
    units: Int,
):
    """Writes planes whose elements are the sums of the source's elements that the table names.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]

    def share(first: Int, end: Int) {imm}:
        for n in range(first, end):
            var plane = source.unsafe_offset(n * source_plane)
            var to = result.unsafe_offset(n * table.count)
            for at in range(0, table.count, V):
                var total = _taken[V](plane, table, at)
                if table.depth > 1:
                    var sum = total.cast[Acc]()
                    for k in range(1, table.depth):
                        sum += _taken[V](
                            plane, table, k * table.padded + at
                        ).cast[Acc]()
                    total = sum.cast[dtype]()
                store_part(to, at, table.count, total)

    var work = max(table.count * table.depth, source_plane) * units
    for_each_share(share, units, smallest_share(work, units))
