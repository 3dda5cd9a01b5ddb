"""y [outer, places, inner] = x plus source [outer, count, inner] at the places of index [count], of few columns, on a GPU.

A block owns one place and COLUMNS columns (outer times inner counts them), and its threads share the list: each adds up
what it finds in its part of it. Their sums are added in a fixed order, so that no addition is atomic and results are the
same from run to run. So the gradient of a table of relative positions is computed: few rows, each hit often.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.bounds import Bounds, current_bounds
from ..common.pointer import Ptr
from .extents import Rows, sum_type

comptime BLOCK = 256
comptime COLUMNS = 8
comptime LANES = BLOCK // COLUMNS
"""Threads that add up one column's sums at first."""
comptime MOST_COLUMNS = 128
"""More are read by neighbouring threads (rows.mojo)."""


@__name(t"scatter_few_columns_{dtype}")
def few_columns_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    source: Ptr[dtype],
    rows: Rows,
    groups: Int64,
    bounds: Bounds,
):
    comptime acc = sum_type[dtype]
    var shared = stack_allocation[
        COLUMNS * BLOCK, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var place = Int(block_idx.x) // Int(groups)
    var first = Int(block_idx.x) % Int(groups) * COLUMNS
    var columns = min(COLUMNS, rows.columns() - first)
    var sums = Array[Scalar[acc], COLUMNS](fill=0)
    for i in range(thread, rows.count, BLOCK):
        var at = Int(index[unsafe_offset=i])
        # Every block sees the whole list: one of them tells.
        if block_idx.x == 0:
            _ = bounds.holds(Int64(at), Int64(rows.places))
        if at == place:
            comptime for k in range(COLUMNS):
                if k < columns:
                    sums[k] += source[
                        unsafe_offset=rows.at(first + k, i, rows.count)
                    ].cast[acc]()
    comptime for k in range(COLUMNS):
        shared[unsafe_offset=k * BLOCK + thread] = sums[k]
    barrier()
    var own = thread // LANES * BLOCK + thread % LANES
    var sum = shared[unsafe_offset=own]
    comptime for j in range(1, BLOCK // LANES):
        sum += shared[unsafe_offset=own + j * LANES]
    barrier()
    shared[unsafe_offset=thread] = sum
    barrier()
    if thread < columns:
        var at = rows.at(first + thread, place, rows.places)
        var total = Scalar[acc](0)
        if not rows.zeros:
            total = x[unsafe_offset=at].cast[acc]()
        for j in range(LANES):
            total += shared[unsafe_offset=thread * LANES + j]
        y[unsafe_offset=at] = total.cast[dtype]()


@no_inline
def few_columns_gpu[
    dtype: DType
](
    y: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    index: DeviceBuffer[DType.int64],
    source: DeviceBuffer[dtype],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    """At most MOST_COLUMNS columns."""
    var groups = ceildiv(rows.outer * rows.inner, COLUMNS)
    ctx.enqueue_function[few_columns_kernel[dtype]](
        y,
        x,
        index,
        source,
        rows,
        Int64(groups),
        current_bounds(),
        grid_dim=rows.places * groups,
        block_dim=BLOCK,
    )
