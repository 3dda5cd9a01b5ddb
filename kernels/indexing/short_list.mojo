"""y [outer, places, inner] with source [outer, count, inner] put in the places of a short list, on a GPU.

A block has a row of the list and a stretch of columns. Where a later row goes to the same place, it ends: the last one
wins, and a table of any size costs nothing but its copy.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.bounds import Bounds, current_bounds
from ..common.pointer import Ptr
from .extents import THREADS, Rows

comptime SHORT_LIST = THREADS
"""Rows of the longest list: a thread looks at one of them."""
comptime CARRIED = 4
"""Columns of a thread."""


@__name(t"scatter_short_list_{dtype}")
def short_list_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    stretches: Int64,
    bounds: Bounds,
):
    var is_followed = stack_allocation[
        1, Int32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var i = Int(block_idx.x) // Int(stretches)
    var stretch = Int(block_idx.x) % Int(stretches)
    var place = index[unsafe_offset=i]
    if place < 0 or place >= Int64(rows.places):
        if stretch == 0 and thread == 0:
            bounds.report(place, Int64(rows.places))
        return
    if thread == 0:
        is_followed[] = 0
    barrier()
    # Every writer writes the same.
    if i < thread < rows.count and index[unsafe_offset=thread] == place:
        is_followed[] = 1
    barrier()
    if is_followed[] != 0:
        return
    comptime for k in range(CARRIED):
        var column = (stretch * CARRIED + k) * THREADS + thread
        if column < rows.columns():
            y[unsafe_offset=rows.at(column, Int(place), rows.places)] = source[
                unsafe_offset=rows.at(column, i, rows.count)
            ]


@no_inline
def short_list_refusal(rows: Rows) -> Optional[String]:
    """Returns None, or why rows cannot be put by the list in its given order.
    """
    if rows.count > SHORT_LIST:
        return String("the list has more rows than a block has threads")
    return None


@no_inline
def short_list_gpu[
    dtype: DType
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """Puts the rows of a short list. `y` already holds the values around them. There are columns, and 1 to SHORT_LIST
    rows in the list."""
    var stretches = ceildiv(rows.columns(), CARRIED * THREADS)
    ctx.enqueue_function[short_list_kernel[dtype]](
        y,
        index,
        source,
        rows,
        Int64(stretches),
        current_bounds(),
        grid_dim=rows.count * stretches,
        block_dim=THREADS,
    )
