"""Gradient of max pooling on the CPU by scattering: each window adds where its entries point.

One plane (C = 1) or one block of channels at a time, always in the same order. An index outside the plane is ignored.
"""

from std.math import ceildiv, iota
from std.sys.info import num_logical_cores

from .scatter_windows import (
    add_by_offset,
    add_indexed,
    add_indexed_channels,
    add_planes_by_offset,
    add_planes_indexed,
)
from .vectors import (
    ask_ahead,
    clear_run,
    for_each_share,
    lanes,
    pointer_to,
    round_run,
    smallest_share,
    store_part,
)
from ..problem import Data, PoolingProblem, accumulator

comptime BLOCK = 64
"""Channels that are scattered together: more, and the lines that they touch outgrow the nearest cache."""
comptime LEAST = 16
"""Channels below which a block is not cut to keep another core busy: a line of the cache."""
comptime LIMIT_32 = 1 << 31
"""Places of a plane fit 32 bits below."""
comptime FAR_AWAY = -(1 << 60)
comptime CLEARED_TOGETHER = 4096
"""Elements that are cleared at once: few enough to stay in the nearest cache, enough to be cleared fast."""


def scatter_can_implement[
    *, adaptive: Bool, offsets: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why this kernel does not take the problem."""
    comptime if not adaptive and not offsets:
        if p.may_miss():
            # dx is cleared no further ahead than windows reach.
            return String("indices may name pixels beyond a window's reach")
    return None


@no_inline
def max_pool_dgrad_scatter[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](dx: Data[dtype], dy: Data[dtype], indices: Data[index], p: PoolingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    comptime in_place = dtype == Acc
    var channels = Int(p.channels)
    var idle = min(
        ceildiv(num_logical_cores(), Int(p.batch)), ceildiv(channels, LEAST)
    )
    # In place, whole pixels keep to the order of the memory, which its prefetching rewards.
    var cuts = channels // BLOCK
    comptime if in_place:
        cuts = 1
    var most = ceildiv(channels, max(max(cuts, idle), 1))
    var blocks = ceildiv(channels, most)
    var plane = p.input_plane()
    var outputs = p.output_plane()
    var height = Int(p.h.input)
    var width = Int(p.w.input)
    # How far each tap lies from its window's origin, and where the windows' origins lie; what no tap has lies outside
    # every plane.
    var taps = List[Scalar[DType.int]]()
    var origins = List[Scalar[DType.int]]()
    comptime if offsets:
        for kd in range(Int(p.d.window)):
            for kh in range(Int(p.h.window)):
                for kw in range(Int(p.w.window)):
                    taps.append(
                        (
                            kd * Int(p.d.dilation) * height
                            + kh * Int(p.h.dilation)
                        )
                        * width
                        + kw * Int(p.w.dilation)
                    )
        comptime if index == DType.uint8:
            while len(taps) < 256:
                taps.append(FAR_AWAY)
        origins.resize(outputs, 0)
        var origin = origins.unsafe_ptr()
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
    var tap_count = len(taps)
    var in_vectors = plane * channels < LIMIT_32

    var deltas = pointer_to(taps)
    var window_starts = pointer_to(origins)

    def share(first: Int, end: Int) {imm}:
        @always_inline
        def target(found: Scalar[index], o: Int) {imm} -> Int:
            """The pixel in the plane; outside it, as an unsigned number too, where there is none.
            """
            var pixel = Int(found)
            comptime if offsets:
                comptime if index != DType.uint8:
                    if UInt(pixel) >= UInt(tap_count):
                        return -1
                pixel = (
                    window_starts[unsafe_offset=o] + deltas[unsafe_offset=pixel]
                )
            return pixel

        var fewest_cleared = CLEARED_TOGETHER // channels
        var last_row = Int(p.d.output) * Int(p.h.output) - 1

        @always_inline
        def reached_by(row: Int) {imm} -> Int:
            """One past the last pixel of a plane that a row of windows reaches.
            """
            comptime if adaptive:
                return plane
            else:
                var od = row // Int(p.h.output)
                var oh = row - od * Int(p.h.output)
                var td = p.d.taps[False](od)
                var th = p.h.taps[False](oh)
                var d = td.start + (td.count - 1) * td.step
                var h = th.start + (th.count - 1) * th.step
                return min((d * height + h + 1) * width, plane)

        @always_inline
        def add_planes(sums: Data[Acc], first_plane: Int, count: Int) {imm}:
            """Adds to `count` planes that begin at `sums`; one channel."""
            var start = first_plane * outputs
            comptime if offsets:
                add_planes_by_offset(
                    sums,
                    dy.unsafe_offset(start),
                    indices.unsafe_offset(start),
                    count,
                    outputs,
                    window_starts,
                    deltas,
                    tap_count,
                    plane,
                )
            else:
                add_planes_indexed(
                    sums,
                    dy.unsafe_offset(start),
                    indices.unsafe_offset(start),
                    count,
                    outputs,
                    plane,
                )

        # Half-precision sums are kept in float32 and rounded once.
        var storage = List[Scalar[Acc]]()
        comptime if not in_place:
            storage.resize(plane * most + V, 0)
        comptime if in_place:
            if outputs == 1 and channels == 1:
                for n in range(first, end):
                    _place_one(
                        dx.unsafe_offset(n * plane),
                        dy[unsafe_offset=n],
                        target(indices[unsafe_offset=n], 0),
                        plane,
                    )
                return
            if channels == 1:
                # Small planes are cleared several at a time.
                var n = first
                while n < end:
                    var group = min(max(CLEARED_TOGETHER // plane, 1), end - n)
                    var sums = rebind[Data[Acc]](dx.unsafe_offset(n * plane))
                    clear_run(sums, plane * group)
                    add_planes(sums, n, group)
                    n += group
                return
        for unit in range(first, end):
            var n = unit // blocks
            var c0 = (unit - n * blocks) * most
            var depth = min(most, channels - c0)
            var dx_block = dx.unsafe_offset(n * plane * channels + c0)
            var sums: Data[Acc]
            var pitch: Int
            comptime if in_place:
                sums = rebind[Data[Acc]](dx_block)
                pitch = channels
            else:
                sums = pointer_to(storage)
                pitch = depth
                clear_run(sums, plane * depth)
            var start = n * outputs * channels + c0
            var dy_block = dy.unsafe_offset(start)
            var found = indices.unsafe_offset(start)
            if channels == 1:
                add_planes(sums, n, 1)
            else:
                var zeros_end = 0
                var o = 0
                for row in range(Int(p.d.output) * Int(p.h.output)):
                    comptime if in_place:
                        # Pixels are cleared shortly before the first window that reaches them adds.
                        var to = plane if row == last_row else reached_by(row)
                        if to > zeros_end:
                            to = min(max(to, zeros_end + fewest_cleared), plane)
                            if depth == channels:
                                clear_run(
                                    sums.unsafe_offset(zeros_end * pitch),
                                    (to - zeros_end) * pitch,
                                )
                            else:
                                for i in range(zeros_end, to):
                                    clear_run(
                                        sums.unsafe_offset(i * pitch), depth
                                    )
                            zeros_end = to
                    for ow in range(Int(p.w.output)):
                        var dy_pixel = dy_block.unsafe_offset(o * channels)
                        var found_pixel = found.unsafe_offset(o * channels)
                        comptime if offsets:
                            ask_ahead[1](found_pixel, 0)
                            ask_ahead[1](dy_pixel, 0)
                            add_by_offset(
                                sums,
                                dy_pixel,
                                found_pixel,
                                depth,
                                window_starts[unsafe_offset=o],
                                deltas,
                                tap_count,
                                plane,
                                pitch,
                            )
                        else:
                            if in_vectors:
                                add_indexed_channels(
                                    sums,
                                    dy_pixel,
                                    found_pixel,
                                    depth,
                                    plane,
                                    pitch,
                                )
                            else:
                                ask_ahead[1](found_pixel, 0)
                                ask_ahead[1](dy_pixel, 0)
                                add_indexed(
                                    sums,
                                    dy_pixel,
                                    found_pixel,
                                    0,
                                    depth,
                                    plane,
                                    pitch,
                                    1,
                                )
                        o += 1
            comptime if not in_place:
                if channels == 1:
                    round_run(dx_block, sums, plane)
                else:
                    for i in range(plane):
                        round_run(
                            dx_block.unsafe_offset(i * channels),
                            sums.unsafe_offset(i * depth),
                            depth,
                        )
        _ = storage^

    var units = Int(p.batch) * blocks
    for_each_share(share, units, smallest_share(p.input_size(), units))
    _ = taps^
    _ = origins^


@always_inline
def _place_one[
    dtype: DType, //
](dx: Data[dtype], value: Scalar[dtype], place: Int, plane: Int):
    """A plane of zeros but for one pixel."""
    comptime V = lanes[dtype]
    var at = 0
    while at < plane:
        var here = iota[DType.int64, V](Int64(at)).eq(
            SIMD[DType.int64, V](Int64(place))
        )
        store_part(
            dx,
            at,
            plane,
            here.select(SIMD[dtype, V](value), SIMD[dtype, V](0)),
        )
        at += V
