"""Reduction programs on the CPU.

Sums are taken over short runs first and the runs' sums added up, so that errors grow slowly. Cores share the results,
or slices of the reduced extent where results are few; slices are put together in their order.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc

from ..common.parallel import sync_parallelize, worker_count
from ..common.pointer import Ptr
from ..pointwise.program import ProgramOperands, Places
from .values import Extents, Values, combined, identity

# Below this many elements a second core costs more than it gives.
comptime SMALLEST_SHARE = 16384
# Vectors, or rows, that are added up before their sum is added to the others.
comptime CHUNK = 128
# Columns that are reduced at a time: their sums stay in the first cache.
comptime BLOCK = 512


@always_inline
def row_values[
    acc: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], Places[dims, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
](operands: ProgramOperands[count, dims], first: Int, last: Int) -> Values[
    acc, 1, results
]:
    """The elements [first, last), which are neighbours."""
    comptime inner = dims - 1
    var total = Values[acc, vector, results].start[kinds]()
    var rest = Values[acc, 1, results].start[kinds]()
    var i = first
    while i < last:
        var pause = min(last, i + CHUNK * 2 * vector)
        # Two at a time hide an addition's latency.
        var even = Values[acc, vector, results].start[kinds]()
        var odd = Values[acc, vector, results].start[kinds]()
        var single = Values[acc, 1, results].start[kinds]()
        while i < pause:
            var place = operands.place(i)
            var stop = pause
            comptime if dims > 1:
                stop = min(
                    pause, i + operands.extents[inner] - place.digits[inner]
                )
            while i + 2 * vector <= stop:
                even.fold[kinds](run[vector, 1](operands, place))
                place.index += vector
                place.digits[inner] = place.digits[inner] + vector
                odd.fold[kinds](run[vector, 1](operands, place))
                place.index += vector
                place.digits[inner] = place.digits[inner] + vector
                i += 2 * vector
            while i < stop:
                single.fold[kinds](run[1, 1](operands, place))
                i += 1
                place.index = i
                place.digits[inner] = place.digits[inner] + 1
        even.fold[kinds](odd)
        total.fold[kinds](even)
        rest.fold[kinds](single)
    rest.fold[kinds](total.across[kinds]())
    return rest


@always_inline
def _fill[acc: DType, kinds: Int, results: Int](values: Ptr[acc], columns: Int):
    comptime for n in range(results):
        for k in range(columns):
            values[unsafe_offset=n * BLOCK + k] = identity[kinds, n, acc, 1]()


@always_inline
def _columns[
    acc: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], Places[dims, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
](
    operands: ProgramOperands[count, dims],
    start: Int,
    pitch: Int,
    columns: Int,
    first: Int,
    last: Int,
    total: Ptr[acc],
    chunk: Ptr[acc],
):
    """`columns` neighbouring columns from the element `start` on, over rows [first, last): result n lies in `total`
    from n * BLOCK on. `chunk` is scratch memory of the same extent."""
    comptime inner = dims - 1
    _fill[acc, kinds, results](total, columns)
    var row = first
    while row < last:
        var pause = min(last, row + CHUNK)
        _fill[acc, kinds, results](chunk, columns)
        while row < pause:
            var begin = start + row * pitch
            var i = begin
            while i < begin + columns:
                var place = operands.place(i)
                var stop = begin + columns
                comptime if dims > 1:
                    stop = min(
                        stop, i + operands.extents[inner] - place.digits[inner]
                    )
                while i + vector <= stop:
                    var values = run[vector, 1](operands, place)
                    comptime for n in range(results):
                        var at = chunk.unsafe_offset(n * BLOCK + i - begin)
                        at.unsafe_store(
                            combined[kinds, n, acc, vector](
                                at.unsafe_load[width=vector](), values.data[n]
                            )
                        )
                    i += vector
                    place.index = i
                    place.digits[inner] = place.digits[inner] + vector
                while i < stop:
                    var values = run[1, 1](operands, place)
                    comptime for n in range(results):
                        var at = n * BLOCK + i - begin
                        chunk[unsafe_offset=at] = combined[kinds, n, acc, 1](
                            chunk[unsafe_offset=at], values.data[n]
                        )
                    i += 1
                    place.index = i
                    place.digits[inner] = place.digits[inner] + 1
            row += 1
        comptime for n in range(results):
            for k in range(columns):
                var at = n * BLOCK + k
                total[unsafe_offset=at] = combined[kinds, n, acc, 1](
                    total[unsafe_offset=at], chunk[unsafe_offset=at]
                )


@no_inline
def reduction_cpu[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], Places[dims, parts]
    ) thin -> Values[acc, width, results],
    vector: Int,
    rows: Bool,
](operands: ProgramOperands[count, dims], extents: Extents):
    """Reduces; `rows` where what is reduced lies together, so that `inner` is 1.
    """
    var outputs = extents.outputs()
    var blocks = ceildiv(extents.inner, BLOCK)
    var units = extents.outer * blocks
    var workers = max(1, min(worker_count(), extents.size() // SMALLEST_SHARE))
    var slices = 1
    if units < 4 * workers and units % workers != 0:
        slices = min(workers, extents.reduced)
    var tasks = units * slices
    workers = min(workers, tasks)
    # Slices' values as [slice, result, output], then each worker's own columns.
    var shared = slices * results * outputs if slices > 1 else 0
    var scratch = unsafe_alloc[Scalar[acc]](
        max(1, shared + workers * 2 * results * BLOCK), alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def keep[n: Int](slice: Int, output: Int, value: Scalar[acc]) {imm}:
        if slices > 1:
            scratch[
                unsafe_offset=(slice * results + n) * outputs + output
            ] = value
        else:
            Ptr[result](unsafe_from_address=operands.data[n])[
                unsafe_offset=output
            ] = value.cast[result]()

    @always_inline
    def task(worker: Int) {imm}:
        var mine = scratch.unsafe_offset(shared + worker * 2 * results * BLOCK)
        for number in range(
            tasks * worker // workers, tasks * (worker + 1) // workers
        ):
            var unit = number // slices
            var slice = number % slices
            var first = extents.reduced * slice // slices
            var last = extents.reduced * (slice + 1) // slices
            comptime if rows:
                var start = unit * extents.reduced
                var values = row_values[
                    acc, kinds, results, count, dims, run, vector
                ](operands, start + first, start + last)
                comptime for n in range(results):
                    keep[n](slice, unit, values.data[n])
            else:
                var outer = unit // blocks
                var column = unit % blocks * BLOCK
                var columns = min(BLOCK, extents.inner - column)
                _columns[acc, kinds, results, count, dims, run, vector](
                    operands,
                    outer * extents.reduced * extents.inner + column,
                    extents.inner,
                    columns,
                    first,
                    last,
                    mine,
                    mine.unsafe_offset(results * BLOCK),
                )
                comptime for n in range(results):
                    for k in range(columns):
                        keep[n](
                            slice,
                            outer * extents.inner + column + k,
                            mine[unsafe_offset=n * BLOCK + k],
                        )

    sync_parallelize(task, workers)
    if slices > 1:
        comptime for n in range(results):
            for output in range(outputs):
                var value = identity[kinds, n, acc, 1]()
                for slice in range(slices):
                    value = combined[kinds, n, acc, 1](
                        value,
                        scratch[
                            unsafe_offset=(slice * results + n) * outputs
                            + output
                        ],
                    )
                Ptr[result](unsafe_from_address=operands.data[n])[
                    unsafe_offset=output
                ] = value.cast[result]()
    scratch.unsafe_free()
