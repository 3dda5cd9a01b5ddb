"""grid_sample on a GPU: a thread has a point; or, where channels are innermost, a vector of channels of a point."""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import (
    barrier,
    block_dim,
    block_idx,
    global_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace
from std.memory import stack_allocation

from ..common.arithmetic import Divisor
from ..common.atomics import add_atomically
from ..common.gpu import GRID_LIMIT, load_wide, vector_alignment
from ..common.pointer import Ptr, accumulation_type
from .problem import Corners, SamplingProblem

comptime THREADS = 256
comptime CHANNELS = 16
"""Channels of planes that a thread reads one after the other, at most."""
comptime MIN_CHANNELS = 4
"""Channels of a thread, at least, where there are as many: the thread computes the corners of its point for them."""
comptime MAX_LANES = 32
"""Threads that share the channels of a point."""
comptime SATURATING_THREADS = 1 << 17
"""Threads that keep a large GPU busy."""


@__name(t"sample_points_{dtype}_v{V}_l{channels_last}_t{T}_d{deep}")
def sample_points[
    dtype: DType, V: Int, channels_last: Bool, T: Int, deep: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    by_inner: Divisor,
    together: Int32,
):
    """y counts images. Channels last: `by_inner` divides by the vectors of a point. Planes: by the points, `together`
    channels of which a thread has."""
    comptime Acc = accumulation_type[dtype]
    comptime alignment = vector_alignment[dtype, V]
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var channels = Int(p.channels)
    comptime if channels_last:
        var point, vector = by_inner.divide(item)
        if point >= p.points:
            return
        var c = Int(vector) * V
        for n in range(Int(block_idx.y), Int(p.batch), Int(grid_dim.y)):
            var corners = Corners[Acc, 1, T, deep](grid, Int(point), p, n)
            var image = x.unsafe_offset(n * p.image() + c)
            var total = SIMD[Acc, V](0)
            comptime for k in range(corners.K):
                if corners.pixel[k] >= 0:
                    total += (
                        load_wide[V](image, Int(corners.pixel[k]) * channels)
                        * corners.weight(k)[0]
                    )
            y.unsafe_store[alignment=alignment](
                n * p.result() + Int(point) * channels + c,
                total.cast[dtype](),
            )
    else:
        var stretch, point = by_inner.divide(item)
        var first = Int(stretch) * Int(together)
        var end = min(first + Int(together), channels)
        if first >= channels:
            return
        for n in range(Int(block_idx.y), Int(p.batch), Int(grid_dim.y)):
            var corners = Corners[Acc, 1, T, deep](grid, Int(point), p, n)
            for c in range(first, end):
                var plane = x.unsafe_offset(n * p.image() + c * p.pixels())
                var total = Scalar[Acc](0)
                comptime for k in range(corners.K):
                    if corners.pixel[k] >= 0:
                        total += (
                            plane[unsafe_offset=Int(corners.pixel[k])].cast[
                                Acc
                            ]()
                            * corners.weight(k)[0]
                        )
                y[
                    unsafe_offset=n * p.result()
                    + c * Int(p.points)
                    + Int(point)
                ] = total.cast[dtype]()


@__name(t"sample_dgrad_grid_{dtype}_l{channels_last}_t{T}_d{deep}")
def sample_grid_gradient[
    dtype: DType, channels_last: Bool, T: Int, deep: Bool
](
    dgrid: Ptr[dtype],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    lanes: Int32,
):
    """Computes the grid's gradient. `lanes` threads share the channels of a point, and their sums are added in order.
    With channels last the threads of a point are neighbours, else the threads of neighbouring points are.
    """
    comptime Acc = accumulation_type[dtype]
    comptime AXES = 3 if deep else 2
    var sums = stack_allocation[
        THREADS * AXES, Scalar[Acc], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var points = THREADS // Int(lanes)
    var lane_step = 1 if channels_last else points
    var lane = thread // points
    var point = thread % points
    comptime if channels_last:
        lane = thread % Int(lanes)
        point = thread // Int(lanes)
    point += Int(block_idx.x) * points
    var n = Int(block_idx.y)
    var channels = Int(p.channels)
    while n < Int(p.batch):
        var totals = Array[Scalar[Acc], AXES](fill=0)
        if point < Int(p.points):
            var corners = Corners[Acc, 1, T, deep](grid, point, p, n)
            var along = Array[Scalar[Acc], corners.K](fill=0)
            for c in range(lane, channels, Int(lanes)):
                var value: Scalar[Acc]
                var from_: Ptr[dtype]
                var step: Int
                comptime if channels_last:
                    value = load_wide[1](
                        dy, n * p.result() + point * channels + c
                    )[0]
                    from_ = x.unsafe_offset(n * p.image() + c)
                    step = channels
                else:
                    value = load_wide[1](
                        dy, n * p.result() + c * Int(p.points) + point
                    )[0]
                    from_ = x.unsafe_offset(n * p.image() + c * p.pixels())
                    step = 1
                comptime for k in range(corners.K):
                    if corners.pixel[k] >= 0:
                        along[k] += (
                            value
                            * load_wide[1](from_, Int(corners.pixel[k]) * step)[
                                0
                            ]
                        )
            comptime for axis in range(AXES):
                comptime for k in range(corners.K):
                    totals[axis] += along[k] * corners.slope[axis](k)[0]
        if lanes > 1:
            comptime for axis in range(AXES):
                sums[unsafe_offset=axis * THREADS + thread] = totals[axis]
            barrier()
            if lane == 0:
                comptime for axis in range(AXES):
                    for other in range(1, Int(lanes)):
                        totals[axis] += sums[
                            unsafe_offset=axis * THREADS
                            + thread
                            + other * lane_step
                        ]
            barrier()
        if lane == 0 and point < Int(p.points):
            comptime for axis in range(AXES):
                dgrid[
                    unsafe_offset=(n * Int(p.points) + point) * AXES + axis
                ] = totals[axis].cast[dtype]()
        n += Int(grid_dim.y)


@__name(t"sample_dgrad_input_atomic_{dtype}_l{channels_last}_t{T}_d{deep}")
def sample_input_gradient_atomic[
    dtype: DType, channels_last: Bool, T: Int, deep: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    by_inner: Divisor,
    together: Int32,
):
    """dx is zero before. Channels last: a thread has a channel of a point; planes: a point and `together` channels, as
    in sample_points."""
    comptime Acc = accumulation_type[dtype]
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var channels = Int(p.channels)
    comptime if channels_last:
        var point, channel = by_inner.divide(item)
        if point >= p.points:
            return
        var c = Int(channel)
        for n in range(Int(block_idx.y), Int(p.batch), Int(grid_dim.y)):
            var corners = Corners[Acc, 1, T, deep](grid, Int(point), p, n)
            var value = load_wide[1](
                dy, n * p.result() + Int(point) * channels + c
            )[0]
            comptime for k in range(corners.K):
                if corners.pixel[k] >= 0:
                    add_atomically(
                        dx.unsafe_offset(
                            n * p.image() + Int(corners.pixel[k]) * channels + c
                        ),
                        value * corners.weight(k)[0],
                    )
    else:
        var stretch, point = by_inner.divide(item)
        var first = Int(stretch) * Int(together)
        var end = min(first + Int(together), channels)
        if first >= channels:
            return
        for n in range(Int(block_idx.y), Int(p.batch), Int(grid_dim.y)):
            var corners = Corners[Acc, 1, T, deep](grid, Int(point), p, n)
            for c in range(first, end):
                var value = load_wide[1](
                    dy, n * p.result() + c * Int(p.points) + Int(point)
                )[0]
                var plane = n * p.image() + c * p.pixels()
                comptime for k in range(corners.K):
                    if corners.pixel[k] >= 0:
                        add_atomically(
                            dx.unsafe_offset(plane + Int(corners.pixel[k])),
                            value * corners.weight(k)[0],
                        )


@__name(t"sample_dgrad_input_in_order_{dtype}_l{channels_last}_t{T}_d{deep}")
def sample_input_gradient_in_order[
    dtype: DType, channels_last: Bool, T: Int, deep: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
):
    """dx is zero before. A thread has a channel of an image and goes through all points.
    """
    comptime Acc = accumulation_type[dtype]
    var item = Int(global_idx.x)
    var channels = Int(p.channels)
    if item >= Int(p.batch) * channels:
        return
    var n = item // channels
    var c = item % channels
    for point in range(Int(p.points)):
        var corners = Corners[Acc, 1, T, deep](grid, point, p, n)
        var at = c * Int(p.points) + point
        comptime if channels_last:
            at = point * channels + c
        var value = load_wide[1](dy, n * p.result() + at)[0]
        comptime for k in range(corners.K):
            if corners.pixel[k] >= 0:
                var pixel = Int(corners.pixel[k])
                var to = n * p.image() + c * p.pixels() + pixel
                comptime if channels_last:
                    to = n * p.image() + pixel * channels + c
                dx[unsafe_offset=to] += value * corners.weight(k)[0]


def _check(p: SamplingProblem) raises:
    comptime most = Int(Int32.MAX) - (1 << 20)
    if p.result() > most or p.pixels() > most:
        raise Error(
            "grid_sample: ",
            p.points,
            " points of ",
            p.channels,
            " channels from ",
            p.pixels(),
            " pixels: each image and its result must be below 2^31 elements",
        )


def _together(p: SamplingProblem) -> Int:
    """Channels of a thread, where channels are planes: few enough for many threads.
    """
    var together = CHANNELS
    while together > MIN_CHANNELS and (
        Int(p.batch) * Int(p.points) * ceildiv(Int(p.channels), together)
        < SATURATING_THREADS
    ):
        together //= 2
    return together


def _lanes(p: SamplingProblem, channels_last: Bool) -> Int:
    """Threads that share a point, a power of two. Channels last neighbours are read together.
    """
    var lanes = 1
    while (
        lanes < MAX_LANES
        and 2 * lanes * MIN_CHANNELS <= Int(p.channels)
        and (
            (channels_last and lanes < MAX_LANES // 2)
            or Int(p.batch) * Int(p.points) * lanes < SATURATING_THREADS
        )
    ):
        lanes *= 2
    return lanes


def sample_gpu[
    dtype: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    ctx: DeviceContext,
    y: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
) raises:
    """y = the values that the points read."""
    _check(p)
    comptime V = 16 // size_of[dtype]() if channels_last else 1
    var whole = Int(p.channels) % V == 0 and (Int(x) | Int(y)) % 16 == 0
    comptime for vector in [V, 1]:
        if vector == 1 or whole:
            var inner = Int(p.channels) // vector
            var items = Int(p.points) * inner
            var together = 1
            comptime if not channels_last:
                together = _together(p)
                inner = Int(p.points)
                items = inner * ceildiv(Int(p.channels), together)
            comptime kernel = sample_points[
                dtype, vector, channels_last, T, deep
            ]
            ctx.enqueue_function[kernel](
                y,
                x,
                grid,
                p,
                Divisor(inner),
                Int32(together),
                grid_dim=(
                    ceildiv(items, THREADS),
                    min(Int(p.batch), GRID_LIMIT),
                ),
                block_dim=THREADS,
            )
            return


def sample_grid_gradient_gpu[
    dtype: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    ctx: DeviceContext,
    dgrid: Ptr[dtype],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
) raises:
    """The grid's gradient."""
    _check(p)
    comptime kernel = sample_grid_gradient[dtype, channels_last, T, deep]
    var lanes = _lanes(p, channels_last)
    ctx.enqueue_function[kernel](
        dgrid,
        dy,
        x,
        grid,
        p,
        Int32(lanes),
        grid_dim=(
            ceildiv(Int(p.points) * lanes, THREADS),
            min(Int(p.batch), GRID_LIMIT),
        ),
        block_dim=THREADS,
    )


def sample_input_gradient_in_order_gpu[
    dtype: DType, sums: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
) raises:
    """The image's gradient: a thread adds up a channel of an image."""
    _check(p)
    ctx.enqueue_memset(dx, 0)
    if p.points == 0:
        return
    var result = rebind[Ptr[accumulation_type[dtype]]](dx.unsafe_ptr())
    comptime kernel = sample_input_gradient_in_order[
        dtype, channels_last, T, deep
    ]
    ctx.enqueue_function[kernel](
        result,
        dy,
        grid,
        p,
        grid_dim=ceildiv(Int(p.batch) * Int(p.channels), THREADS),
        block_dim=THREADS,
    )


def sample_input_gradient_atomic_gpu[
    dtype: DType, sums: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
) raises:
    """The image's gradient, added atomically."""
    _check(p)
    ctx.enqueue_memset(dx, 0)
    if p.points == 0:
        return
    var result = rebind[Ptr[accumulation_type[dtype]]](dx.unsafe_ptr())
    var inner = Int(p.channels)
    var items = Int(p.points) * inner
    var together = 1
    comptime if not channels_last:
        together = _together(p)
        inner = Int(p.points)
        items = inner * ceildiv(Int(p.channels), together)
    comptime kernel = sample_input_gradient_atomic[
        dtype, channels_last, T, deep
    ]
    ctx.enqueue_function[kernel](
        result,
        dy,
        grid,
        p,
        Divisor(inner),
        Int32(together),
        grid_dim=(ceildiv(items, THREADS), min(Int(p.batch), GRID_LIMIT)),
        block_dim=THREADS,
    )
