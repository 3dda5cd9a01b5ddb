"""The indexing family's entries in its libraries.

Scattering: x and y are [outer, places, inner], or x is empty, which stands for zeros; source is [outer, count, inner].
Places count from zero, negative ones have been resolved in the graph. A place outside is reported (common/bounds.mojo); on
the CPU it raises, on a GPU nothing is written there. Gathering: gather.mojo.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.bounds import current_bounds
from ..common.library import Arguments, Operand
from .elements import elements_cpu, elements_gpu
from .gather import (
    gather_cpu,
    gather_elements_cpu,
    gather_elements_gpu,
    gather_gpu,
)
from .extents import Rows, check_places
from .rows import rows_cpu, rows_gpu


@no_inline
def _rows(
    y: IndexList[3], x: IndexList[3], source: IndexList[3]
) raises -> Rows:
    # An x without elements stands for zeros.
    var zeros = x.flattened_length() == 0
    if not zeros and x != y:
        raise Error(t"scatter: x is {x}, y is {y}: must be equal")
    if source[0] != y[0] or source[2] != y[2]:
        raise Error(
            t"scatter: source is {source}, y is {y}: must agree in the first"
            t" and the last extent"
        )
    if y[1] == 0 and source.flattened_length() > 0:
        raise Error("scatter: y has no rows")
    return Rows(y[0], y[1], source[1], y[2], zeros)


@always_inline
def _scatter_rows[
    target: StaticString, dtype: DType, accumulate: Bool
](
    y: Operand[dtype, 3],
    x: Operand[dtype, 3],
    index: Operand[DType.int64, 1],
    source: Operand[dtype, 3],
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    var rows = _rows(y.shape(), x.shape(), source.shape())
    if index.dim_size(0) != rows.count:
        raise Error(
            t"scatter: index has {index.dim_size(0)} places, source"
            t" {rows.count} rows"
        )
    comptime if is_cpu[target]():
        var places = index.data
        check_places(places, rows.count, rows.places, current_bounds())
        rows_cpu[dtype, accumulate](
            y.data,
            x.data,
            places,
            source.data,
            rows,
        )
    else:
        # Zeros have no memory.
        var base = y.to_device_buffer(ctx)
        if not rows.zeros:
            base = x.to_device_buffer(ctx)
        rows_gpu[dtype, accumulate](
            y.to_device_buffer(ctx),
            base,
            index.to_device_buffer(ctx),
            source.to_device_buffer(ctx),
            rows,
            deterministic,
            ctx,
        )


@always_inline
def _scatter_elements[
    target: StaticString, dtype: DType, accumulate: Bool
](
    y: Operand[dtype, 3],
    x: Operand[dtype, 3],
    index: Operand[DType.int64, 3],
    source: Operand[dtype, 3],
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    var rows = _rows(y.shape(), x.shape(), source.shape())
    if index.shape() != source.shape():
        raise Error(
            t"scatter: index is {index.shape()}, source is {source.shape()}:"
            t" must be equal"
        )
    comptime if is_cpu[target]():
        var places = index.data
        check_places(
            places,
            rows.outer * rows.count * rows.inner,
            rows.places,
            current_bounds(),
        )
        elements_cpu[dtype, accumulate](
            y.data,
            x.data,
            places,
            source.data,
            rows,
        )
    else:
        # Zeros have no memory.
        var base = y.to_device_buffer(ctx)
        if not rows.zeros:
            base = x.to_device_buffer(ctx)
        elements_gpu[dtype, accumulate](
            y.to_device_buffer(ctx),
            base,
            index.to_device_buffer(ctx),
            source.to_device_buffer(ctx),
            rows,
            deterministic,
            ctx,
        )


def scatter_rows_add[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Whole rows added at the places of one list. On a GPU additions of floats are atomic unless the result shall have the same
    bits in every run."""
    var deterministic = arguments.take_word() != 0
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 1]()
    var source = arguments.take[dtype, 3]()
    _scatter_rows[target, dtype, True](y, x, index, source, deterministic, ctx)


def scatter_rows_set[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Whole rows put at the places of one list; the last of equal places wins.
    """
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 1]()
    var source = arguments.take[dtype, 3]()
    _scatter_rows[target, dtype, False](y, x, index, source, True, ctx)


def scatter_elements_add[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements added, each at a place of its own; see `scatter_rows_add`."""
    var deterministic = arguments.take_word() != 0
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 3]()
    var source = arguments.take[dtype, 3]()
    _scatter_elements[target, dtype, True](
        y, x, index, source, deterministic, ctx
    )


def scatter_elements_set[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements put, each at a place of its own; the last of equal places wins.
    """
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 3]()
    var source = arguments.take[dtype, 3]()
    _scatter_elements[target, dtype, False](y, x, index, source, True, ctx)


def gather_rows[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Whole rows of x, taken from the places of one list."""
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 1]()
    var rows = Rows(
        x.dim_size(0), x.dim_size(1), index.dim_size(0), x.dim_size(2), False
    )
    var wanted = IndexList[3](rows.outer, rows.count, rows.inner)
    if y.shape() != wanted:
        raise Error(t"gather: y is {y.shape()}: must be {wanted}")
    if wanted.flattened_length() == 0:
        return
    if rows.places == 0:
        raise Error("gather: x has no rows")
    comptime if is_cpu[target]():
        gather_cpu[dtype](y.data, x.data, index.data, rows, current_bounds())
    else:
        gather_gpu[dtype](y.data, x.data, index.data, rows, ctx)


def gather_elements[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Elements of x, each taken from a place of its own."""
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var index = arguments.take[DType.int64, 3]()
    var rows = Rows(
        x.dim_size(0), x.dim_size(1), index.dim_size(1), x.dim_size(2), False
    )
    if y.shape() != index.shape():
        raise Error(t"gather: y is {y.shape()}, index is {index.shape()}")
    if index.dim_size(0) != rows.outer or index.dim_size(2) != rows.inner:
        raise Error(
            t"gather: index is {index.shape()}, x is {x.shape()}: must agree in"
            t" the first and the last extent"
        )
    var size = y.shape().flattened_length()
    if size == 0:
        return
    if rows.places == 0:
        raise Error("gather: x has no elements")
    comptime if is_cpu[target]():
        check_places(index.data, size, rows.places, current_bounds())
        gather_elements_cpu[dtype](y.data, x.data, index.data, rows)
    else:
        gather_elements_gpu[dtype](y.data, x.data, index.data, rows, ctx)
