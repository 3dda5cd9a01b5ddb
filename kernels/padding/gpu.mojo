"""The gradient of a border on a GPU: a thread gathers what shows its vector of channels, or its element."""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ..arithmetic import Divisor
from ..pooling.problem import Data, accumulator
from .problem import PaddingProblem

comptime BLOCK = 256
comptime GRID_LIMIT = 65535


def border_dgrad[
    dtype: DType, V: Int
](
    dx: Data[dtype],
    dy: Data[dtype],
    p: PaddingProblem,
    by_vectors: Divisor,
    by_height: Divisor,
    by_depth: Divisor,
    all_rows: Int32,
):
    """`by_vectors` divides by the vectors of a pixel."""
    comptime Acc = accumulator[dtype]
    comptime alignment = min(V * size_of[dtype](), 16)
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, vector = by_vectors.divide(item)
    if pixel >= p.w.extent:
        return
    var c = Int(vector) * V
    var w = p.w.shown(pixel)
    var row = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while row < all_rows:
        var slab, height = by_height.divide(row)
        var n, depth = by_depth.divide(slab)
        var d = p.d.shown(depth)
        var h = p.h.shown(height)
        var total = SIMD[Acc, V](0)
        for a in range(d.all()):
            for b in range(h.all()):
                if d.place(a) < 0 or h.place(b) < 0:
                    continue
                var from_ = dy.unsafe_offset(
                    p.padded_row(Int(n), d.place(a), h.place(b)) + c
                )
                for k in range(w.all()):
                    var place = w.place(k)
                    if place >= 0:
                        total += from_.unsafe_load[
                            width=V, alignment=alignment
                        ](Int(place) * Int(p.channels)).cast[Acc]()
        dx.unsafe_store[alignment=alignment](
            Int(row) * p.length() + Int(pixel) * Int(p.channels) + c,
            total.cast[dtype](),
        )
        row += Int32(grid_dim.y * block_dim.y)


def _launch[
    dtype: DType, V: Int
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PaddingProblem
) raises:
    var items = p.length() // V
    var block_x = min(BLOCK, items)
    var block_y = BLOCK // block_x
    ctx.enqueue_function[border_dgrad[dtype, V]](
        dx,
        dy,
        p,
        Divisor(Int(p.channels) // V),
        Divisor(Int(p.h.extent)),
        Divisor(Int(p.d.extent)),
        Int32(p.rows()),
        grid_dim=(
            ceildiv(items, block_x),
            min(ceildiv(p.rows(), block_y), GRID_LIMIT),
        ),
        block_dim=(block_x, block_y),
    )


def border_dgrad_gpu[
    dtype: DType
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PaddingProblem
) raises:
    comptime V = 16 // size_of[dtype]()
    comptime most = Int(Int32.MAX) - (1 << 20)
    if p.rows() > most or p.padded_length() > most:
        raise Error(
            t"border_dgrad: {p.rows()} rows of {p.padded_length()} elements:"
            t" must be below 2^31 each"
        )
    if Int(p.channels) % V == 0 and (Int(dx) | Int(dy)) % 16 == 0:
        _launch[dtype, V](ctx, dx, dy, p)
    else:
        _launch[dtype, 1](ctx, dx, dy, p)
