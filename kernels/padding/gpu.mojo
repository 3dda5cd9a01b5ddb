"""Borders on a GPU: a thread copies a vector of channels, or an element; in the gradient it gathers the places that
show it."""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import Divisor
from ..common.gpu import GRID_LIMIT, vector_alignment
from ..common.pointer import Ptr, accumulation_type
from .problem import PaddingProblem

comptime THREADS = 256


@__name(t"border_dgrad_{dtype}_v{V}")
def border_dgrad[
    dtype: DType, V: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    p: PaddingProblem,
    by_vectors: Divisor,
    by_height: Divisor,
    by_depth: Divisor,
    all_rows: Int32,
):
    """Runs one thread for each vector. `by_vectors` divides by the vectors of a pixel.
    """
    comptime Acc = accumulation_type[dtype]
    comptime alignment = vector_alignment[dtype, V]
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, vector = by_vectors.divide(item)
    if pixel >= p.w.extent:
        return
    var c = Int(vector) * V
    var w = p.w.shown(pixel)
    var w_is_single = w.is_single()
    var row = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while row < all_rows:
        var slab, height = by_height.divide(row)
        var n, depth = by_depth.divide(slab)
        var d = p.d.shown(depth)
        var h = p.h.shown(height)
        var to = Int(row) * p.length() + Int(pixel) * Int(p.channels) + c
        var gradient: SIMD[dtype, V]
        if w_is_single and h.is_single() and d.is_single():
            var from_ = (
                p.padded_row(Int(n), d.first, h.first)
                + Int(w.first) * Int(p.channels)
                + c
            )
            gradient = source.unsafe_load[width=V, alignment=alignment](from_)
        else:
            var total = SIMD[Acc, V](0)
            for a in range(d.all()):
                for b in range(h.all()):
                    if d.place(a) < 0 or h.place(b) < 0:
                        continue
                    var from_ = source.unsafe_offset(
                        p.padded_row(Int(n), d.place(a), h.place(b)) + c
                    )
                    for k in range(w.all()):
                        var place = w.place(k)
                        if place >= 0:
                            total += from_.unsafe_load[
                                width=V, alignment=alignment
                            ](Int(place) * Int(p.channels)).cast[Acc]()
            gradient = total.cast[dtype]()
        result.unsafe_store[alignment=alignment](to, gradient)
        row += Int32(grid_dim.y * block_dim.y)


@__name(t"border_fprop_{dtype}_v{V}")
def border_fprop[
    dtype: DType, V: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    p: PaddingProblem,
    by_vectors: Divisor,
    by_height: Divisor,
    by_depth: Divisor,
    all_rows: Int32,
):
    """Runs one thread for each vector. `by_vectors` divides by the vectors of a pixel.
    """
    comptime alignment = vector_alignment[dtype, V]
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, vector = by_vectors.divide(item)
    if pixel >= p.w.padded:
        return
    var c = Int(vector) * V
    var from_ = Int(p.w.element(pixel)) * Int(p.channels) + c
    var row = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while row < all_rows:
        var slab, height = by_height.divide(row)
        var n, depth = by_depth.divide(slab)
        var from_row = (
            Int(n) * Int(p.d.extent) + Int(p.d.element(depth))
        ) * Int(p.h.extent) + Int(p.h.element(height))
        result.unsafe_store[alignment=alignment](
            Int(row) * p.padded_length() + Int(pixel) * Int(p.channels) + c,
            source.unsafe_load[width=V, alignment=alignment](
                from_row * p.length() + from_
            ),
        )
        row += Int32(grid_dim.y * block_dim.y)


def _launch[
    forward: Bool, dtype: DType, V: Int
](
    ctx: DeviceContext,
    result: Ptr[dtype],
    source: Ptr[dtype],
    p: PaddingProblem,
) raises:
    comptime kernel = border_fprop[dtype, V] if forward else border_dgrad[
        dtype, V
    ]
    var depth = Int(p.d.padded if forward else p.d.extent)
    var height = Int(p.h.padded if forward else p.h.extent)
    var rows = Int(p.batch) * depth * height
    var items = (p.padded_length() if forward else p.length()) // V
    var block_x = min(THREADS, items)
    var block_y = THREADS // block_x
    ctx.enqueue_function[kernel](
        result,
        source,
        p,
        Divisor(Int(p.channels) // V),
        Divisor(height),
        Divisor(depth),
        Int32(rows),
        grid_dim=(
            ceildiv(items, block_x),
            min(ceildiv(rows, block_y), GRID_LIMIT),
        ),
        block_dim=(block_x, block_y),
    )


def border_gpu[
    dtype: DType, //, *, forward: Bool
](
    ctx: DeviceContext,
    result: Ptr[dtype],
    source: Ptr[dtype],
    p: PaddingProblem,
) raises:
    """y of x, or dx of dy."""
    comptime V = 16 // size_of[dtype]()
    comptime most = Int(Int32.MAX) - (1 << 20)
    var rows = Int(p.batch) * max(
        Int(p.d.padded) * Int(p.h.padded), Int(p.d.extent) * Int(p.h.extent)
    )
    var length = max(p.padded_length(), p.length())
    if rows > most or length > most:
        raise Error(
            t"a border: {rows} rows of {length} elements: must be below 2^31"
            t" each"
        )
    if Int(p.channels) % V == 0 and (Int(result) | Int(source)) % 16 == 0:
        _launch[forward, dtype, V](ctx, result, source, p)
    else:
        _launch[forward, dtype, 1](ctx, result, source, p)
