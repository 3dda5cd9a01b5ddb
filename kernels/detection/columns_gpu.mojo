"""A deformable convolution's columns and their gradients on a GPU: neighbouring threads have neighbouring channels."""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.arithmetic import divide
from ..common.atomics import add_atomically
from ..common.pointer import Ptr, accumulation_type
from .deformable import DeformableProblem, DeformedPoint

comptime THREADS = 256
comptime LANES = 16
"""Threads that share the channels of a point where sums over the channels are formed."""
comptime MAX_LANES = 32
"""Threads that share the channels of any other point, at most."""


struct PointThread(TrivialRegisterPassable):
    """Whom a thread works for: it shares the channels of an offset group's point with `lanes` neighbours.
    """

    var is_any: Bool
    var row: Int
    """The window, counted over all images."""
    var image: Int
    var tap: Int
    var group: Int
    var first: Int
    """Its first channel."""
    var end: Int
    """The group's channels end there."""

    @always_inline
    def __init__(out self, thread: Int, lanes: Int, p: DeformableProblem):
        var at = thread // lanes
        self.is_any = at < points(p)
        var rest, tap = divide(Int32(at), Int32(p.taps()))
        var row, group = divide(rest, p.offset_groups)
        var image, _ = divide(row, Int32(p.windows()))
        self.row = Int(row)
        self.image = Int(image)
        self.tap = Int(tap)
        self.group = Int(group)
        self.first = self.group * p.together() + thread % lanes
        self.end = (self.group + 1) * p.together()


@always_inline
def points(p: DeformableProblem) -> Int:
    """Returns the number of points of all windows and offset groups."""
    return Int(p.batch) * p.windows() * Int(p.offset_groups) * p.taps()


@__name(t"deformed_columns_{dtype}")
def deformed_columns[
    dtype: DType
](
    columns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    lanes: Int64,
):
    comptime Acc = accumulation_type[dtype]
    var own = PointThread(Int(global_idx.x), Int(lanes), p)
    if not own.is_any:
        return
    var point = DeformedPoint[Acc](offset, mask, own.row, own.tap, own.group, p)
    var image = x.unsafe_offset(own.image * p.image())
    var column = columns.unsafe_offset(own.row * p.column())
    for channel in range(own.first, own.end, Int(lanes)):
        var total = Scalar[Acc](0)
        comptime for k in range(4):
            if point.pixel[k] >= 0:
                total += (
                    image[
                        unsafe_offset=Int(point.pixel[k]) * Int(p.channels)
                        + channel
                    ].cast[Acc]()
                    * point.weight[k]
                )
        column[unsafe_offset=p.at(own.tap, channel)] = (
            total * point.mask
        ).cast[dtype]()


@__name(t"deformed_dgrad_offset_{dtype}")
def deformed_dgrad_offset[
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
        THREADS * SUMS, Scalar[Acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var at = Int(global_idx.x) // LANES
    var own = PointThread(Int(global_idx.x), LANES, p)
    var totals = Array[Scalar[Acc], SUMS](fill=0)
    var scale = Scalar[Acc](0)
    if own.is_any:
        var point = DeformedPoint[Acc](
            offset, mask, own.row, own.tap, own.group, p
        )
        scale = point.mask
        var image = x.unsafe_offset(own.image * p.image())
        var column = dcolumns.unsafe_offset(own.row * p.column())
        for channel in range(own.first, own.end, LANES):
            var given = column[unsafe_offset=p.at(own.tap, channel)].cast[Acc]()
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
    if thread % LANES != 0 or not own.is_any:
        return
    comptime for k in range(SUMS):
        for other in range(1, LANES):
            totals[k] += shared[unsafe_offset=(thread + other) * SUMS + k]
    doffset[unsafe_offset=at * 2] = (totals[0] * scale).cast[dtype]()
    doffset[unsafe_offset=at * 2 + 1] = (totals[1] * scale).cast[dtype]()
    if p.masked:
        dmask[unsafe_offset=at] = totals[2].cast[dtype]()


@__name(t"deformed_dgrad_input_atomic_{dtype}")
def deformed_dgrad_input_atomic[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    lanes: Int64,
):
    """dx is zero before."""
    comptime Acc = accumulation_type[dtype]
    var own = PointThread(Int(global_idx.x), Int(lanes), p)
    if not own.is_any:
        return
    var point = DeformedPoint[Acc](offset, mask, own.row, own.tap, own.group, p)
    var image = dx.unsafe_offset(own.image * p.image())
    var column = dcolumns.unsafe_offset(own.row * p.column())
    for channel in range(own.first, own.end, Int(lanes)):
        var given = (
            column[unsafe_offset=p.at(own.tap, channel)].cast[Acc]()
            * point.mask
        )
        comptime for k in range(4):
            if point.pixel[k] >= 0:
                add_atomically(
                    image.unsafe_offset(
                        Int(point.pixel[k]) * Int(p.channels) + channel
                    ),
                    given * point.weight[k],
                )


@__name(t"deformed_dgrad_input_in_order_{dtype}")
def deformed_dgrad_input_in_order[
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


def _check(p: DeformableProblem) raises:
    """Checks that 32-bit thread numbers can count the points."""
    if points(p) > Int(Int32.MAX):
        raise Error(
            t"deform_conv2d: {points(p)} points of windows: must be below 2^31"
        )


def _lanes(p: DeformableProblem) -> Int:
    """Returns the lanes of a point: a power of two, so that a warp begins with a point's first lane.
    """
    var lanes = 1
    while lanes < min(p.together(), MAX_LANES):
        lanes *= 2
    return lanes


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
    """Writes the elements that the windows read as columns."""
    _check(p)
    var lanes = _lanes(p)
    ctx.enqueue_function[deformed_columns[dtype]](
        columns,
        x,
        offset,
        mask,
        p,
        Int64(lanes),
        grid_dim=ceildiv(points(p) * lanes, THREADS),
        block_dim=THREADS,
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
    _check(p)
    ctx.enqueue_function[deformed_dgrad_offset[dtype]](
        doffset,
        dmask,
        dcolumns,
        x,
        offset,
        mask,
        p,
        grid_dim=ceildiv(points(p) * LANES, THREADS),
        block_dim=THREADS,
    )


@no_inline
def columns_input_gradient_gpu[
    dtype: DType, sums: DType, //, *, in_order: Bool
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
) raises:
    """The images' gradient, added atomically, or `in_order`: a thread adds up a channel of an image.
    """
    ctx.enqueue_memset(dx, 0)
    if points(p) == 0:
        return
    _check(p)
    var image = rebind[Ptr[accumulation_type[dtype]]](dx.unsafe_ptr())
    comptime if in_order:
        ctx.enqueue_function[deformed_dgrad_input_in_order[dtype]](
            image,
            dcolumns,
            offset,
            mask,
            p,
            grid_dim=ceildiv(Int(p.batch) * Int(p.channels), THREADS),
            block_dim=THREADS,
        )
    else:
        var lanes = _lanes(p)
        ctx.enqueue_function[deformed_dgrad_input_atomic[dtype]](
            image,
            dcolumns,
            offset,
            mask,
            p,
            Int64(lanes),
            grid_dim=ceildiv(points(p) * lanes, THREADS),
            block_dim=THREADS,
        )
