"""y [outer, count, inner] = x [outer, places, inner] at the places of index [count].

A place outside is reported (common/bounds.mojo), and raises on the CPU; the nearest element is read in its stead.
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import global_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import Divisor
from ..common.bounds import Bounds, current_bounds
from ..common.gpu import VECTOR_BYTES
from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..common.vectors import copy_row
from .extents import THREADS, Rows, check_places

# Below this many elements a second core costs more than it gives.
comptime SMALLEST_SHARE = 16384


@always_inline
def _nearest(place: Int64, places: Int64) -> Int:
    return Int(max(Int64(0), min(place, places - 1)))


@no_inline
def gather_cpu[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    rows: Rows,
    bounds: Bounds,
) raises:
    """Raises when all is written."""
    var total = rows.outer * rows.count
    var workers = max(
        1, min(min(worker_count(), total), total * rows.inner // SMALLEST_SHARE)
    )

    # For each worker 1 if it met a place outside.
    var outside = List[Int32](length=workers, fill=0)
    var met = outside.unsafe_ptr()

    @always_inline
    def task(worker: Int) {imm}:
        var all_inside = True
        var first = total * worker // workers
        # Short rows have no time for divisions.
        var o = first // rows.count
        var i = first % rows.count
        for row in range(first, total * (worker + 1) // workers):
            var given = index[unsafe_offset=i]
            var place = _nearest(given, Int64(rows.places))
            all_inside &= given == Int64(place)
            copy_row[dtype](
                y.unsafe_offset(row * rows.inner),
                x.unsafe_offset((o * rows.places + place) * rows.inner),
                rows.inner,
            )
            i += 1
            if i == rows.count:
                i = 0
                o += 1
        met.unsafe_offset(worker).unsafe_store(Int32(not all_inside))

    sync_parallelize(task, workers)
    if Int32(1) in outside:
        check_places(index, rows.count, rows.places, bounds)


@no_inline
def gather_elements_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], index: Ptr[DType.int64], rows: Rows) raises:
    """Gathers elements on a CPU. `index` has been checked."""
    var total = rows.outer * rows.count
    var workers = max(
        1, min(min(worker_count(), total), total * rows.inner // SMALLEST_SHARE)
    )

    @always_inline
    def task(worker: Int) {imm}:
        var first = total * worker // workers
        var last = total * (worker + 1) // workers
        if rows.inner == 1:
            var o = first // rows.count
            while first < last:
                var end = min(last, (o + 1) * rows.count)
                var from_ = x.unsafe_offset(o * rows.places)
                for at in range(first, end):
                    y[unsafe_offset=at] = from_[
                        unsafe_offset=Int(index[unsafe_offset=at])
                    ]
                first = end
                o += 1
            return
        for row in range(first, last):
            var from_ = x.unsafe_offset(
                row // rows.count * rows.places * rows.inner
            )
            for n in range(rows.inner):
                var at = row * rows.inner + n
                y[unsafe_offset=at] = from_[
                    unsafe_offset=Int(index[unsafe_offset=at]) * rows.inner + n
                ]

    sync_parallelize(task, workers)


@always_inline
def gather_element[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    size: Int64,
    places: Int64,
    count: Divisor,
    inner: Divisor,
    bounds: Bounds,
    at: Int,
):
    """Element `at` of y."""
    if at >= Int(size):
        return
    var row, n = inner.divide(Int32(at))
    var o = Int(count.quotient(row))
    var place = index[unsafe_offset=at]
    if not bounds.holds(place, places):
        place = Int64(_nearest(place, places))
    y[unsafe_offset=at] = x[
        unsafe_offset=(o * Int(places) + Int(place)) * Int(inner.value) + Int(n)
    ]


@__name(t"gather_elements_{dtype}")
def gather_elements_kernel[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    size: Int64,
    places: Int64,
    count: Divisor,
    inner: Divisor,
    bounds: Bounds,
):
    gather_element[dtype](
        y, x, index, size, places, count, inner, bounds, Int(global_idx.x)
    )


@no_inline
def gather_elements_gpu[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    var size = rows.outer * rows.count * rows.inner
    if size > Int(Int32.MAX):
        raise Error(t"gather: {size} elements: must be below 2^31")
    ctx.enqueue_function[gather_elements_kernel[dtype]](
        y,
        x,
        index,
        Int64(size),
        Int64(rows.places),
        Divisor(rows.count),
        Divisor(rows.inner),
        current_bounds(),
        grid_dim=ceildiv(size, THREADS),
        block_dim=THREADS,
    )


@always_inline
def gather_row_part[
    dtype: DType, width: Int
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    size: Int64,
    places: Int64,
    count: Divisor,
    inner: Divisor,
    bounds: Bounds,
    thread: Int,
):
    """A thread copies `width` neighbouring elements."""
    var i = thread * width
    if i >= Int(size):
        return
    var row, n = inner.divide(Int32(i))
    var o, k = count.divide(row)
    var place = index[unsafe_offset=Int(k)]
    if not bounds.holds(place, places):
        place = Int64(_nearest(place, places))
    var from_ = (Int(o) * Int(places) + Int(place)) * Int(inner.value) + Int(n)
    comptime alignment = width * size_of[dtype]()
    y.unsafe_offset(i).unsafe_store[alignment=alignment](
        x.unsafe_offset(from_).unsafe_load[width=width, alignment=alignment]()
    )


@__name(t"gather_rows_{dtype}_v{width}")
def gather_kernel[
    dtype: DType, width: Int
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    size: Int64,
    places: Int64,
    count: Divisor,
    inner: Divisor,
    bounds: Bounds,
):
    gather_row_part[dtype, width](
        y, x, index, size, places, count, inner, bounds, Int(global_idx.x)
    )


@no_inline
def gather_gpu[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    index: Ptr[DType.int64],
    rows: Rows,
    ctx: DeviceContext,
) raises:
    comptime vector = VECTOR_BYTES // size_of[dtype]()
    var size = rows.outer * rows.count * rows.inner
    if size > Int(Int32.MAX):
        raise Error(t"gather: {size} elements: must be below 2^31")
    if size == 0:
        return
    var count = Divisor(rows.count)
    var inner = Divisor(rows.inner)
    var bounds = current_bounds()
    if rows.inner % vector == 0 and (Int(y) | Int(x)) % VECTOR_BYTES == 0:
        ctx.enqueue_function[gather_kernel[dtype, vector]](
            y,
            x,
            index,
            Int64(size),
            Int64(rows.places),
            count,
            inner,
            bounds,
            grid_dim=ceildiv(size // vector, THREADS),
            block_dim=THREADS,
        )
    else:
        ctx.enqueue_function[gather_kernel[dtype, 1]](
            y,
            x,
            index,
            Int64(size),
            Int64(rows.places),
            count,
            inner,
            bounds,
            grid_dim=ceildiv(size, THREADS),
            block_dim=THREADS,
        )
