"""The always-right reference: every function computes one element of a result from its flat number.

No geometry is refused and no element is written twice, so these run on any device, give the same bits on every
run, end every table of dispatch.mojo, and are what the faster kernels are checked against. Sums are kept in float32 (float64
for float64). A GPU takes one thread for each result, a CPU equal shares for each core.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.utils.numerics import neg_inf

from .cpu.vectors import SMALLEST_SHARE, for_each_share
from .problem import Data, PoolingProblem, accumulator, position

comptime BLOCK = 256


@always_inline
def max_pool_fprop_at[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
    flat: Int,
):
    """One maximum and where it was found: the first of equal values, the last NaN.

    `indices` is flat in the unpadded plane or, with `offsets`, the number of the tap within the window; a window
    that lies wholly in padding then gets the number of taps, which no pixel answers to.
    """
    comptime Acc = accumulator[dtype]
    var at = position(
        flat,
        Int(p.d.output),
        Int(p.h.output),
        Int(p.w.output),
        Int(p.channels),
    )
    var td = p.d.taps[adaptive](at.d)
    var th = p.h.taps[adaptive](at.h)
    var tw = p.w.taps[adaptive](at.w)
    var height = Int(p.h.input)
    var width = Int(p.w.input)
    var channels = Int(p.channels)
    var base = at.n * p.input_plane() * channels + at.c
    var best = neg_inf[Acc]()
    var found = (td.start * height + th.start) * width + tw.start
    comptime if offsets:
        found = (td.first * Int(p.h.window) + th.first) * Int(
            p.w.window
        ) + tw.first
        if td.count == 0 or th.count == 0 or tw.count == 0:
            found = p.window_size()
    for a in range(td.count):
        for b in range(th.count):
            var row = (
                (td.start + a * td.step) * height + th.start + b * th.step
            ) * width
            for c in range(tw.count):
                var pixel = row + tw.start + c * tw.step
                var value = x[unsafe_offset=base + pixel * channels].cast[Acc]()
                if value > best or value != value:
                    best = value
                    comptime if offsets:
                        found = (
                            ((td.first + a) * Int(p.h.window) + th.first + b)
                            * Int(p.w.window)
                            + tw.first
                            + c
                        )
                    else:
                        found = pixel
    y[unsafe_offset=flat] = best.cast[dtype]()
    indices[unsafe_offset=flat] = Scalar[index](found)


@always_inline
def max_pool_dgrad_at[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
    flat: Int,
):
    """One pixel's gradient: the sum over the windows above it whose index names it, and over windows that lie wholly in
    padding, whose index counts on past the end of a row or slab."""
    comptime Acc = accumulator[dtype]
    var at = position(
        flat, Int(p.d.input), Int(p.h.input), Int(p.w.input), Int(p.channels)
    )
    var rd = p.d.outputs_over[adaptive](at.d)
    var rh = p.h.outputs_over[adaptive](at.h)
    var rw = p.w.outputs_over[adaptive](at.w)
    comptime if not adaptive and not offsets:
        if p.may_miss():
            # Rows and slabs by which such an index may be late.
            var late_h = Int(p.w.dilation) // Int(p.w.input) + 1
            var late_d = (Int(p.h.dilation) + late_h) // Int(p.h.input) + 1
            rd = (p.d.outputs_over[False](max(at.d - late_d, 0))[0], rd[1])
            rh = (p.h.outputs_over[False](max(at.h - late_h, 0))[0], rh[1])
            # It may be the slab before that the row counts on from.
            if p.h.may_miss() or (at.h < late_h and at.d > 0):
                rh = (0, Int(p.h.output))
            if p.w.may_miss():
                rw = (0, Int(p.w.output))
    var channels = Int(p.channels)
    var base = at.n * p.output_plane() * channels + at.c
    var wanted = (at.d * Int(p.h.input) + at.h) * Int(p.w.input) + at.w
    var total = Scalar[Acc](0)
    for od in range(rd[0], rd[1]):
        for oh in range(rh[0], rh[1]):
            for ow in range(rw[0], rw[1]):
                var o = (
                    base
                    + ((od * Int(p.h.output) + oh) * Int(p.w.output) + ow)
                    * channels
                )
                comptime if offsets:
                    # The tap of this window that the pixel is; a dilated window may step over it.
                    var kd = at.d + Int(p.d.padding) - od * Int(p.d.stride)
                    var kh = at.h + Int(p.h.padding) - oh * Int(p.h.stride)
                    var kw = at.w + Int(p.w.padding) - ow * Int(p.w.stride)
                    if (
                        kd % Int(p.d.dilation) != 0
                        or kh % Int(p.h.dilation) != 0
                        or kw % Int(p.w.dilation) != 0
                    ):
                        continue
                    wanted = (
                        (kd // Int(p.d.dilation)) * Int(p.h.window)
                        + kh // Int(p.h.dilation)
                    ) * Int(p.w.window) + kw // Int(p.w.dilation)
                if Int(indices[unsafe_offset=o]) == wanted:
                    total += dy[unsafe_offset=o].cast[Acc]()
    dx[unsafe_offset=flat] = total.cast[dtype]()


@always_inline
def avg_pool_fprop_at[
    dtype: DType, *, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: PoolingProblem, flat: Int):
    """One average."""
    comptime Acc = accumulator[dtype]
    var at = position(
        flat,
        Int(p.d.output),
        Int(p.h.output),
        Int(p.w.output),
        Int(p.channels),
    )
    var td = p.d.taps[adaptive](at.d)
    var th = p.h.taps[adaptive](at.h)
    var tw = p.w.taps[adaptive](at.w)
    var channels = Int(p.channels)
    var base = at.n * p.input_plane() * channels + at.c
    var total = Scalar[Acc](0)
    for a in range(td.count):
        for b in range(th.count):
            var row = ((td.start + a) * Int(p.h.input) + th.start + b) * Int(
                p.w.input
            )
            for c in range(tw.count):
                total += x[
                    unsafe_offset=base + (row + tw.start + c) * channels
                ].cast[Acc]()
    var divisor = Scalar[Acc](p.divisor[adaptive](at.d, at.h, at.w))
    y[unsafe_offset=flat] = (total / divisor).cast[dtype]()


@always_inline
def avg_pool_dgrad_at[
    dtype: DType, *, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: PoolingProblem, flat: Int):
    """One pixel's gradient: the sum over the windows above it, each divided by its own divisor.
    """
    comptime Acc = accumulator[dtype]
    var at = position(
        flat, Int(p.d.input), Int(p.h.input), Int(p.w.input), Int(p.channels)
    )
    var rd = p.d.outputs_over[adaptive](at.d)
    var rh = p.h.outputs_over[adaptive](at.h)
    var rw = p.w.outputs_over[adaptive](at.w)
    var channels = Int(p.channels)
    var base = at.n * p.output_plane() * channels + at.c
    var total = Scalar[Acc](0)
    for od in range(rd[0], rd[1]):
        for oh in range(rh[0], rh[1]):
            for ow in range(rw[0], rw[1]):
                var o = (
                    base
                    + ((od * Int(p.h.output) + oh) * Int(p.w.output) + ow)
                    * channels
                )
                var divisor = Scalar[Acc](p.divisor[adaptive](od, oh, ow))
                total += dy[unsafe_offset=o].cast[Acc]() / divisor
    dx[unsafe_offset=flat] = total.cast[dtype]()


@no_inline
def max_pool_fprop_cpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            max_pool_fprop_at[adaptive=adaptive, offsets=offsets](
                y, indices, x, p, i
            )

    for_each_share(share, p.output_size(), SMALLEST_SHARE)


@no_inline
def max_pool_dgrad_cpu[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            max_pool_dgrad_at[adaptive=adaptive, offsets=offsets](
                dx, dy, indices, p, i
            )

    for_each_share(share, p.input_size(), SMALLEST_SHARE)


@no_inline
def avg_pool_cpu[
    dtype: DType, *, adaptive: Bool, forward: Bool
](result: Data[dtype], source: Data[dtype], p: PoolingProblem):
    """y from x, or dx from dy."""

    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            comptime if forward:
                avg_pool_fprop_at[adaptive=adaptive](result, source, p, i)
            else:
                avg_pool_dgrad_at[adaptive=adaptive](result, source, p, i)

    var total = p.output_size() if forward else p.input_size()
    for_each_share(share, total, SMALLEST_SHARE)


def max_pool_fprop_direct[
    dtype: DType,
    index: DType,
    adaptive: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.output_size():
        max_pool_fprop_at[adaptive=adaptive, offsets=offsets](
            y, indices, x, p, i
        )


def max_pool_dgrad_direct[
    dtype: DType, index: DType, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < p.input_size():
        max_pool_dgrad_at[adaptive=adaptive, offsets=offsets](
            dx, dy, indices, p, i
        )


def avg_pool_direct[
    dtype: DType, adaptive: Bool, forward: Bool
](result: Data[dtype], source: Data[dtype], p: PoolingProblem):
    var i = Int(global_idx.x)
    if i < (p.output_size() if forward else p.input_size()):
        comptime if forward:
            avg_pool_fprop_at[adaptive=adaptive](result, source, p, i)
        else:
            avg_pool_dgrad_at[adaptive=adaptive](result, source, p, i)


def max_pool_fprop_gpu[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    ctx: DeviceContext,
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
) raises:
    comptime kernel = max_pool_fprop_direct[dtype, index, adaptive, offsets]
    ctx.enqueue_function[kernel](
        y,
        indices,
        x,
        p,
        grid_dim=ceildiv(p.output_size(), BLOCK),
        block_dim=BLOCK,
    )


def max_pool_dgrad_gpu[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    comptime kernel = max_pool_dgrad_direct[dtype, index, adaptive, offsets]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        p,
        grid_dim=ceildiv(p.input_size(), BLOCK),
        block_dim=BLOCK,
    )


def avg_pool_gpu[
    dtype: DType, *, adaptive: Bool, forward: Bool
](
    ctx: DeviceContext,
    result: Data[dtype],
    source: Data[dtype],
    p: PoolingProblem,
) raises:
    """y from x, or dx from dy."""
    var total = p.output_size() if forward else p.input_size()
    ctx.enqueue_function[avg_pool_direct[dtype, adaptive, forward]](
        result,
        source,
        p,
        grid_dim=ceildiv(total, BLOCK),
        block_dim=BLOCK,
    )
