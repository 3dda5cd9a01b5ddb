"""How the gradient of maxima on a CPU adds one window's, or one plane's, gradients where their entries point.

What a loop compares with is an argument: behind a pointer it would be read again after every store.
"""

from std.math import iota
from std.memory import stack_allocation

from .vectors import ask_ahead, lanes
from ..problem import Data


comptime TOGETHER = 16
"""Elements that are asked for together."""


@always_inline
def add_indexed[
    dtype: DType, Acc: DType, index: DType, //
](
    sums: Data[Acc],
    dy: Data[dtype],
    found: Data[index],
    first: Int,
    end: Int,
    plane: Int,
    pitch: Int,
    step: Int,
):
    """Adds dy's elements first, ..., end - 1 to the pixels of a plane that `found` names; others are ignored. Pixels lie
    `pitch` apart, and element c adds to the pixel's element c * step."""
    for c in range(first, end):
        var pixel = Int(found[unsafe_offset=c])
        if UInt(pixel) < UInt(plane):
            sums[unsafe_offset=pixel * pitch + c * step] += dy[
                unsafe_offset=c
            ].cast[Acc]()


@always_inline
def add_indexed_channels[
    dtype: DType, Acc: DType, index: DType, //
](
    sums: Data[Acc],
    dy: Data[dtype],
    found: Data[index],
    depth: Int,
    plane: Int,
    pitch: Int,
):
    """As add_indexed for all channels of a window of a plane of less than 2^31 elements: vectors find the places.
    """
    comptime V = lanes[dtype]
    var places = stack_allocation[V, Int32, alignment=64]()
    var c = 0
    while c + V <= depth:
        var pixels = found.unsafe_load[width=V, alignment=1](c)
        ask_ahead[V](found, c)
        ask_ahead[V](dy, c)
        var outside = pixels.lt(SIMD[index, V](0)) | pixels.ge(
            SIMD[index, V](Scalar[index](plane))
        )
        if outside.reduce_or():
            add_indexed(sums, dy, found, c, c + V, plane, pitch, 1)
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
    add_indexed(sums, dy, found, c, depth, plane, pitch, 1)


@always_inline
def add_planes_indexed[
    dtype: DType, Acc: DType, index: DType, //
](
    sums: Data[Acc],
    dy: Data[dtype],
    found: Data[index],
    count: Int,
    outputs: Int,
    plane: Int,
):
    """As add_indexed for `count` planes of one channel."""
    for n in range(count):
        var target = sums.unsafe_offset(n * plane)
        var dy_n = dy.unsafe_offset(n * outputs)
        var found_n = found.unsafe_offset(n * outputs)
        for first in range(0, outputs, TOGETHER):
            ask_ahead[TOGETHER](found_n, first)
            ask_ahead[TOGETHER](dy_n, first)
            add_indexed(
                target,
                dy_n,
                found_n,
                first,
                min(first + TOGETHER, outputs),
                plane,
                1,
                0,
            )


@always_inline
def _pixel[
    offset: DType, //
](
    tap: Scalar[offset], origin: Int, deltas: Data[DType.int], tap_count: Int
) -> Int:
    """The pixel of a window's tap; outside every plane where there is none."""
    comptime if offset != DType.uint8:
        if UInt(Int(tap)) >= UInt(tap_count):
            return -1
    return origin + Int(deltas[unsafe_offset=Int(tap)])


@always_inline
def add_by_offset[
    dtype: DType, Acc: DType, offset: DType, //
](
    sums: Data[Acc],
    dy: Data[dtype],
    found: Data[offset],
    depth: Int,
    origin: Int,
    deltas: Data[DType.int],
    tap_count: Int,
    plane: Int,
    pitch: Int,
):
    """Adds a window's channels. Its first tap is pixel `origin` of the plane, or would be; tap k lies deltas[k] after it.
    """
    for c in range(depth):
        var pixel = _pixel(found[unsafe_offset=c], origin, deltas, tap_count)
        if UInt(pixel) < UInt(plane):
            sums[unsafe_offset=pixel * pitch + c] += dy[unsafe_offset=c].cast[
                Acc
            ]()


@always_inline
def add_planes_by_offset[
    dtype: DType, Acc: DType, offset: DType, //
](
    sums: Data[Acc],
    dy: Data[dtype],
    found: Data[offset],
    count: Int,
    outputs: Int,
    origins: Data[DType.int],
    deltas: Data[DType.int],
    tap_count: Int,
    plane: Int,
):
    """Adds to `count` planes of one channel; `origins` are their windows' first taps.
    """
    for n in range(count):
        var target = sums.unsafe_offset(n * plane)
        var dy_n = dy.unsafe_offset(n * outputs)
        var found_n = found.unsafe_offset(n * outputs)
        for first in range(0, outputs, TOGETHER):
            ask_ahead[TOGETHER](found_n, first)
            ask_ahead[TOGETHER](dy_n, first)
            for o in range(first, min(first + TOGETHER, outputs)):
                var pixel = _pixel(
                    found_n[unsafe_offset=o],
                    Int(origins[unsafe_offset=o]),
                    deltas,
                    tap_count,
                )
                if UInt(pixel) < UInt(plane):
                    target[unsafe_offset=pixel] += dy_n[unsafe_offset=o].cast[
                        Acc
                    ]()
