"""The indexing family's entries in its libraries: they take operands, dispatch.mojo chooses the kernels.

Scattering: x and y are [outer, places, inner], or x is empty, which stands for zeros; source is [outer, count, inner].
Places count from zero, negative ones have been resolved in the graph. A place outside is reported (common/bounds.mojo);
on the CPU it raises, on a GPU nothing is written there. Gathering: gather.mojo.
"""

from max.gpu.host import DeviceContext

from ..common.library import Arguments
from . import dispatch
from .operands import GatherOperands, ScatterOperands


def scatter_rows_add[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Adds whole rows at the places of one list. On a GPU additions of floats are atomic unless the call asks for the
    same bits in every run."""
    var deterministic = arguments.take_word() != 0
    var operands = ScatterOperands[dtype, 1].take(arguments)
    dispatch.scatter_rows[target, dtype, True](operands, deterministic, ctx)


def scatter_rows_set[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Whole rows put at the places of one list; the last of equal places wins.
    """
    var operands = ScatterOperands[dtype, 1].take(arguments)
    dispatch.scatter_rows[target, dtype, False](operands, True, ctx)


def scatter_elements_add[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements added, each at a place of its own; see `scatter_rows_add`."""
    var deterministic = arguments.take_word() != 0
    var operands = ScatterOperands[dtype, 3].take(arguments)
    dispatch.scatter_elements[target, dtype, True](operands, deterministic, ctx)


def scatter_elements_set[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements put, each at a place of its own; the last of equal places wins.
    """
    var operands = ScatterOperands[dtype, 3].take(arguments)
    dispatch.scatter_elements[target, dtype, False](operands, True, ctx)


def gather_rows[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Whole rows of x, taken from the places of one list."""
    dispatch.gather_rows[target](GatherOperands[dtype, 1].take(arguments), ctx)


def gather_elements[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements of x, each taken from a place of its own."""
    dispatch.gather_elements[target](
        GatherOperands[dtype, 3].take(arguments), ctx
    )
