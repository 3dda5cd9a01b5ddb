"""Pointwise programs on a GPU: a thread computes one vector of neighbouring elements."""

from std.math import ceildiv

from max.gpu import block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils.index import IndexList

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


comptime MOST = 32
"""Pairs of a result and an input that one launch computes."""


struct Batch(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """Pairs of one result and one input of equal size: [result, input] addresses, sizes, and the block at which each
    pair begins."""

    comptime device_type: AnyType = Self

    var data: IndexList[2 * MOST]
    var sizes: IndexList[MOST]
    var starts: IndexList[MOST, element_type=DType.int32]

    def __init__(out self):
        self.data = {}
        self.sizes = {}
        self.starts = {}

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Batch"


def many_kernel[
    run: def[width: Int](Operands[2, 1], Place[1]) thin -> None, vector: Int
](batch: Batch):
    var block = Int32(block_idx.x)
    var operands = Operands[2, 1]()
    var size = 0
    var start = Int32(0)
    # Unrolled: a struct that is indexed while running would be copied to local memory.
    comptime for pair in range(MOST):
        if block >= Int32(batch.starts[pair]):
            operands.data[0] = batch.data[2 * pair]
            operands.data[1] = batch.data[2 * pair + 1]
            size = batch.sizes[pair]
            start = Int32(batch.starts[pair])
    var i = (Int(block - start) * BLOCK + Int(thread_idx.x)) * vector
    if (operands.data[0] | operands.data[1]) % 16 == 0 and i + vector <= size:
        run[vector](operands, operands.place(i))
    else:
        for at in range(i, min(i + vector, size)):
            run[1](operands, operands.place(at))


@no_inline
def many_gpu[
    run: def[width: Int](Operands[2, 1], Place[1]) thin -> None, vector: Int
](mut batch: Batch, count: Int, ctx: DeviceContext) raises:
    """Runs the first `count` pairs of `batch`, whose sizes are not 0."""
    var blocks = 0
    for pair in range(MOST):
        batch.starts[pair] = blocks if pair < count else Int(Int32.MAX)
        if pair < count:
            blocks += ceildiv(batch.sizes[pair], BLOCK * vector)
    ctx.enqueue_function[many_kernel[run, vector]](
        batch, grid_dim=blocks, block_dim=BLOCK
    )
