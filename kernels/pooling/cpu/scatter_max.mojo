"""Gradient of max pooling on the CPU by scattering: each window adds where its argmaxes point.

One plane (C = 1) or one block of channels at a time, always in the same order. An argmax that points outside the plane
is ignored. A loop's limits are arguments: behind a pointer they would be read again after every store.
"""

from max.gpu.host import DeviceContext
from std.math import ceildiv, iota
from std.memory import stack_allocation

from ...common.parallel import worker_count
from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    ask_ahead,
    clear_run,
    for_each_share,
    lanes,
    pointer_to,
    round_run,
    smallest_share,
    store_part,
)
from ..kernel import INDEX, NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem

comptime BLOCK_CHANNELS = 64
"""Channels that are scattered together: more, and the lines that they touch outgrow the nearest cache."""
comptime MIN_BLOCK_CHANNELS = 16
"""Channels below which a block is not cut to keep another core busy: a line of the cache."""
comptime LIMIT_32 = 1 << 31
"""The limit below which places of a plane fit 32 bits."""
comptime FAR_AWAY = -(1 << 60)
"""A distance that leads outside of every plane."""
comptime CLEARED_ELEMENTS = 4096
"""Elements that are cleared at once: few enough to stay in the nearest cache, enough to be cleared fast."""
comptime PREFETCHED_ELEMENTS = 16
"""Elements that are asked for together."""


struct TapTable(Movable):
    """The pixels to which offsets point: pixel origins[o] + deltas[tap] of the plane. An offset that names no tap
    points outside every plane."""

    var origins: List[Scalar[DType.int]]
    var deltas: List[Scalar[DType.int]]

    def __init__(out self, p: PoolingProblem, *, by_offset: Bool):
        """Fills the table; it stays empty where argmaxes are indices."""
        self.origins = List[Scalar[DType.int]]()
        self.deltas = List[Scalar[DType.int]]()
        if not by_offset:
            return
        var height = Int(p.h.input)
        var width = Int(p.w.input)
        self.origins.resize(p.output_plane(), 0)
        for kd in range(Int(p.d.window)):
            for kh in range(Int(p.h.window)):
                var row = kd * Int(p.d.dilation) * height + kh * Int(
                    p.h.dilation
                )
                for kw in range(Int(p.w.window)):
                    self.deltas.append(row * width + kw * Int(p.w.dilation))
        while len(self.deltas) < 256:
            self.deltas.append(FAR_AWAY)
        var origin = self.origins.unsafe_ptr()
        for od in range(Int(p.d.output)):
            for oh in range(Int(p.h.output)):
                var row = (
                    (od * Int(p.d.stride) - Int(p.d.padding)) * height
                    + oh * Int(p.h.stride)
                    - Int(p.h.padding)
                ) * width - Int(p.w.padding)
                for ow in range(Int(p.w.output)):
                    origin[unsafe_offset=ow] = row + ow * Int(p.w.stride)
                origin = origin.unsafe_offset(Int(p.w.output))


@always_inline
def _pixel[
    argmax: DType, //
](found: Scalar[argmax], origin: Int, deltas: Ptr[DType.int]) -> Int:
    """Returns the pixel of the plane that an argmax names, or a number outside the plane where there is no such
    pixel."""
    comptime if argmax == OFFSET:
        return origin + Int(deltas[unsafe_offset=Int(found)])
    else:
        return Int(found)


@always_inline
def _add_window[
    dtype: DType, Acc: DType, argmax: DType, //
](
    sums: Ptr[Acc],
    dy: Ptr[dtype],
    found: Ptr[argmax],
    first: Int,
    end: Int,
    origin: Int,
    deltas: Ptr[DType.int],
    plane: Int,
    pitch: Int,
):
    """Adds channels first, ..., end - 1 of one window. Pixels lie `pitch` apart.
    """
    for c in range(first, end):
        var pixel = _pixel(found[unsafe_offset=c], origin, deltas)
        if UInt(pixel) < UInt(plane):
            sums[unsafe_offset=pixel * pitch + c] += dy[unsafe_offset=c].cast[
                Acc
            ]()


@always_inline
def _add_window_vectors[
    dtype: DType, Acc: DType, argmax: DType, //
](
    sums: Ptr[Acc],
    dy: Ptr[dtype],
    found: Ptr[argmax],
    depth: Int,
    deltas: Ptr[DType.int],
    plane: Int,
    pitch: Int,
):
    """Does the work of _add_window, by index, for a plane of less than 2^31 elements: vectors find the places.
    """
    comptime V = lanes[dtype]
    var places = stack_allocation[V, Int32, alignment=64]()
    var c = 0
    while c + V <= depth:
        var pixels = found.unsafe_load[width=V, alignment=1](c)
        ask_ahead[V](found, c)
        ask_ahead[V](dy, c)
        var outside = pixels.lt(SIMD[argmax, V](0)) | pixels.ge(
            SIMD[argmax, V](Scalar[argmax](plane))
        )
        if outside.reduce_or():
            _add_window(sums, dy, found, c, c + V, 0, deltas, plane, pitch)
        else:
            places.unsafe_store[alignment=64](
                0,
                pixels.cast[DType.int32]() * SIMD[DType.int32, V](Int32(pitch))
                + iota[DType.int32, V](Int32(c)),
            )
            comptime for v in range(V):
                sums[unsafe_offset=Int(places[unsafe_offset=v])] += dy[
                    unsafe_offset=c + v
                ].cast[Acc]()
        c += V
    _add_window(sums, dy, found, c, depth, 0, deltas, plane, pitch)


@always_inline
def _add_planes[
    dtype: DType, Acc: DType, argmax: DType, //
](
    sums: Ptr[Acc],
    dy: Ptr[dtype],
    found: Ptr[argmax],
    count: Int,
    outputs: Int,
    origins: Ptr[DType.int],
    deltas: Ptr[DType.int],
    plane: Int,
):
    """Adds to `count` planes of one channel."""
    for n in range(count):
        var target = sums.unsafe_offset(n * plane)
        var dy_n = dy.unsafe_offset(n * outputs)
        var found_n = found.unsafe_offset(n * outputs)
        for first in range(0, outputs, PREFETCHED_ELEMENTS):
            ask_ahead[PREFETCHED_ELEMENTS](found_n, first)
            ask_ahead[PREFETCHED_ELEMENTS](dy_n, first)
            for o in range(first, min(first + PREFETCHED_ELEMENTS, outputs)):
                var origin = 0
                comptime if argmax == OFFSET:
                    origin = Int(origins[unsafe_offset=o])
                var pixel = _pixel(found_n[unsafe_offset=o], origin, deltas)
                if UInt(pixel) < UInt(plane):
                    target[unsafe_offset=pixel] += dy_n[unsafe_offset=o].cast[
                        Acc
                    ]()


@fieldwise_init
struct ClearedPixels(TrivialRegisterPassable):
    """How far the pixels of a block of channels in dx are cleared; they are cleared shortly before the first window
    that reaches them adds to them."""

    var end: Int
    var fewest: Int
    """Pixels that are cleared together, at least."""

    @always_inline
    def reach[
        dtype: DType, //, adaptive: Bool
    ](
        mut self,
        dx: Ptr[dtype],
        p: PoolingProblem,
        row: Int,
        depth: Int,
        pitch: Int,
    ):
        """Clears the pixels that row number `row` of a plane's windows reaches; its last row clears all remaining
        ones."""
        var plane = p.input_plane()
        var to = plane
        comptime if not adaptive:
            if row < Int(p.d.output) * Int(p.h.output) - 1:
                var od = row // Int(p.h.output)
                var td = p.d.taps[False](od)
                var th = p.h.taps[False](row - od * Int(p.h.output))
                var d = td.start + (td.count - 1) * td.step
                var h = th.start + (th.count - 1) * th.step
                to = min((d * Int(p.h.input) + h + 1) * Int(p.w.input), plane)
        if to <= self.end:
            return
        to = min(max(to, self.end + self.fewest), plane)
        if depth == pitch:
            clear_run(
                dx.unsafe_offset(self.end * pitch), (to - self.end) * pitch
            )
        else:
            for i in range(self.end, to):
                clear_run(dx.unsafe_offset(i * pitch), depth)
        self.end = to


@always_inline
def _scatter_planes_in_place[
    dtype: DType, argmax: DType, //
](
    t: PoolingTensors[dtype, argmax],
    p: PoolingProblem,
    origins: Ptr[DType.int],
    deltas: Ptr[DType.int],
    first: Int,
    end: Int,
):
    """Planes first, ..., end - 1 of one channel."""
    var plane = p.input_plane()
    var outputs = p.output_plane()
    if outputs == 1:
        for n in range(first, end):
            var origin = 0
            comptime if argmax == OFFSET:
                origin = Int(origins[])
            _place_one(
                t.result.unsafe_offset(n * plane),
                t.source[unsafe_offset=n],
                _pixel(t.argmaxes[unsafe_offset=n], origin, deltas),
                plane,
            )
        return
    # Small planes are cleared several at a time.
    var step = max(CLEARED_ELEMENTS // plane, 1)
    for n in range(first, end, step):
        var group = min(step, end - n)
        var sums = t.result.unsafe_offset(n * plane)
        clear_run(sums, plane * group)
        _add_planes(
            sums,
            t.source.unsafe_offset(n * outputs),
            t.argmaxes.unsafe_offset(n * outputs),
            group,
            outputs,
            origins,
            deltas,
            plane,
        )


@always_inline
def _scatter_channels[
    dtype: DType, Acc: DType, argmax: DType, //, adaptive: Bool
](
    sums: Ptr[Acc],
    dy: Ptr[dtype],
    found: Ptr[argmax],
    p: PoolingProblem,
    origins: Ptr[DType.int],
    deltas: Ptr[DType.int],
    depth: Int,
    pitch: Int,
):
    """Adds `depth` channels of one sample to sums, whose pixels lie `pitch` apart; dx itself is cleared on the way.
    """
    var plane = p.input_plane()
    var channels = Int(p.channels)
    var in_vectors = plane * channels < LIMIT_32
    var cleared = ClearedPixels(0, CLEARED_ELEMENTS // channels)
    var o = 0
    for row in range(Int(p.d.output) * Int(p.h.output)):
        comptime if dtype == Acc:
            cleared.reach[adaptive](sums, p, row, depth, pitch)
        for _ in range(Int(p.w.output)):
            var dy_pixel = dy.unsafe_offset(o * channels)
            var found_pixel = found.unsafe_offset(o * channels)
            var origin = 0
            comptime if argmax == OFFSET:
                origin = Int(origins[unsafe_offset=o])
            o += 1
            comptime if argmax == INDEX:
                if in_vectors:
                    _add_window_vectors(
                        sums, dy_pixel, found_pixel, depth, deltas, plane, pitch
                    )
                    continue
            ask_ahead[1](found_pixel, 0)
            ask_ahead[1](dy_pixel, 0)
            _add_window(
                sums,
                dy_pixel,
                found_pixel,
                0,
                depth,
                origin,
                deltas,
                plane,
                pitch,
            )


@no_inline
def _max_pool_dgrad_scatter[
    dtype: DType, argmax: DType, //, *, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    # Half-precision sums are kept in float32 and rounded once.
    comptime in_place = dtype == Acc
    var channels = Int(p.channels)
    var idle = min(
        ceildiv(worker_count(), Int(p.batch)),
        ceildiv(channels, MIN_BLOCK_CHANNELS),
    )
    # In place, whole pixels keep to the order of the memory, which its prefetching rewards.
    var cuts = 1 if in_place else channels // BLOCK_CHANNELS
    var most = ceildiv(channels, max(max(cuts, idle), 1))
    var blocks = ceildiv(channels, most)
    var plane = p.input_plane()
    var outputs = p.output_plane()
    var table = TapTable(p, by_offset=argmax == OFFSET)
    var deltas = pointer_to(table.deltas)
    var origins = pointer_to(table.origins)

    def share(first: Int, end: Int) {imm}:
        comptime if in_place:
            if channels == 1:
                _scatter_planes_in_place(t, p, origins, deltas, first, end)
                return
        var storage = List[Scalar[Acc]]()
        comptime if not in_place:
            storage.resize(plane * most + lanes[dtype], 0)
        for unit in range(first, end):
            var n = unit // blocks
            var c0 = (unit - n * blocks) * most
            var depth = min(most, channels - c0)
            var dx = t.result.unsafe_offset(n * plane * channels + c0)
            var start = n * outputs * channels + c0
            var dy = t.source.unsafe_offset(start)
            var found = t.argmaxes.unsafe_offset(start)
            comptime if in_place:
                _scatter_channels[adaptive](
                    dx, dy, found, p, origins, deltas, depth, channels
                )
                continue
            var sums = pointer_to(storage)
            clear_run(sums, plane * depth)
            if channels == 1:
                _add_planes(sums, dy, found, 1, outputs, origins, deltas, plane)
                round_run(dx, sums, plane)
                continue
            _scatter_channels[adaptive](
                sums, dy, found, p, origins, deltas, depth, depth
            )
            for i in range(plane):
                round_run(
                    dx.unsafe_offset(i * channels),
                    sums.unsafe_offset(i * depth),
                    depth,
                )
        _ = storage^

    var units = Int(p.batch) * blocks
    for_each_share(share, units, smallest_share(p.input_size(), units))
    _ = table^


@always_inline
def _place_one[
    dtype: DType, //
](dx: Ptr[dtype], value: Scalar[dtype], place: Int, plane: Int):
    """Writes a plane of zeros but for one pixel."""
    comptime V = lanes[dtype]
    for at in range(0, plane, V):
        var here = iota[DType.int64, V](Int64(at)).eq(
            SIMD[DType.int64, V](Int64(place))
        )
        store_part(
            dx,
            at,
            plane,
            here.select(SIMD[dtype, V](value), SIMD[dtype, V](0)),
        )


struct ScatterMaxDgrad(PoolingKernel):
    comptime NAME: StaticString = "scatter_max"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax != NO_ARGMAX

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        comptime if not adaptive and argmax == INDEX:
            if p.may_miss():
                # dx is cleared no further ahead than windows reach.
                return String("indices may name pixels beyond a window's reach")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _max_pool_dgrad_scatter[adaptive=adaptive](t, p)
