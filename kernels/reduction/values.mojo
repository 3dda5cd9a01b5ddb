"""The values that a reduction program computes for some neighbouring elements, and their combination.

A reduction's operand is read as [outer, reduced, inner], in memory order. A program computes `width` neighbouring
elements of one or more operands, which are all of one extent; each has a reduction of its own.
"""

from std.utils.static_tuple import StaticTuple

comptime ADD = 0
comptime MUL = 1
comptime MAX = 2
comptime MIN = 3


@always_inline
def _kind[kinds: Int, n: Int]() -> Int:
    """The reduction of result `n`: `kinds` has two bits for each."""
    return (kinds >> (2 * n)) & 3


@always_inline
def identity[
    kinds: Int, n: Int, dtype: DType, width: Int
]() -> SIMD[dtype, width]:
    """Returns the identity of a reduction: the value that changes no other."""
    comptime kind = _kind[kinds, n]()
    comptime if kind == ADD:
        return SIMD[dtype, width](0)
    elif kind == MUL:
        return SIMD[dtype, width](1)
    elif kind == MAX:
        return SIMD[dtype, width](Scalar[dtype].MIN)
    else:
        return SIMD[dtype, width](Scalar[dtype].MAX)


@always_inline
def combined[
    kinds: Int, n: Int, dtype: DType, width: Int
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Combines two values; a maximum and a minimum ignore NaN, as MAX's do."""
    comptime kind = _kind[kinds, n]()
    comptime if kind == ADD:
        return a + b
    elif kind == MUL:
        return a * b
    elif kind == MAX:
        return max(a, b)
    else:
        return min(a, b)


struct Values[dtype: DType, width: Int, count: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A vector for each of `count` results."""

    var data: StaticTuple[SIMD[Self.dtype, Self.width], Self.count]

    @always_inline
    def __init__(out self):
        self.data = StaticTuple[SIMD[Self.dtype, Self.width], Self.count](
            fill=0
        )

    @staticmethod
    @always_inline
    def start[kinds: Int]() -> Self:
        """The values over no elements."""
        var values = Self()
        comptime for n in range(Self.count):
            values.data[n] = identity[kinds, n, Self.dtype, Self.width]()
        return values

    @always_inline
    def put[n: Int](mut self, value: SIMD[Self.dtype, Self.width]):
        self.data[n] = value

    @always_inline
    def fold[kinds: Int](mut self, other: Self):
        """Combines these values with `other`, lane by lane."""
        comptime for n in range(Self.count):
            self.data[n] = combined[kinds, n, Self.dtype, Self.width](
                self.data[n], other.data[n]
            )

    @always_inline
    def fold_runs[
        kinds: Int, parts: Int, whole: Int
    ](
        mut self,
        other: Values[Self.dtype, whole, Self.count],
        live: StaticTuple[Bool, parts],
    ):
        """Combines these values with the runs of `other` that are live, lane by lane.
        """
        comptime for n in range(Self.count):
            comptime for part in range(parts):
                var run = other.data[n].slice[
                    Self.width, offset=part * Self.width
                ]()
                self.data[n] = combined[kinds, n, Self.dtype, Self.width](
                    self.data[n],
                    run if live[part] else identity[
                        kinds, n, Self.dtype, Self.width
                    ](),
                )

    @always_inline
    def across[kinds: Int](self) -> Values[Self.dtype, 1, Self.count]:
        """Combines all lanes."""
        var values = Values[Self.dtype, 1, Self.count]()
        comptime for n in range(Self.count):
            comptime kind = _kind[kinds, n]()
            comptime if kind == ADD:
                values.data[n] = self.data[n].reduce_add()
            elif kind == MUL:
                values.data[n] = self.data[n].reduce_mul()
            elif kind == MAX:
                values.data[n] = self.data[n].reduce_max()
            else:
                values.data[n] = self.data[n].reduce_min()
        return values


@fieldwise_init
struct Extents(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents of a reduction's operand."""

    var outer: Int
    var reduced: Int
    var inner: Int

    def outputs(self) -> Int:
        """Elements of each result."""
        return self.outer * self.inner

    def size(self) -> Int:
        return self.outer * self.reduced * self.inner
