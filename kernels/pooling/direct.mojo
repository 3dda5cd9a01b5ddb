"""The reference, correct for every geometry: each function computes one element of a result from its flat number.

No geometry is refused and no element is written twice, so these run on any device, give the same bits on every run, end
every table of kernels, and serve as the reference in tests of the faster kernels. Sums are kept in float32 (float64 for
float64). A GPU takes one thread for each result, a CPU equal shares for each core.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.math import ceildiv
from std.utils.numerics import neg_inf

from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import SMALLEST_SHARE, for_each_share
from .kernel import INDEX, NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from .problem import PoolingProblem, position

comptime THREADS = 256


@always_inline
def fprop_at[
    dtype: DType, argmax: DType, //, *, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem, flat: Int):
    """Computes one average, or one maximum and where it was found: the first of equal values, the last NaN.

    A window that lies wholly in padding gets the number of taps as its offset, which no pixel answers to.
    """
    comptime Acc = accumulation_type[dtype]
    comptime averaging = argmax == NO_ARGMAX
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
    var best = Scalar[Acc](0) if averaging else neg_inf[Acc]()
    var found = (td.start * height + th.start) * width + tw.start
    comptime if argmax == OFFSET:
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
            var tap = ((td.first + a) * Int(p.h.window) + th.first + b) * Int(
                p.w.window
            ) + tw.first
            for c in range(tw.count):
                var pixel = row + tw.start + c * tw.step
                var value = t.source[
                    unsafe_offset=base + pixel * channels
                ].cast[Acc]()
                comptime if averaging:
                    best += value
                else:
                    if value > best or value != value:
                        best = value
                        found = tap + c if argmax == OFFSET else pixel
    comptime if averaging:
        best /= Scalar[Acc](p.divisor[adaptive](at.d, at.h, at.w))
    else:
        t.argmaxes[unsafe_offset=flat] = Scalar[argmax](found)
    t.result[unsafe_offset=flat] = best.cast[dtype]()


@always_inline
def dgrad_at[
    dtype: DType, argmax: DType, //, *, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem, flat: Int):
    """Computes one pixel's gradient. For averages it is the sum over the windows above the pixel, each divided by its
    own divisor; for maxima the sum over those whose argmax names it, and by index over windows that lie wholly in
    padding, whose index counts on past the end of a row or slab."""
    comptime Acc = accumulation_type[dtype]
    var at = position(
        flat, Int(p.d.input), Int(p.h.input), Int(p.w.input), Int(p.channels)
    )
    var rd = p.d.outputs_over[adaptive](at.d)
    var rh = p.h.outputs_over[adaptive](at.h)
    var rw = p.w.outputs_over[adaptive](at.w)
    comptime if not adaptive and argmax == INDEX:
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
                var value = t.source[unsafe_offset=o].cast[Acc]()
                comptime if argmax == NO_ARGMAX:
                    total += value / Scalar[Acc](
                        p.divisor[adaptive](od, oh, ow)
                    )
                    continue
                comptime if argmax == OFFSET:
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
                if Int(t.argmaxes[unsafe_offset=o]) == wanted:
                    total += value
    t.result[unsafe_offset=flat] = total.cast[dtype]()


@no_inline
def _for_each_result[
    dtype: DType, argmax: DType, //, forward: Bool, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem):
    def share(first: Int, end: Int) {imm}:
        for i in range(first, end):
            _one_result[forward, adaptive](t, p, i)

    var total = p.output_size() if forward else p.input_size()
    for_each_share(share, total, SMALLEST_SHARE)


@__name(t"pool_direct_{dtype}_{argmax}_f{forward}_a{adaptive}")
def pool_direct[
    dtype: DType, argmax: DType, forward: Bool, adaptive: Bool
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingProblem,
):
    """A GPU's thread for each result."""
    var i = Int(global_idx.x)
    if i < (p.output_size() if forward else p.input_size()):
        _one_result[forward, adaptive](
            PoolingTensors(result, source, argmaxes), p, i
        )


@always_inline
def _one_result[
    dtype: DType, argmax: DType, //, forward: Bool, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem, flat: Int):
    comptime if forward:
        fprop_at[adaptive=adaptive](t, p, flat)
    else:
        dgrad_at[adaptive=adaptive](t, p, flat)


struct Direct[forward: Bool, target: StaticString](PoolingKernel):
    comptime NAME: StaticString = "direct"

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime if is_cpu[Self.target]():
            _for_each_result[Self.forward, adaptive](t, p)
        else:
            var total = p.output_size() if Self.forward else p.input_size()
            comptime kernel = pool_direct[dtype, argmax, Self.forward, adaptive]
            ctx.enqueue_function[kernel](
                t.result,
                t.source,
                t.argmaxes,
                p,
                grid_dim=ceildiv(total, THREADS),
                block_dim=THREADS,
            )
