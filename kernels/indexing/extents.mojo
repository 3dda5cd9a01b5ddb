"""Extents of the tensors that the indexing family's kernels write and read, and a check of the places on the CPU."""

from ..common.argument import KernelArgument
from ..common.bounds import Bounds
from ..common.pointer import Ptr

comptime THREADS = 256
"""Threads of a block."""
comptime sum_type[dtype: DType]: DType = DType.float32 if (
    dtype == DType.bfloat16 or dtype == DType.float16
) else dtype
"""The type in which sums are kept."""


@fieldwise_init
struct Rows(ImplicitlyCopyable, KernelArgument):
    """Extents: y [outer, places, inner], source [outer, count, inner]; `zeros` where rows are added to zeros, not to x.
    """

    var outer: Int
    var places: Int
    var count: Int
    var inner: Int
    var zeros: Bool

    @always_inline
    def columns(self) -> Int:
        """Returns the number of columns of all outer slices."""
        return self.outer * self.inner

    @always_inline
    def at(self, column: Int, row: Int, rows: Int) -> Int:
        """Returns the offset of a column's row in a tensor [outer, rows, inner].
        """
        if self.outer == 1:
            return row * self.inner + column
        return (column // self.inner * rows + row) * self.inner + (
            column % self.inner
        )


@no_inline
def check_places(
    index: Ptr[DType.int64], count: Int, places: Int, bounds: Bounds
) raises:
    """Raises for the first one outside, and reports it."""
    comptime width = 8
    var whole = count // width * width
    var least = SIMD[DType.int64, width](0)
    var most = SIMD[DType.int64, width](-1)
    for i in range(0, whole, width):
        var some = index.unsafe_offset(i).unsafe_load[width=width]()
        least = min(least, some)
        most = max(most, some)
    var inside = least.reduce_min() >= 0 and most.reduce_max() < Int64(places)
    for i in range(whole if inside else 0, count):
        var place = index[unsafe_offset=i]
        if not bounds.holds(place, Int64(places)):
            raise Error(
                t"index out of range: {place} in a dimension of {places}"
            )
