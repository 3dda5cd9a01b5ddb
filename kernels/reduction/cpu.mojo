"""Reduction programs on the CPU.

Sums are taken over short runs first and the runs' sums added up, so that errors grow slowly. Cores share the results,
or slices of the reduced extent where results are few; slices are put together in their order.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc

from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from ..pointwise.program import ProgramOperands
from .program import ReductionProgram
from .values import Extents, Values, combined, identity

# Vectors, or rows, that are added up before their sum is added to the others.
comptime CHUNK = 128
# Columns that are reduced at a time: their sums stay in the first cache.
comptime BLOCK_COLUMNS = 512


@always_inline
def row_values[
    P: ReductionProgram,
    vector: Int,
](operands: ProgramOperands[P.COUNT, P.DIMS], first: Int, last: Int) -> Values[
    P.ACC, 1, P.RESULTS
]:
    """The elements [first, last), which are neighbours."""
    comptime inner = P.DIMS - 1
    var total = Values[P.ACC, vector, P.RESULTS].start[P.KINDS]()
    var rest = Values[P.ACC, 1, P.RESULTS].start[P.KINDS]()
    var i = first
    while i < last:
        var pause = min(last, i + CHUNK * 2 * vector)
        # Two at a time hide an addition's latency.
        var even = Values[P.ACC, vector, P.RESULTS].start[P.KINDS]()
        var odd = Values[P.ACC, vector, P.RESULTS].start[P.KINDS]()
        var single = Values[P.ACC, 1, P.RESULTS].start[P.KINDS]()
        while i < pause:
            var place = operands.place(i)
            var stop = pause
            comptime if P.DIMS > 1:
                stop = min(
                    pause, i + operands.extents[inner] - place.digits[inner]
                )
            while i + 2 * vector <= stop:
                even.fold[P.KINDS](P.run[vector, 1](operands, place))
                place.index += vector
                place.digits[inner] = place.digits[inner] + vector
                odd.fold[P.KINDS](P.run[vector, 1](operands, place))
                place.index += vector
                place.digits[inner] = place.digits[inner] + vector
                i += 2 * vector
            while i < stop:
                single.fold[P.KINDS](P.run[1, 1](operands, place))
                i += 1
                place.index = i
                place.digits[inner] = place.digits[inner] + 1
        even.fold[P.KINDS](odd)
        total.fold[P.KINDS](even)
        rest.fold[P.KINDS](single)
    rest.fold[P.KINDS](total.across[P.KINDS]())
    return rest


@always_inline
def _fill[acc: DType, kinds: Int, results: Int](values: Ptr[acc], columns: Int):
    comptime for n in range(results):
        for k in range(columns):
            values[unsafe_offset=n * BLOCK_COLUMNS + k] = identity[
                kinds, n, acc, 1
            ]()


@always_inline
def _columns[
    P: ReductionProgram,
    vector: Int,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    start: Int,
    pitch: Int,
    columns: Int,
    first: Int,
    last: Int,
    total: Ptr[P.ACC],
    chunk: Ptr[P.ACC],
):
    """Reduces `columns` neighbouring columns from the element `start` on, over rows [first, last): result n lies in
    `total` from n * BLOCK on. `chunk` is scratch memory of the same extent."""
    comptime inner = P.DIMS - 1
    _fill[P.ACC, P.KINDS, P.RESULTS](total, columns)
    var row = first
    while row < last:
        var pause = min(last, row + CHUNK)
        _fill[P.ACC, P.KINDS, P.RESULTS](chunk, columns)
        while row < pause:
            var begin = start + row * pitch
            var i = begin
            while i < begin + columns:
                var place = operands.place(i)
                var stop = begin + columns
                comptime if P.DIMS > 1:
                    stop = min(
                        stop, i + operands.extents[inner] - place.digits[inner]
                    )
                while i + vector <= stop:
                    var values = P.run[vector, 1](operands, place)
                    comptime for n in range(P.RESULTS):
                        var at = chunk.unsafe_offset(
                            n * BLOCK_COLUMNS + i - begin
                        )
                        at.unsafe_store(
                            combined[P.KINDS, n, P.ACC, vector](
                                at.unsafe_load[width=vector](), values.data[n]
                            )
                        )
                    i += vector
                    place.index = i
                    place.digits[inner] = place.digits[inner] + vector
                while i < stop:
                    var values = P.run[1, 1](operands, place)
                    comptime for n in range(P.RESULTS):
                        var at = n * BLOCK_COLUMNS + i - begin
                        chunk[unsafe_offset=at] = combined[
                            P.KINDS, n, P.ACC, 1
                        ](chunk[unsafe_offset=at], values.data[n])
                    i += 1
                    place.index = i
                    place.digits[inner] = place.digits[inner] + 1
            row += 1
        comptime for n in range(P.RESULTS):
            for k in range(columns):
                var at = n * BLOCK_COLUMNS + k
                total[unsafe_offset=at] = combined[P.KINDS, n, P.ACC, 1](
                    total[unsafe_offset=at], chunk[unsafe_offset=at]
                )


@no_inline
def reduction_cpu[
    P: ReductionProgram,
    vector: Int,
    rows: Bool,
](operands: ProgramOperands[P.COUNT, P.DIMS], extents: Extents):
    """Reduces; with `rows` the reduced elements are contiguous, so that `inner` is 1.
    """
    var outputs = extents.outputs()
    var blocks = ceildiv(extents.inner, BLOCK_COLUMNS)
    var units = extents.outer * blocks
    var workers = workers_for(extents.size())
    var slices = 1
    if units < 4 * workers and units % workers != 0:
        slices = min(workers, extents.reduced)
    var tasks = units * slices
    workers = min(workers, tasks)
    # Slices' values as [slice, result, output], then each worker's own columns.
    var shared = slices * P.RESULTS * outputs if slices > 1 else 0
    var scratch = unsafe_alloc[Scalar[P.ACC]](
        max(1, shared + workers * 2 * P.RESULTS * BLOCK_COLUMNS), alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def keep[n: Int](slice: Int, output: Int, value: Scalar[P.ACC]) {imm}:
        if slices > 1:
            scratch[
                unsafe_offset=(slice * P.RESULTS + n) * outputs + output
            ] = value
        else:
            Ptr[P.RESULT](unsafe_from_address=operands.data[n])[
                unsafe_offset=output
            ] = value.cast[P.RESULT]()

    @always_inline
    def task(worker: Int) {imm}:
        var mine = scratch.unsafe_offset(
            shared + worker * 2 * P.RESULTS * BLOCK_COLUMNS
        )
        for number in range(
            tasks * worker // workers, tasks * (worker + 1) // workers
        ):
            var unit = number // slices
            var slice = number % slices
            var first = extents.reduced * slice // slices
            var last = extents.reduced * (slice + 1) // slices
            comptime if rows:
                var start = unit * extents.reduced
                var values = row_values[P, vector](
                    operands, start + first, start + last
                )
                comptime for n in range(P.RESULTS):
                    keep[n](slice, unit, values.data[n])
            else:
                var outer = unit // blocks
                var column = unit % blocks * BLOCK_COLUMNS
                var columns = min(BLOCK_COLUMNS, extents.inner - column)
                _columns[P, vector](
                    operands,
                    outer * extents.reduced * extents.inner + column,
                    extents.inner,
                    columns,
                    first,
                    last,
                    mine,
                    mine.unsafe_offset(P.RESULTS * BLOCK_COLUMNS),
                )
                comptime for n in range(P.RESULTS):
                    for k in range(columns):
                        keep[n](
                            slice,
                            outer * extents.inner + column + k,
                            mine[unsafe_offset=n * BLOCK_COLUMNS + k],
                        )

    sync_parallelize(task, workers)
    if slices > 1:
        comptime for n in range(P.RESULTS):
            for output in range(outputs):
                var value = identity[P.KINDS, n, P.ACC, 1]()
                for slice in range(slices):
                    value = combined[P.KINDS, n, P.ACC, 1](
                        value,
                        scratch[
                            unsafe_offset=(slice * P.RESULTS + n) * outputs
                            + output
                        ],
                    )
                Ptr[P.RESULT](unsafe_from_address=operands.data[n])[
                    unsafe_offset=output
                ] = value.cast[P.RESULT]()
    scratch.unsafe_free()
