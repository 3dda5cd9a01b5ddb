"""Pointwise programs on a GPU: a thread computes one vector of neighbouring elements."""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceContext

from .program import Operands, Place

comptime BLOCK = 256


def pointwise_kernel[
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> None,
    width: Int,
](operands: Operands[count, dims], first: Int64, last: Int64):
    var i = Int(first) + global_idx.x * width
    if i < Int(last):
        run[width](operands, operands.place(i))


@no_inline
def pointwise_gpu[
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> None,
    vector: Int,
](
    operands: Operands[count, dims],
    size: Int,
    aligned: Bool,
    ctx: DeviceContext,
) raises:
    """Computes `size` elements of each result; by vectors where all memory is `aligned` for them.
    """
    var first = 0
    comptime if vector > 1:
        if aligned:
            first = size // vector * vector
            if first > 0:
                ctx.enqueue_function[
                    pointwise_kernel[count, dims, run, vector]
                ](
                    operands,
                    Int64(0),
                    Int64(first),
                    grid_dim=ceildiv(first // vector, BLOCK),
                    block_dim=BLOCK,
                )
    if first < size:
        ctx.enqueue_function[pointwise_kernel[count, dims, run, 1]](
            operands,
            Int64(first),
            Int64(size),
            grid_dim=ceildiv(size - first, BLOCK),
            block_dim=BLOCK,
        )
