"""Windows on a GPU: a thread has an element, or a vector of channels. It copies it; or it gathers what columns have for it.
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import Divisor
from ..common.pointer import Ptr, accumulation_type
from .problem import WindowsProblem

comptime BLOCK = 256
comptime GRID_LIMIT = 65535


@fieldwise_init
struct _Places(TrivialRegisterPassable):
    """How threads are laid over the results: by `items` along x, by rows along y.
    """

    var items: Int
    var rows: Int


def lay_out_windows[
    dtype: DType, V: Int, taps_first: Bool
](
    columns: Ptr[dtype],
    x: Ptr[dtype],
    p: WindowsProblem,
    items: Int32,
    rows: Int32,
    inner: Divisor,
    middle: Divisor,
    outer: Divisor,
):
    """Taps first: an item is a window of a row of windows; a row is (n, r, s, p), which `inner`, `middle` and `outer` divide
    by P, S and R. Else an item is (q, r, s, vector), divided by the vectors of a pixel, S and R, and a row is (n, p).
    """
    comptime alignment = min(V * size_of[dtype](), 16)
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    if item >= items:
        return
    var row = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while row < rows:
        var n: Int32
        var r: Int32
        var s: Int32
        var window: Int32
        var q: Int32
        var c = Int32(0)
        comptime if taps_first:
            var tap: Int32
            tap, window = inner.divide(row)
            var above: Int32
            above, s = middle.divide(tap)
            n, r = outer.divide(above)
            q = item
        else:
            var tap: Int32
            var vector: Int32
            tap, vector = inner.divide(item)
            var above: Int32
            above, s = middle.divide(tap)
            q, r = outer.divide(above)
            n, window = row // p.h.windows, row % p.h.windows
            c = vector * Int32(V)
        var h = p.h.element(window, r)
        var w = p.w.element(q, s)
        var value = SIMD[dtype, V](0)
        if p.h.is_inside(h) and p.w.is_inside(w):
            var pixel = (Int(n) * Int(p.h.extent) + Int(h)) * Int(
                p.w.extent
            ) + Int(w)
            value = x.unsafe_load[width=V, alignment=alignment](
                pixel * Int(p.channels) + Int(c)
            )
        columns.unsafe_store[alignment=alignment](
            Int(row) * Int(items) * V + Int(item) * V, value
        )
        row += Int32(grid_dim.y * block_dim.y)


def add_up_windows[
    dtype: DType, V: Int, taps_first: Bool
](
    x: Ptr[dtype],
    columns: Ptr[dtype],
    p: WindowsProblem,
    items: Int32,
    rows: Int32,
    by_vectors: Divisor,
    by_height: Divisor,
):
    """An item is a vector of a row of x; `by_vectors` divides by the vectors of a pixel.
    """
    comptime Acc = accumulation_type[dtype]
    comptime alignment = min(V * size_of[dtype](), 16)
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    if item >= items:
        return
    var w, vector = by_vectors.divide(item)
    var c = Int(vector) * V
    var row = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while row < rows:
        var n, h = by_height.divide(row)
        var total = SIMD[Acc, V](0)
        for r in range(p.h.taps):
            var window = p.h.window_over(h, r)
            if window < 0:
                continue
            for s in range(p.w.taps):
                var q = p.w.window_over(w, s)
                if q < 0:
                    continue
                var at: Int
                comptime if taps_first:
                    at = p.at_taps_first(Int(n), r, s, window, q)
                else:
                    at = p.at_windows_first(Int(n), window, q, r, s) + c
                total += columns.unsafe_load[width=V, alignment=alignment](
                    at
                ).cast[Acc]()
        x.unsafe_store[alignment=alignment](
            Int(row) * Int(items) * V + Int(item) * V, total.cast[dtype]()
        )
        row += Int32(grid_dim.y * block_dim.y)


def _check(name: String, places: _Places) raises:
    comptime most = Int(Int32.MAX) - (1 << 20)
    if places.items > most or places.rows > most:
        raise Error(
            name,
            ": ",
            places.rows,
            " rows of ",
            places.items,
            " elements: must be below 2^31 each",
        )


@always_inline
def _block(places: _Places) -> Tuple[Int, Int]:
    var x = min(BLOCK, places.items)
    return x, BLOCK // x


def _lay_out[
    dtype: DType, V: Int, taps_first: Bool
](
    ctx: DeviceContext,
    columns: Ptr[dtype],
    x: Ptr[dtype],
    p: WindowsProblem,
) raises:
    var taps = Int(p.h.taps) * Int(p.w.taps)
    var vectors = Int(p.channels) // V
    var places = _Places(
        Int(p.w.windows), Int(p.batch) * taps * Int(p.h.windows)
    )
    var inner = Divisor(Int(p.h.windows))
    comptime if not taps_first:
        places = _Places(
            Int(p.w.windows) * taps * vectors, Int(p.batch) * Int(p.h.windows)
        )
        inner = Divisor(vectors)
    _check("windows", places)
    var block_x, block_y = _block(places)
    ctx.enqueue_function[lay_out_windows[dtype, V, taps_first]](
        columns,
        x,
        p,
        Int32(places.items),
        Int32(places.rows),
        inner,
        Divisor(Int(p.w.taps)),
        Divisor(Int(p.h.taps)),
        grid_dim=(
            ceildiv(places.items, block_x),
            min(ceildiv(places.rows, block_y), GRID_LIMIT),
        ),
        block_dim=(block_x, block_y),
    )


def _add_up[
    dtype: DType, V: Int, taps_first: Bool
](
    ctx: DeviceContext,
    x: Ptr[dtype],
    columns: Ptr[dtype],
    p: WindowsProblem,
) raises:
    var places = _Places(p.row_length() // V, Int(p.batch) * Int(p.h.extent))
    _check("windows", places)
    var block_x, block_y = _block(places)
    ctx.enqueue_function[add_up_windows[dtype, V, taps_first]](
        x,
        columns,
        p,
        Int32(places.items),
        Int32(places.rows),
        Divisor(Int(p.channels) // V),
        Divisor(Int(p.h.extent)),
        grid_dim=(
            ceildiv(places.items, block_x),
            min(ceildiv(places.rows, block_y), GRID_LIMIT),
        ),
        block_dim=(block_x, block_y),
    )


def lay_out_gpu[
    dtype: DType, //, *, taps_first: Bool
](
    ctx: DeviceContext,
    columns: Ptr[dtype],
    x: Ptr[dtype],
    p: WindowsProblem,
) raises:
    """Columns of x."""
    comptime V = 16 // size_of[dtype]()
    comptime if not taps_first:
        if Int(p.channels) % V == 0 and (Int(columns) | Int(x)) % 16 == 0:
            _lay_out[dtype, V, taps_first](ctx, columns, x, p)
            return
    _lay_out[dtype, 1, taps_first](ctx, columns, x, p)


def add_up_gpu[
    dtype: DType, //, *, taps_first: Bool
](
    ctx: DeviceContext,
    x: Ptr[dtype],
    columns: Ptr[dtype],
    p: WindowsProblem,
) raises:
    """Each element of x is the sum of what columns have for it."""
    comptime V = 16 // size_of[dtype]()
    comptime if not taps_first:
        if Int(p.channels) % V == 0 and (Int(columns) | Int(x)) % 16 == 0:
            _add_up[dtype, V, taps_first](ctx, x, columns, p)
            return
    _add_up[dtype, 1, taps_first](ctx, x, columns, p)
