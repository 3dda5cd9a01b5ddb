"""Pointwise programs on the CPU: equal shares of the elements for each core, in vectors along the rows."""

from ..common.parallel import sync_parallelize, workers_for
from .program import ProgramOperands, RunPositions


@always_inline
def walk[
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    vector: Int,
](operands: ProgramOperands[count, dims], first: Int, last: Int):
    """Computes the elements [first, last)."""
    comptime inner = dims - 1
    var i = first
    while i < last:
        var place = operands.place(i)
        var stop = last
        comptime if dims > 1:
            stop = min(last, i + operands.extents[inner] - place.digits[inner])
        while i + vector <= stop:
            run[vector, 1](operands, place)
            i += vector
            place.index = i
            place.digits[inner] = place.digits[inner] + vector
        while i < stop:
            run[1, 1](operands, place)
            i += 1
            place.index = i
            place.digits[inner] = place.digits[inner] + 1


@no_inline
def pointwise_cpu[
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    vector: Int,
](operands: ProgramOperands[count, dims], size: Int):
    """Computes `size` elements of each result."""
    var workers = workers_for(size)
    if workers == 1:
        walk[count, dims, run, vector](operands, 0, size)
        return
    # Shares begin at a whole vector, so that no two cores write to one line of the cache.
    var vectors = size // vector

    @always_inline
    def task(worker: Int) {imm}:
        var first = vectors * worker // workers * vector
        var last = vectors * (worker + 1) // workers * vector
        if worker == workers - 1:
            last = size
        walk[count, dims, run, vector](operands, first, last)

    sync_parallelize(task, workers)
