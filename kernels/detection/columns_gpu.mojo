"""A deformable convolution's columns and their gradients on a GPU: neighbouring threads have neighbouring channels."""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.atomics import add_atomically
from ..common.pointer import Ptr, accumulation_type
from .deformable import DeformableProblem, DeformedPoint

comptime BLOCK = 256
comptime LANES = 16
"""Threads that share the channels of a point."""


def deformed_columns[
    dtype: DType
](
    columns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """A thread has a channel of a tap of a window."""
    comptime Acc = accumulation_type[dtype]
    var item = Int(global_idx.x)
    if item >= Int(p.batch) * p.windows() * p.column():
        return
    var channel = item % Int(p.channels)
    var tap = item // Int(p.channels) % p.taps()
    var row = item // p.column()
    var point = DeformedPoint[Acc](
        offset, mask, row, tap, channel // p.together(), p
    )
    var image = x.unsafe_offset(row // p.windows() * p.image() + channel)
    var total = Scalar[Acc](0)
    comptime for k in range(4):
        if point.pixel[k] >= 0:
            total += (
                image[unsafe_offset=Int(point.pixel[k]) * Int(p.channels)].cast[
                    Acc
                ]()
                * point.weight[k]
            )
    columns[unsafe_offset=row * p.column() + p.at(tap, channel)] = (
        total * point.mask
    ).cast[dtype]()


def deformed_offset_gradient[
    dtype: DType
](
    doffset: Ptr[dtype],
    dmask: Ptr[dtype],
    dcolumns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """LANES neighbouring threads share the channels of a tap's offset, and their sums are added in order.
    """
    comptime Acc = accumulation_type[dtype]
    comptime SUMS = 3
    var shared = stack_allocation[
        BLOCK * SUMS, Scalar[Acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var lane = thread % LANES
    var at = Int(global_idx.x) // LANES
    var per_row = Int(p.offset_groups) * p.taps()
    var totals = Array[Scalar[Acc], SUMS](fill=0)
    var active = at < Int(p.batch) * p.windows() * per_row
    var scale = Scalar[Acc](0)
    if active:
        var row = at // per_row
        var group = at // p.taps() % Int(p.offset_groups)
        var tap = at % p.taps()
        var point = DeformedPoint[Acc](offset, mask, row, tap, group, p)
        scale = point.mask
        var image = x.unsafe_offset(row // p.windows() * p.image())
        var column = dcolumns.unsafe_offset(row * p.column())
        var begin = group * p.together()
        for channel in range(begin + lane, begin + p.together(), LANES):
            var given = column[unsafe_offset=p.at(tap, channel)].cast[Acc]()
            comptime for k in range(4):
                if point.pixel[k] >= 0:
                    var value = (
                        given
                        * image[
                            unsafe_offset=Int(point.pixel[k]) * Int(p.channels)
                            + channel
                        ].cast[Acc]()
                    )
                    totals[0] += value * point.down[k]
                    totals[1] += value * point.along[k]
                    totals[2] += value * point.weight[k]
    comptime for k in range(SUMS):
        shared[unsafe_offset=thread * SUMS + k] = totals[k]
    barrier()
    if lane != 0 or not active:
        return
    comptime for k in range(SUMS):
        for other in range(1, LANES):
            totals[k] += shared[unsafe_offset=(thread + other) * SUMS + k]
    doffset[unsafe_offset=at * 2] = (totals[0] * scale).cast[dtype]()
    doffset[unsafe_offset=at * 2 + 1] = (totals[1] * scale).cast[dtype]()
    if p.masked:
        dmask[unsafe_offset=at] = totals[2].cast[dtype]()


def deformed_input_gradient_atomic[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """dx is zero before. A thread has a channel of a tap of a window."""
    comptime Acc = accumulation_type[dtype]
    var item = Int(global_idx.x)
    if item >= Int(p.batch) * p.windows() * p.column():
        return
    var channel = item % Int(p.channels)
    var tap = item // Int(p.channels) % p.taps()
    var row = item // p.column()
    var point = DeformedPoint[Acc](
        offset, mask, row, tap, channel // p.together(), p
    )
    var given = (
        dcolumns[unsafe_offset=row * p.column() + p.at(tap, channel)].cast[
            Acc
        ]()
        * point.mask
    )
    var image = dx.unsafe_offset(row // p.windows() * p.image() + channel)
    comptime for k in range(4):
        if point.pixel[k] >= 0:
            add_atomically(
                image.unsafe_offset(Int(point.pixel[k]) * Int(p.channels)),
                given * point.weight[k],
            )


def deformed_input_gradient_in_order[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """dx is zero before. A thread has a channel of an image and goes through all windows.
    """
    comptime Acc = accumulation_type[dtype]
    var item = Int(global_idx.x)
    if item >= Int(p.batch) * Int(p.channels):
        return
    var n = item // Int(p.channels)
    var channel = item % Int(p.channels)
    var image = dx.unsafe_offset(n * p.image() + channel)
    for row in range(n * p.windows(), (n + 1) * p.windows()):
        for tap in range(p.taps()):
            var point = DeformedPoint[Acc](
                offset, mask, row, tap, channel // p.together(), p
            )
            var given = (
                dcolumns[
                    unsafe_offset=row * p.column() + p.at(tap, channel)
                ].cast[Acc]()
                * point.mask
            )
            comptime for k in range(4):
                if point.pixel[k] >= 0:
                    image[
                        unsafe_offset=Int(point.pixel[k]) * Int(p.channels)
                    ] += (given * point.weight[k])


@no_inline
def columns_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    columns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
) raises:
    """Columns = what the windows read."""
    ctx.enqueue_function[deformed_columns[dtype]](
        columns,
        x,
        offset,
        mask,
        p,
        grid_dim=ceildiv(Int(p.batch) * p.windows() * p.column(), BLOCK),
        block_dim=BLOCK,
    )


@no_inline
def columns_offset_gradient_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    doffset: Ptr[dtype],
    dmask: Ptr[dtype],
    dcolumns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
) raises:
    """The gradients of offsets and masks."""
    ctx.enqueue_function[deformed_offset_gradient[dtype]](
        doffset,
        dmask,
        dcolumns,
        x,
        offset,
        mask,
        p,
        grid_dim=ceildiv(
            Int(p.batch)
            * p.windows()
            * Int(p.offset_groups)
            * p.taps()
            * LANES,
            BLOCK,
        ),
        block_dim=BLOCK,
    )


@no_inline
def columns_input_gradient_gpu[
    dtype: DType, sums: DType, //
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    deterministic: Bool,
) raises:
    """The images' gradient, added atomically unless it shall be deterministic.
    """
    ctx.enqueue_memset(dx, 0)
    var items = Int(p.batch) * p.windows() * p.column()
    if items == 0:
        return
    var image = rebind[Ptr[accumulation_type[dtype]]](dx.unsafe_ptr())
    if deterministic:
        ctx.enqueue_function[deformed_input_gradient_in_order[dtype]](
            image,
            dcolumns,
            offset,
            mask,
            p,
            grid_dim=ceildiv(Int(p.batch) * Int(p.channels), BLOCK),
            block_dim=BLOCK,
        )
        return
    ctx.enqueue_function[deformed_input_gradient_atomic[dtype]](
        image,
        dcolumns,
        offset,
        mask,
        p,
        grid_dim=ceildiv(items, BLOCK),
        block_dim=BLOCK,
    )
