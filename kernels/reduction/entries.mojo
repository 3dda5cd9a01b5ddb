"""The reduction family's entries in its libraries: a generated program, whose values are reduced, and running sums.

A call of a program has the operand's outer, reduced and inner extents, then the loop nest and the operands' addresses
as in pointwise/entries.mojo.
"""

from max.gpu.host import DeviceContext

from ..common.library import Arguments
from ..pointwise.entries import operands_of
from ..pointwise.many import TensorTable, words_of_tensors
from ..pointwise.program import ProgramOperands, RunPositions
from . import dispatch
from .program import Reduction
from .values import Extents, Values


def reduction[
    target: StaticString,
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
    parts: Int,
    guards: Int,
    numbers: Int,
    rows: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """One program over operands of any shapes, `rows` where `inner` is 1; a GPU's thread reads `parts` vectors at once.
    """
    comptime P = Reduction[acc, result, kinds, results, count, dims, run]
    var sizes = arguments.take_words[3]()
    var extents = Extents(sizes[0], sizes[1], sizes[2])
    var loop_nest = arguments.take_list()
    var operands = operands_of[count, dims, guards, numbers](
        loop_nest, arguments
    )
    var addresses = 0
    comptime for n in range(results, count - guards - numbers):
        addresses |= operands.data[n]
    dispatch.reduction[target, P, vector, parts, rows](
        operands, extents, addresses, ctx
    )


def reduction_many[
    target: StaticString,
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, 1], RunPositions[1, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
    ordered: Int,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """One program over the tensors of a table, each reduced as a whole; as `pointwise_many`.
    """
    comptime P = Reduction[acc, result, kinds, results, count, 1, run]
    var tensors = arguments.take_word()
    var words = words_of_tensors[count](arguments, tensors)
    var table = TensorTable[count](Int(words.unsafe_ptr()), tensors)
    dispatch.reduction_many[target, P, vector, ordered](table, ctx)
    _ = words^


def cumsum[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Running sums along the middle axis of x [outer, count, inner]."""
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    if y.shape() != x.shape():
        raise Error(t"cumsum: y is {y.shape()}, x is {x.shape()}")
    var extents = Extents(x.dim_size(0), x.dim_size(1), x.dim_size(2))
    if extents.size() != 0:
        dispatch.cumsum[target](y.data, x.data, extents, ctx)
