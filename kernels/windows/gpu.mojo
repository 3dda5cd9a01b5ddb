"""Windows on a GPU: a thread has an element, or a vector of channels. It copies it, or adds up its elements in the
columns."""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import Divisor
from ..common.gpu import GRID_LIMIT, vector_alignment
from ..common.pointer import Ptr, accumulation_type
from .problem import WindowsProblem

comptime THREADS = 256


@fieldwise_init
struct ThreadGrid(TrivialRegisterPassable):
    """The layout of threads over the results: `items` along x, `rows` along y.
    """

    var items: Int
    var rows: Int


comptime WHOLE_SECTORS = 64
"""Windows of a plane."""
comptime LOADS_IN_FLIGHT = 4
"""Elements that a thread loads before it uses the first."""


@always_inline
def lay_out_thread[
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
    along: Int32,
    item: Int32,
    first_row: Int32,
    row_step: Int32,
):
    """Taps first: an item is a window of a row of windows; a row is (n, r, stretch of `along` taps, p), which `inner`,
    `middle` and `outer` divide by P, the stretches of a row of taps and R. Else an item is (q, r, s, vector), divided
    by the vectors of a pixel, S and R, and a row is (n, p)."""
    comptime alignment = vector_alignment[dtype, V]
    if item >= items:
        return
    var row = first_row
    while row < rows:
        comptime if taps_first:
            var tap, window = inner.divide(row)
            var above, stretch = middle.divide(tap)
            var n, r = outer.divide(above)
            var h = p.h.element(window, r)
            var s = stretch * along
            var left = min(along, p.w.taps - s)
            var w = p.w.element(item, s)
            var source = x.unsafe_offset(
                (Int(n) * Int(p.h.extent) + Int(h)) * Int(p.w.extent)
            )
            var has_row = p.h.is_inside(h)
            var to = p.at_taps_first(Int(n), r, s, window, item)
            var step = Int(p.h.windows) * Int(p.w.windows)

            @always_inline
            def take[together: Int]() {mut w, mut to, imm}:
                var values = Array[Scalar[dtype], together](fill=0)
                comptime for k in range(together):
                    if has_row and p.w.is_inside(w):
                        values[k] = source[unsafe_offset=Int(w)]
                    w += p.w.dilation
                comptime for k in range(together):
                    columns[unsafe_offset=to] = values[k]
                    to += step

            for _ in range(left // LOADS_IN_FLIGHT):
                take[LOADS_IN_FLIGHT]()
            for _ in range(left % LOADS_IN_FLIGHT):
                take[1]()
        else:
            var tap, vector = inner.divide(item)
            var above, s = middle.divide(tap)
            var q, r = outer.divide(above)
            var h = p.h.element(row % p.h.windows, r)
            var w = p.w.element(q, s)
            var value = SIMD[dtype, V](0)
            if p.h.is_inside(h) and p.w.is_inside(w):
                var n = row // p.h.windows
                var pixel = (Int(n) * Int(p.h.extent) + Int(h)) * Int(
                    p.w.extent
                ) + Int(w)
                value = x.unsafe_load[width=V, alignment=alignment](
                    pixel * Int(p.channels) + Int(vector) * V
                )
            columns.unsafe_store[alignment=alignment](
                (Int(row) * Int(items) + Int(item)) * V, value
            )
        row += row_step


@__name(t"windows_lay_out_{dtype}_v{V}_t{taps_first}")
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
    along: Int32,
):
    lay_out_thread[dtype, V, taps_first](
        columns,
        x,
        p,
        items,
        rows,
        inner,
        middle,
        outer,
        along,
        Int32(block_idx.x * block_dim.x + thread_idx.x),
        Int32(block_idx.y * block_dim.y + thread_idx.y),
        Int32(grid_dim.y * block_dim.y),
    )


@always_inline
def add_up_thread[
    dtype: DType, V: Int, taps_first: Bool
](
    x: Ptr[dtype],
    columns: Ptr[dtype],
    p: WindowsProblem,
    items: Int32,
    rows: Int32,
    by_vectors: Divisor,
    by_height: Divisor,
    item: Int32,
    first_row: Int32,
    row_step: Int32,
):
    """An item is a vector of a row of x; `by_vectors` divides by the vectors of a pixel.
    """
    comptime Acc = accumulation_type[dtype]
    comptime alignment = vector_alignment[dtype, V]
    if item >= items:
        return
    var w, vector = by_vectors.divide(item)
    var along = p.w.hits(w)
    # From one window or tap to the next.
    var by_window = Int(p.h.taps) * Int(p.w.taps) * Int(p.channels)
    var by_tap = Int(p.channels)
    comptime if taps_first:
        by_window = 1
        by_tap = Int(p.h.windows) * Int(p.w.windows)
    var step = Int(p.w.every()) * by_tap - Int(p.w.drop()) * by_window
    var row_of_hits = (
        Int(p.h.every()) * Int(p.w.taps) * by_tap
        - Int(p.h.drop()) * Int(p.w.windows) * by_window
    )
    var row = first_row
    while row < rows:
        var n, h = by_height.divide(row)
        var above = p.h.hits(h)
        var begin: Int
        comptime if taps_first:
            begin = p.at_taps_first(
                Int(n), above.tap, along.tap, above.window, along.window
            )
        else:
            begin = (
                p.at_windows_first(
                    Int(n), above.window, along.window, above.tap, along.tap
                )
                + Int(vector) * V
            )
        var total = SIMD[Acc, V](0)
        for _ in range(above.count):
            var at = begin

            @always_inline
            def take[together: Int]() {mut at, mut total, imm}:
                var values = Array[SIMD[dtype, V], together](
                    fill=SIMD[dtype, V](0)
                )
                comptime for k in range(together):
                    values[k] = columns.unsafe_load[
                        width=V, alignment=alignment
                    ](at)
                    at += step
                comptime for k in range(together):
                    total += values[k].cast[Acc]()

            for _ in range(along.count // LOADS_IN_FLIGHT):
                take[LOADS_IN_FLIGHT]()
            for _ in range(along.count % LOADS_IN_FLIGHT):
                take[1]()
            begin += row_of_hits
        x.unsafe_store[alignment=alignment](
            (Int(row) * Int(items) + Int(item)) * V, total.cast[dtype]()
        )
        row += row_step


@__name(t"windows_add_up_{dtype}_v{V}_t{taps_first}")
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
    add_up_thread[dtype, V, taps_first](
        x,
        columns,
        p,
        items,
        rows,
        by_vectors,
        by_height,
        Int32(block_idx.x * block_dim.x + thread_idx.x),
        Int32(block_idx.y * block_dim.y + thread_idx.y),
        Int32(grid_dim.y * block_dim.y),
    )


def _check(name: String, places: ThreadGrid) raises:
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
def _block(places: ThreadGrid) -> Tuple[Int, Int]:
    var x = min(THREADS, places.items)
    return x, THREADS // x


@fieldwise_init
struct LayOutPlan(TrivialRegisterPassable):
    """Arguments of lay_out_thread other than the tensors."""

    var places: ThreadGrid
    var inner: Divisor
    var middle: Divisor
    var along: Int32

    def __init__(out self, p: WindowsProblem, *, vector: Int, taps_first: Bool):
        var taps = Int(p.w.taps)
        if taps_first:
            # A thread takes a row of taps where neighbouring threads still write whole sectors of memory.
            var plane = Int(p.h.windows) * Int(p.w.windows)
            var along = taps if plane >= WHOLE_SECTORS else 1
            var stretches = ceildiv(taps, along)
            self.places = ThreadGrid(
                Int(p.w.windows),
                Int(p.batch) * Int(p.h.taps) * stretches * Int(p.h.windows),
            )
            self.inner = Divisor(Int(p.h.windows))
            self.middle = Divisor(stretches)
            self.along = Int32(along)
        else:
            var vectors = Int(p.channels) // vector
            self.places = ThreadGrid(
                Int(p.w.windows) * Int(p.h.taps) * taps * vectors,
                Int(p.batch) * Int(p.h.windows),
            )
            self.inner = Divisor(vectors)
            self.middle = Divisor(taps)
            self.along = 1


def _lay_out[
    dtype: DType, V: Int, taps_first: Bool
](
    ctx: DeviceContext,
    columns: Ptr[dtype],
    x: Ptr[dtype],
    p: WindowsProblem,
) raises:
    var plan = LayOutPlan(p, vector=V, taps_first=taps_first)
    _check("windows", plan.places)
    var block_x, block_y = _block(plan.places)
    ctx.enqueue_function[lay_out_windows[dtype, V, taps_first]](
        columns,
        x,
        p,
        Int32(plan.places.items),
        Int32(plan.places.rows),
        plan.inner,
        plan.middle,
        Divisor(Int(p.h.taps)),
        plan.along,
        grid_dim=(
            ceildiv(plan.places.items, block_x),
            min(ceildiv(plan.places.rows, block_y), GRID_LIMIT),
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
    var places = ThreadGrid(p.row_length() // V, Int(p.batch) * Int(p.h.extent))
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
    """Adds up columns: each element of x is the sum of its elements in the columns.
    """
    comptime V = 16 // size_of[dtype]()
    comptime if not taps_first:
        if Int(p.channels) % V == 0 and (Int(columns) | Int(x)) % 16 == 0:
            _add_up[dtype, V, taps_first](ctx, x, columns, p)
            return
    _add_up[dtype, 1, taps_first](ctx, x, columns, p)
