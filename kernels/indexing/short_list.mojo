"""y [outer, places, inner] with source [outer, count, inner] added to (or put in) the places of a short list, on a GPU.

A block has a row of the list and a stretch of columns. The block of the first row that goes to a place (or of the last one,
where rows are put) works for all rows that go there, the others end: no addition is atomic, and a table of any size costs
nothing but its copy.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import block

from ..common.bounds import Bounds, current_bounds
from ..common.pointer import Ptr
from .extents import BLOCK, Rows, sum_type

comptime SHORT_LIST = BLOCK
"""Rows of the longest list: a thread looks at one of them."""
comptime CARRIED = 4
"""Columns of a thread."""
comptime LANES = 64
"""Threads side by side along columns, at most; the others share the rows of a place."""
comptime AHEAD = 4
"""Rows that a thread reads before it adds the first of them."""


@__name(t"scatter_short_list_{accumulate}_{dtype}")
def short_list_kernel[
    dtype: DType, accumulate: Bool
](
    y: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    lanes: Int64,
    stretches: Int64,
    bounds: Bounds,
):
    """`lanes` divides BLOCK."""
    comptime acc = sum_type[dtype]
    var meeting = stack_allocation[
        BLOCK, Int32, address_space=AddressSpace.SHARED
    ]()
    var shared = stack_allocation[
        CARRIED * BLOCK, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var flags = stack_allocation[2, Int32, address_space=AddressSpace.SHARED]()
    var thread = Int(thread_idx.x)
    var i = Int(block_idx.x) // Int(stretches)
    var stretch = Int(block_idx.x) % Int(stretches)
    var place = index[unsafe_offset=i]
    if place < 0 or place >= Int64(rows.places):
        if stretch == 0 and thread == 0:
            bounds.report(place, Int64(rows.places))
        return
    if thread < 2:
        flags[unsafe_offset=thread] = 0
    barrier()
    var meets = thread < rows.count and index[unsafe_offset=thread] == place
    # Every writer writes the same.
    comptime if accumulate:
        if meets and thread < i:
            flags[unsafe_offset=0] = 1
    else:
        if meets and thread > i:
            flags[unsafe_offset=0] = 1
    barrier()
    if flags[unsafe_offset=0] != 0:
        return
    var lane = thread % Int(lanes)
    var group = thread // Int(lanes)
    var columns = rows.columns()
    var first = stretch * Int(lanes) * CARRIED + lane
    comptime if not accumulate:
        if group > 0:
            return
        comptime for k in range(CARRIED):
            var column = first + k * Int(lanes)
            if column < columns:
                y[
                    unsafe_offset=rows.at(column, Int(place), rows.places)
                ] = source[unsafe_offset=rows.at(column, i, rows.count)]
        return
    var before = block.prefix_sum[block_size=BLOCK, exclusive=True](
        Int32(1 if meets else 0)
    )
    if meets:
        meeting[unsafe_offset=Int(before)] = Int32(thread)
    if thread == BLOCK - 1:
        flags[unsafe_offset=1] = before + Int32(1 if meets else 0)
    barrier()
    var count = Int(flags[unsafe_offset=1])
    var groups = BLOCK // Int(lanes)
    var end = count * (group + 1) // groups
    var from_ = Array[Int, CARRIED](fill=0)
    var live = Array[Bool, CARRIED](fill=False)
    var sums = Array[Scalar[acc], CARRIED](fill=0)
    comptime for k in range(CARRIED):
        var column = first + k * Int(lanes)
        live[k] = column < columns
        from_[k] = rows.at(column, 0, rows.count)
    for j in range(count * group // groups, end, AHEAD):
        var values = Array[Scalar[acc], AHEAD * CARRIED](fill=0)
        comptime for u in range(AHEAD):
            if j + u < end:
                var row = Int(meeting[unsafe_offset=j + u]) * rows.inner
                comptime for k in range(CARRIED):
                    if live[k]:
                        values[u * CARRIED + k] = source[
                            unsafe_offset=from_[k] + row
                        ].cast[acc]()
        comptime for u in range(AHEAD):
            comptime for k in range(CARRIED):
                sums[k] += values[u * CARRIED + k]
    comptime for k in range(CARRIED):
        shared[unsafe_offset=k * BLOCK + thread] = sums[k]
    barrier()
    if group > 0:
        return
    comptime for k in range(CARRIED):
        var column = first + k * Int(lanes)
        if column < columns:
            for other in range(1, groups):
                sums[k] += shared[
                    unsafe_offset=k * BLOCK + other * Int(lanes) + lane
                ]
            var to = rows.at(column, Int(place), rows.places)
            if not rows.zeros:
                sums[k] += y[unsafe_offset=to].cast[acc]()
            y[unsafe_offset=to] = sums[k].cast[dtype]()


@no_inline
def short_list_gpu[
    dtype: DType, accumulate: Bool
](
    y: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """`y` has what is added to. There are columns, and 1 to SHORT_LIST rows in the list.
    """
    var wanted = ceildiv(rows.columns(), CARRIED)
    var lanes = 1
    while lanes < min(wanted, LANES):
        lanes *= 2
    var stretches = ceildiv(wanted, lanes)
    ctx.enqueue_function[short_list_kernel[dtype, accumulate]](
        y,
        index,
        source,
        rows,
        Int64(lanes),
        Int64(stretches),
        current_bounds(),
        grid_dim=rows.count * stretches,
        block_dim=BLOCK,
    )
