"""Runs what the GPU's threads do in adaptive max pooling with large windows on a CPU, thread after thread.

An argument is "channels vectors lanes" and the extents of input and output; `vectors` says whether channels are taken two at
a time. Elements are small whole numbers, so that many are equal and sums are exact, and some are NaN.
"""

from std.memory.alloc import unsafe_alloc
from std.random import random_si64, seed
from std.sys import argv
from std.utils.index import IndexList
from std.utils.numerics import nan, neg_inf

from kernels.common.pointer import Ptr
from kernels.pooling.gpu.adaptive_max import (
    add_for_maximum,
    merged,
    shared_window,
)
from kernels.pooling.gpu.gather import Pooled
from kernels.pooling.gpu.params import PoolingParams
from kernels.pooling.problem import PoolingProblem, adaptive_problem

comptime E = DType.float32


def allocated[dtype: DType](count: Int) -> Ptr[dtype]:
    return rebind[Ptr[dtype]](unsafe_alloc[Scalar[dtype]](count))


def fill(x: Ptr[E], count: Int):
    for i in range(count):
        var value = Float32(random_si64(-6, 6))
        if random_si64(0, 40) == 0:
            value = nan[E]()
        if random_si64(0, 8) == 0:
            value = neg_inf[E]()
        x[unsafe_offset=i] = value


def pooled[
    V: Int
](
    x: Ptr[E],
    p: PoolingProblem,
    od: Int,
    oh: Int,
    ow: Int,
    c: Int,
    lanes: Int,
) -> Pooled[E, V]:
    """As the block does it: lanes meet in pairs, the upper half after the lower.
    """
    var params = PoolingParams(p, extent_d=p.d.output, vector=V)
    var all = List[Pooled[E, V]]()
    for lane in range(lanes):
        all.append(
            shared_window[V](
                x,
                params,
                params.d.taps[True](Int32(od)),
                params.h.taps[True](Int32(oh)),
                params.w.taps[True](Int32(ow)),
                Int32(c),
                Int32(lane),
                Int32(lanes),
            )
        )
    var half = lanes // 2
    while half > 0:
        for lane in range(half):
            all[lane] = merged(all[lane], all[lane + half])
        half //= 2
    return all[0]


def check_window[
    V: Int
](
    x: Ptr[E],
    p: PoolingProblem,
    od: Int,
    oh: Int,
    ow: Int,
    first: Int,
    lanes: Int,
    indices: Ptr[DType.int64],
) raises:
    """The window of V channels, against one tap after the other; writes its indices.
    """
    var found = pooled[V](x, p, od, oh, ow, first, lanes)
    var td = p.d.taps[True](od)
    var th = p.h.taps[True](oh)
    var tw = p.w.taps[True](ow)
    var channels = Int(p.channels)
    var window = (od * Int(p.h.output) + oh) * Int(p.w.output) + ow
    for v in range(V):
        var best = neg_inf[E]()
        var place = -1
        for d in range(td.start, td.start + td.count):
            for h in range(th.start, th.start + th.count):
                for w in range(tw.start, tw.start + tw.count):
                    var pixel = (d * Int(p.h.input) + h) * Int(p.w.input) + w
                    var value = x[unsafe_offset=pixel * channels + first + v]
                    if place < 0 or value > best or not value == value:
                        best = value
                        place = pixel
        if Int(found.argmax[v]) != place:
            raise Error(
                t"window {window}, channel {first + v}: pixel"
                t" {found.argmax[v]}, not {place}"
            )
        var value = found.value[v]
        if not value == best and (value == value or best == best):
            raise Error(t"window {window}: {value}, not {best}")
        indices[unsafe_offset=window * channels + first + v] = Int64(place)


def check_gradient(
    dy: Ptr[E], indices: Ptr[DType.int64], p: PoolingProblem
) raises:
    """Of one sample, against a scatter."""
    var channels = Int(p.channels)
    var params = PoolingParams(p, extent_d=p.d.output, vector=1)
    var count = p.input_plane() * channels
    var dx = allocated[E](count)
    var wanted = List[Float32](length=count, fill=0)
    for i in range(count):
        dx[unsafe_offset=i] = 0
    for od in range(Int(p.d.output)):
        for oh in range(Int(p.h.output)):
            for ow in range(Int(p.w.output)):
                for c in range(channels):
                    var window = (od * Int(p.h.output) + oh) * Int(
                        p.w.output
                    ) + ow
                    var at = window * channels + c
                    var pixel = Int(indices[unsafe_offset=at])
                    if pixel >= 0:
                        wanted[pixel * channels + c] += dy[unsafe_offset=at]
                    add_for_maximum(
                        dx,
                        dy,
                        indices,
                        params,
                        Int32(od),
                        Int32(oh),
                        Int32(ow),
                        Int32(c),
                    )
    for i in range(count):
        if dx[unsafe_offset=i] != wanted[i]:
            raise Error(
                t"gradient {i} is {dx[unsafe_offset=i]}, not {wanted[i]}"
            )


def check(n: List[Int]) raises:
    var channels = n[0]
    var x_shape = IndexList[5](1, n[3], n[4], n[5], channels)
    var y_shape = IndexList[5](1, n[6], n[7], n[8], channels)
    var p = adaptive_problem(x_shape, y_shape)
    var x = allocated[E](p.input_size())
    var dy = allocated[E](p.output_size())
    var indices = allocated[DType.int64](p.output_size())
    fill(x, p.input_size())
    for i in range(p.output_size()):
        dy[unsafe_offset=i] = Float32(random_si64(-4, 4))
    for od in range(n[6]):
        for oh in range(n[7]):
            for ow in range(n[8]):
                if n[1] == 1:
                    for c in range(0, channels, 2):
                        check_window[2](x, p, od, oh, ow, c, n[2], indices)
                else:
                    for c in range(channels):
                        check_window[1](x, p, od, oh, ow, c, n[2], indices)
    check_gradient(dy, indices, p)
    # Indices that name no pixel under their window, or none at all, add nothing.
    indices[unsafe_offset=0] = -1
    indices[unsafe_offset=p.output_size() - 1] = -(1 << 40)
    check_gradient(dy, indices, p)


def main() raises:
    seed(5)
    var arguments = argv()
    for i in range(1, len(arguments)):
        var numbers = List[Int]()
        for word in String(arguments[i]).split(" "):
            numbers.append(Int(word))
        check(numbers)
    print("right")
