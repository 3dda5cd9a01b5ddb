"""y [outer, count, inner] = x [outer, places, inner] at the places of index [count].

A negative place counts from the end. What is still outside raises on the CPU, and reads the nearest element on a GPU.
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import global_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import Divisor
from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..common.vectors import copy_row
from .extents import Rows
from .rows import BLOCK

# Below this many elements a second core costs more than it gives.
comptime SMALLEST_SHARE = 16384
comptime MOST_BYTES = 16


@always_inline
def _inside(place: Int64, places: Int) -> Int:
    var at = Int(place)
    if at < 0:
        at += places
    return max(0, min(at, places - 1))


@no_inline
def gather_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], index: Ptr[DType.int64], rows: Rows) raises:
    """Raises when all is written: the nearest element stands for a place outside.
    """
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
            var place = _inside(given, rows.places)
            all_inside &= given >= Int64(-rows.places)
            all_inside &= given < Int64(rows.places)
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
        for i in range(rows.count):
            var place = Int(index[unsafe_offset=i])
            if place < -rows.places or place >= rows.places:
                raise Error(
                    t"index out of range: {place} in a dimension of"
                    t" {rows.places}"
                )


@no_inline
def gather_elements_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], index: Ptr[DType.int64], rows: Rows) raises:
    """`index` has been checked."""
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
):
    """The nearest element stands for a place outside."""
    var at = Int(global_idx.x)
    if at >= Int(size):
        return
    var row, n = inner.divide(Int32(at))
    var o = Int(count.quotient(row))
    var place = max(Int64(0), min(index[unsafe_offset=at], places - 1))
    y[unsafe_offset=at] = x[
        unsafe_offset=(o * Int(places) + Int(place)) * Int(inner.value) + Int(n)
    ]


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
        grid_dim=ceildiv(size, BLOCK),
        block_dim=BLOCK,
    )


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
):
    """A thread copies `width` neighbouring elements."""
    var i = global_idx.x * width
    if i >= Int(size):
        return
    var row, n = inner.divide(Int32(i))
    var o, k = count.divide(row)
    var place = _inside(index[unsafe_offset=Int(k)], Int(places))
    var from_ = (Int(o) * Int(places) + place) * Int(inner.value) + Int(n)
    comptime alignment = width * size_of[dtype]()
    y.unsafe_offset(i).unsafe_store[alignment=alignment](
        x.unsafe_offset(from_).unsafe_load[width=width, alignment=alignment]()
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
    comptime vector = MOST_BYTES // size_of[dtype]()
    var size = rows.outer * rows.count * rows.inner
    if size > Int(Int32.MAX):
        raise Error(t"gather: {size} elements: must be below 2^31")
    if size == 0:
        return
    var count = Divisor(rows.count)
    var inner = Divisor(rows.inner)
    if rows.inner % vector == 0 and (Int(y) | Int(x)) % MOST_BYTES == 0:
        ctx.enqueue_function[gather_kernel[dtype, vector]](
            y,
            x,
            index,
            Int64(size),
            Int64(rows.places),
            count,
            inner,
            grid_dim=ceildiv(size // vector, BLOCK),
            block_dim=BLOCK,
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
            grid_dim=ceildiv(size, BLOCK),
            block_dim=BLOCK,
        )
