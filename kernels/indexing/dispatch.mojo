"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.bounds import current_bounds
from .elements import (
    columns_gpu,
    elements_cpu,
    sorted_elements_refusal,
    sorted_elements_gpu,
)
from .extents import check_places
from .gather import (
    gather_cpu,
    gather_elements_cpu,
    gather_elements_gpu,
    gather_gpu,
)
from .operands import GatherOperands, ScatterOperands
from .rows import rows_cpu
from .short_list import short_list_refusal, short_list_gpu
from .sorted_rows import sorted_rows_gpu
from .unordered import is_atomic, unordered_refusal, unordered_gpu

comptime _FEW_COLUMNS = 1 << 14
"""More are walked by as many threads."""
comptime _FEW_ELEMENTS = 32
"""Elements of a column that are walked faster than sorted."""


@always_inline
def scatter_rows[
    target: StaticString, dtype: DType, accumulate: Bool
](t: ScatterOperands[dtype, 1], deterministic: Bool, ctx: DeviceContext) raises:
    """Rows are added to y, or put there. `deterministic`: floats are added in a fixed order, too.
    """
    var rows = t.rows()
    comptime if is_cpu[target]():
        check_places(t.index.data, rows.count, rows.places, current_bounds())
        rows_cpu[dtype, accumulate](
            t.y.data, t.x.data, t.index.data, t.source.data, rows
        )
    else:
        if rows.places * rows.columns() == 0:
            return
        t.start(ctx)
        if rows.count == 0:
            return
        var y = t.y.to_device_buffer(ctx)
        var index = t.index.to_device_buffer(ctx)
        var source = t.source.to_device_buffer(ctx)
        comptime if accumulate and is_atomic[dtype]:
            # Whole numbers may be added in any order.
            var any_order = dtype.is_integral() or not deterministic
            if any_order and not unordered_refusal(rows):
                unordered_gpu[dtype, accumulate, by_rows=True](
                    y, index, source, rows, ctx
                )
                return
        comptime if not accumulate:
            if not short_list_refusal(rows):
                short_list_gpu[dtype](y, index, source, rows, ctx)
                return
        sorted_rows_gpu[dtype, accumulate](
            y, index, source, rows, current_bounds(), ctx
        )


@always_inline
def scatter_elements[
    target: StaticString, dtype: DType, accumulate: Bool
](t: ScatterOperands[dtype, 3], deterministic: Bool, ctx: DeviceContext) raises:
    """Elements are added to y, or put there. `deterministic`: floats are added in a fixed order, too.
    """
    var rows = t.rows()
    comptime if is_cpu[target]():
        var count = rows.columns() * rows.count
        check_places(t.index.data, count, rows.places, current_bounds())
        elements_cpu[dtype, accumulate](
            t.y.data, t.x.data, t.index.data, t.source.data, rows
        )
    else:
        if rows.columns() * rows.places == 0:
            return
        var y = t.y.to_device_buffer(ctx)
        var index = t.index.to_device_buffer(ctx)
        var source = t.source.to_device_buffer(ctx)
        comptime if is_atomic[dtype] or not accumulate:
            # Nothing meets where each column has one element; whole numbers may be added in any order.
            var any_order = rows.count == 1
            comptime if accumulate:
                any_order = (
                    any_order or dtype.is_integral() or (not deterministic)
                )
            if any_order and not unordered_refusal(rows):
                t.start(ctx)
                unordered_gpu[dtype, accumulate, by_rows=False](
                    y, index, source, rows, ctx
                )
                return
        if (
            rows.columns() <= _FEW_COLUMNS
            and rows.count > _FEW_ELEMENTS
            and not sorted_elements_refusal(rows)
        ):
            t.start(ctx)
            sorted_elements_gpu[dtype, accumulate](y, index, source, rows, ctx)
            return
        columns_gpu[dtype, accumulate](
            t.y.data, t.x.data, t.index.data, t.source.data, rows, ctx
        )


@always_inline
def gather_rows[
    dtype: DType, //, target: StaticString
](t: GatherOperands[dtype, 1], ctx: DeviceContext) raises:
    """Rows of x are copied to y."""
    var rows = t.rows()
    if rows.columns() * rows.count == 0:
        return
    comptime if is_cpu[target]():
        gather_cpu[dtype](
            t.y.data, t.x.data, t.index.data, rows, current_bounds()
        )
    else:
        gather_gpu[dtype](t.y.data, t.x.data, t.index.data, rows, ctx)


@always_inline
def gather_elements[
    dtype: DType, //, target: StaticString
](t: GatherOperands[dtype, 3], ctx: DeviceContext) raises:
    """Elements of x are copied to y."""
    var rows = t.rows()
    var size = rows.columns() * rows.count
    if size == 0:
        return
    comptime if is_cpu[target]():
        check_places(t.index.data, size, rows.places, current_bounds())
        gather_elements_cpu[dtype](t.y.data, t.x.data, t.index.data, rows)
    else:
        gather_elements_gpu[dtype](t.y.data, t.x.data, t.index.data, rows, ctx)
