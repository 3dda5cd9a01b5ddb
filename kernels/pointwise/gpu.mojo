"""Pointwise programs on a GPU: a thread computes some vectors of neighbouring elements, far from each other."""

from std.math import ceildiv
from std.reflection import get_function_name

from max.gpu import global_idx
from max.gpu.host import DeviceContext

from .program import ProgramOperands, RunPositions

comptime THREADS = 256


@__name(t"{get_function_name[run]()}")
def pointwise_kernel[
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    width: Int,
    parts: Int,
    outermost: Int,
](
    operands: ProgramOperands[count, dims],
    first: Int64,
    last: Int64,
    threads: Int64,
):
    """Runs a program. Each of `threads` has every `threads`-th vector of the elements [first, last), which are counted
    with digit `outermost` last.
    """
    var thread = global_idx.x
    if thread >= Int(threads):
        return
    var i = Int(first) + thread * width
    var places = RunPositions[dims, parts](operands.place[outermost](i))
    comptime for part in range(1, parts):
        i += Int(threads) * width
        var live = i < Int(last)
        places.put[part](
            operands.place[outermost](i) if live else places.data[0], live
        )
    run[width * parts, parts](operands, places)


def _threads[
    count: Int, dims: Int, width: Int, parts: Int
](operands: ProgramOperands[count, dims], vectors: Int) -> Int:
    """Returns how many threads share `vectors`: whole rows of them where rows are whole vectors, so that a thread's
    vectors have the last digit in common."""
    var threads = ceildiv(vectors, parts)
    comptime if parts > 1 and dims > 1:
        var row = Int(operands.extents[dims - 1])
        if row % width == 0:
            var whole = row // width
            threads = ceildiv(threads, whole) * whole
    return threads


@no_inline
def pointwise_gpu[
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    vector: Int,
    parts: Int,
    outermost: Int,
](
    operands: ProgramOperands[count, dims],
    size: Int,
    aligned: Bool,
    ctx: DeviceContext,
) raises:
    """Computes `size` elements of each result; by vectors where all memory is `aligned` for them. Where `outermost` is
    not 0, rows are whole vectors.
    """
    var first = 0
    comptime if vector > 1:
        if aligned:
            first = size // vector * vector
            if first > 0:
                var threads = _threads[count, dims, vector, parts](
                    operands, first // vector
                )
                ctx.enqueue_function[
                    pointwise_kernel[count, dims, run, vector, parts, outermost]
                ](
                    operands,
                    Int64(0),
                    Int64(first),
                    Int64(threads),
                    grid_dim=ceildiv(threads, THREADS),
                    block_dim=THREADS,
                )
    if first < size:
        ctx.enqueue_function[
            pointwise_kernel[count, dims, run, 1, 1, outermost]
        ](
            operands,
            Int64(first),
            Int64(size),
            Int64(size - first),
            grid_dim=ceildiv(size - first, THREADS),
            block_dim=THREADS,
        )
