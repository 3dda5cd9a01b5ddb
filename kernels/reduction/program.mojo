"""A generated program whose values are reduced, as a type."""

from std.reflection import get_function_name

from ..pointwise.program import ProgramOperands, RunPositions
from .values import Values


trait ReductionProgram:
    comptime ACC: DType
    """The dtype of the values and their sums."""
    comptime RESULT: DType
    comptime KINDS: Int
    """The reduction of each result, two bits for each (values.mojo)."""
    comptime RESULTS: Int
    comptime COUNT: Int
    """The number of operands, results included."""
    comptime DIMS: Int
    """Digits of an operand's index."""
    comptime NAME: StaticString

    @staticmethod
    def run[
        width: Int, parts: Int
    ](
        operands: ProgramOperands[Self.COUNT, Self.DIMS],
        places: RunPositions[Self.DIMS, parts],
    ) -> Values[Self.ACC, width, Self.RESULTS]:
        """The values of `width` elements, in `parts` runs of neighbours."""
        ...


struct Reduction[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    function: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> Values[acc, width, results],
](ReductionProgram):
    """The program of a generated function."""

    comptime ACC = Self.acc
    comptime RESULT = Self.result
    comptime KINDS = Self.kinds
    comptime RESULTS = Self.results
    comptime COUNT = Self.count
    comptime DIMS = Self.dims
    comptime NAME = get_function_name[Self.function]()

    @staticmethod
    @always_inline
    def run[
        width: Int, parts: Int
    ](
        operands: ProgramOperands[Self.count, Self.dims],
        places: RunPositions[Self.dims, parts],
    ) -> Values[Self.acc, width, Self.results]:
        return Self.function[width, parts](operands, places)
