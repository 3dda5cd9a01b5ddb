"""The tensor that the kernels reduce over rows: x [rows, C], contiguous.

A tensor with few channels would leave most lanes of a vector idle, so `fold` consecutive rows are read as one row of
fold * C columns; column k belongs to channel k % C. The rows % fold rows at the end are added apart.

Sums of squares are taken about a pivot out of the data, over at most CHUNK rows at once, and such chunks are merged
as (count, mean, sum of squared deviations): no cancellation, however far the mean lies from zero.
"""

from std.sys import align_of, size_of
from std.utils.static_tuple import StaticTuple

from ..common.pointer import Ptr

# Rows that are summed before a partial result is merged: bounds both the rounding of long sums and their cancellation.
comptime CHUNK = 128


@fieldwise_init
struct FoldedRows(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tensor [rows, channels] as [wide_rows, width] and a tail of `tail` rows.
    """

    var rows: Int
    var channels: Int
    var fold: Int

    def width(self) -> Int:
        return self.fold * self.channels

    def wide_rows(self) -> Int:
        return self.rows // self.fold

    def tail(self) -> Int:
        return self.rows % self.fold

    def size(self) -> Int:
        return self.rows * self.channels


def folded(rows: Int, channels: Int, vector: Int, least: Int) -> FoldedRows:
    """Joins rows until a row is a whole number of vectors and at least `least` columns wide.

    Where there are too few rows for that, nothing is joined.
    """
    var fold = 1
    while (fold * channels) % vector != 0 or fold * channels < least:
        fold *= 2
    if rows < 4 * fold:
        fold = 1
    return FoldedRows(rows, channels, fold)


@fieldwise_init
struct Moments[dtype: DType, width: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """`count` values for each lane: their mean and the sum of their squared deviations from it.
    """

    var count: Int
    var mean: SIMD[Self.dtype, Self.width]
    var m2: SIMD[Self.dtype, Self.width]

    @always_inline
    def __init__(out self):
        self.count = 0
        self.mean = 0
        self.m2 = 0

    @always_inline
    def merge(mut self, other: Self):
        """Joins the values of `other` to these."""
        if other.count == 0:
            return
        var total = self.count + other.count
        var share = Scalar[Self.dtype](other.count) / Scalar[Self.dtype](total)
        var delta = other.mean - self.mean
        self.mean = delta.fma(share, self.mean)
        self.m2 += other.m2 + delta * delta * (
            share * Scalar[Self.dtype](self.count)
        )
        self.count = total


@always_inline
def _load[
    dtype: DType, //, width: Int, aligned: Bool
](x: Ptr[dtype], at: Int) -> SIMD[dtype, width]:
    comptime alignment = width * size_of[dtype]() if aligned else align_of[
        Scalar[dtype]
    ]()
    return x.unsafe_offset(at).unsafe_load[width=width, alignment=alignment]()


@always_inline
def _rows[
    dtype: DType, //, width: Int, aligned: Bool, count: Int
](x: Ptr[dtype], row: Int, last: Int, spare: Int, pitch: Int) -> StaticTuple[
    SIMD[dtype, width], count
]:
    """Loads vectors of the rows from `row` on without converting them, so that all loads are in flight together; rows
    from `last` on are replaced by the row `spare`."""
    var rows = StaticTuple[SIMD[dtype, width], count](
        fill=SIMD[dtype, width](0)
    )
    comptime for k in range(count):
        var at = row if k == 0 else row + k if row + k < last else spare
        rows[k] = _load[width, aligned](x, at * pitch)
    return rows


@always_inline
def chunk_moments[
    dtype: DType,
    acc: DType,
    width: Int,
    aligned: Bool = False,
    together: Int = 1,
](x: Ptr[dtype], first: Int, last: Int, pitch: Int) -> Moments[acc, width]:
    """The moments of `width` neighbouring columns over rows [first, last), every row `pitch` elements after the other;
    `together` rows are read at once.
    """
    var result = Moments[acc, width]()
    var row = first
    while row < last:
        var stop = min(row + CHUNK, last)
        # The pivot's row stands in for rows that are not there: its deviation is 0.
        var rows = _rows[width, aligned, together](x, row, stop, row, pitch)
        var pivot = rows[0].cast[acc]()
        var sum = SIMD[acc, width](0)
        var squares = SIMD[acc, width](0)
        var i = row
        while True:
            comptime for k in range(together):
                var deviation = rows[k].cast[acc]() - pivot
                sum += deviation
                squares = deviation.fma(deviation, squares)
            i += together
            if i >= stop:
                break
            rows = _rows[width, aligned, together](x, i, stop, row, pitch)
        var shift = sum / Scalar[acc](stop - row)
        # The clamp catches rounding only; written so that NaN stays.
        var m2 = squares - sum * shift
        m2 = m2.lt(0).select(SIMD[acc, width](0), m2)
        result.merge(Moments[acc, width](stop - row, pivot + shift, m2))
        row = stop
    return result


@fieldwise_init
struct Sums[dtype: DType, width: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """The two sums of the backward pass: of dy, and of dy * (x - mean)."""

    var dy: SIMD[Self.dtype, Self.width]
    var product: SIMD[Self.dtype, Self.width]


@always_inline
def chunk_sums[
    dtype: DType,
    acc: DType,
    width: Int,
    aligned: Bool = False,
    together: Int = 1,
](
    dy: Ptr[dtype],
    x: Ptr[dtype],
    mean: SIMD[acc, width],
    first: Int,
    last: Int,
    pitch: Int,
) -> Sums[acc, width]:
    """The sums of `width` neighbouring columns over rows [first, last), of which `together` are read at once.
    """
    var total = Sums[acc, width](0, 0)
    var row = first
    while row < last:
        var stop = min(row + CHUNK, last)
        var sum = SIMD[acc, width](0)
        var product = SIMD[acc, width](0)
        var i = row
        while i < stop:
            var grads = _rows[width, aligned, together](dy, i, stop, i, pitch)
            var values = _rows[width, aligned, together](x, i, stop, i, pitch)
            comptime for k in range(together):
                var grad = grads[k]
                comptime if k > 0:
                    grad = grad if i + k < stop else SIMD[dtype, width](0)
                var wide = grad.cast[acc]()
                sum += wide
                product = wide.fma(values[k].cast[acc]() - mean, product)
            i += together
        total.dy += sum
        total.product += product
        row = stop
    return total
