"""One reduction program over many tensors, each of a size of its own and reduced as a whole, in a fixed order.

A tensor's values are put together piece by piece, then its pieces' values in their order. Results do not depend on the
number of cores or blocks.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..common.library import scratch
from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from ..pointwise.many import (
    TensorBatch,
    TensorTable,
    filled,
    block_tensor,
    is_aligned,
    tensors_at_once,
)
from ..pointwise.program import ProgramOperands
from .cpu import row_values
from .gpu import THREADS, block_reduce
from .program import ReductionProgram
from .values import Values, combined, identity

# Elements of a piece on a CPU.
comptime PIECE_ELEMENTS = 1 << 16
# Shares of each core: small tensors make some of them shorter.
comptime TASKS_PER_CORE = 8
# Vectors of a thread on a GPU.
comptime VECTORS_PER_THREAD = 16


@no_inline
def reduction_many_cpu[
    P: ReductionProgram,
    vector: Int,
](table: TensorTable[P.COUNT]):
    var pieces = 0
    var total = 0
    for tensor in range(table.tensors):
        pieces += ceildiv(table.size(tensor), PIECE_ELEMENTS)
        total += table.size(tensor)
    var workers = workers_for(total)
    var tasks = 1 if workers == 1 else min(pieces, workers * TASKS_PER_CORE)
    # As [result, piece].
    var partials = unsafe_alloc[Scalar[P.ACC]](
        P.RESULTS * pieces, alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def task(number: Int) {imm}:
        var first = pieces * number // tasks
        var last = pieces * (number + 1) // tasks
        var before = 0
        for tensor in range(table.tensors):
            var size = table.size(tensor)
            var own = ceildiv(size, PIECE_ELEMENTS)
            for piece in range(max(first, before), min(last, before + own)):
                var begin = (piece - before) * PIECE_ELEMENTS
                var values = row_values[P, vector](
                    rebind[ProgramOperands[P.COUNT, P.DIMS]](
                        table.operands(tensor)
                    ),
                    begin,
                    min(begin + PIECE_ELEMENTS, size),
                )
                comptime for n in range(P.RESULTS):
                    partials[unsafe_offset=n * pieces + piece] = values.data[n]
            before += own

    sync_parallelize(task, tasks)
    var piece = 0
    for tensor in range(table.tensors):
        var last = piece + ceildiv(table.size(tensor), PIECE_ELEMENTS)
        comptime for n in range(P.RESULTS):
            var value = identity[P.KINDS, n, P.ACC, 1]()
            for each in range(piece, last):
                value = combined[P.KINDS, n, P.ACC, 1](
                    value, partials[unsafe_offset=n * pieces + each]
                )
            Ptr[P.RESULT](
                unsafe_from_address=table.address(tensor, n)
            )[] = value.cast[P.RESULT]()
        piece = last
    partials.unsafe_free()


@__name(t"reduce_many_{P.NAME}")
def reduce_pieces_kernel[
    P: ReductionProgram,
    most: Int,
    vector: Int,
    ordered: Int,
](batch: TensorBatch[P.COUNT, most], partials: Ptr[P.ACC], blocks: Int64):
    """A block has a piece of one tensor; its values lie as [result, block]."""
    var mine = block_tensor(batch)
    var operands = rebind[ProgramOperands[P.COUNT, P.DIMS]](mine.operands)
    var values = Values[P.ACC, vector, P.RESULTS].start[P.KINDS]()
    var rest = Values[P.ACC, 1, P.RESULTS].start[P.KINDS]()
    var aligned = is_aligned[P.COUNT, ordered](mine.operands)
    var first = mine.block * THREADS * VECTORS_PER_THREAD + Int(thread_idx.x)
    for round in range(VECTORS_PER_THREAD):
        var i = (first + round * THREADS) * vector
        if aligned and i + vector <= mine.size:
            values.fold[P.KINDS](P.run[vector, 1](operands, operands.place(i)))
        else:
            for at in range(i, min(i + vector, mine.size)):
                rest.fold[P.KINDS](P.run[1, 1](operands, operands.place(at)))
    rest.fold[P.KINDS](values.across[P.KINDS]())
    comptime for n in range(P.RESULTS):
        var value = block_reduce[P.ACC, P.KINDS, n, 1](rest.data[n], 1, THREADS)
        if thread_idx.x == 0:
            partials[unsafe_offset=n * Int(blocks) + Int(block_idx.x)] = value[
                0
            ]


@__name(
    t"reduce_merge_pieces_{acc}_{result}_k{kinds}_r{results}_{count}_{most}_{elements}"
)
def merge_pieces_kernel[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    most: Int,
    elements: Int,
](batch: TensorBatch[count, most], partials: Ptr[acc], blocks: Int64):
    """Merges the values of one tensor's pieces of `elements` elements; a block has a tensor.
    """
    var address = ProgramOperands[count, 1]()
    var pieces = 0
    var first = 0
    comptime for tensor in range(most):
        if Int(block_idx.x) == tensor:
            comptime for n in range(results):
                address.data[n] = batch.data[tensor * count + n]
            pieces = ceildiv(batch.sizes[tensor], elements)
            first = batch.starts[tensor]
    comptime for n in range(results):
        var value = identity[kinds, n, acc, 1]()
        for piece in range(Int(thread_idx.x), pieces, THREADS):
            value = combined[kinds, n, acc, 1](
                value, partials[unsafe_offset=n * Int(blocks) + first + piece]
            )
        value = block_reduce[acc, kinds, n, 1](value, 1, THREADS)
        if thread_idx.x == 0:
            Ptr[result](unsafe_from_address=address.data[n])[] = value[0].cast[
                result
            ]()


@no_inline
def reduction_many_gpu[
    P: ReductionProgram,
    vector: Int,
    ordered: Int,
](table: TensorTable[P.COUNT], ctx: DeviceContext) raises:
    """Two launches for as many tensors as a kernel's arguments hold; none is empty.
    """
    comptime most = tensors_at_once(P.COUNT)
    comptime elements = THREADS * VECTORS_PER_THREAD * vector
    for first in range(0, table.tensors, most):
        var batch = TensorBatch[P.COUNT, most]()
        var blocks = filled(batch, table, first, elements)
        var buffer = scratch[P.ACC](ctx, P.RESULTS * blocks)
        var partials = Ptr[P.ACC](unsafe_from_address=Int(buffer.unsafe_ptr()))
        ctx.enqueue_function[reduce_pieces_kernel[P, most, vector, ordered]](
            batch, partials, Int64(blocks), grid_dim=blocks, block_dim=THREADS
        )
        ctx.enqueue_function[
            merge_pieces_kernel[
                P.ACC, P.RESULT, P.KINDS, P.RESULTS, P.COUNT, most, elements
            ]
        ](
            batch,
            partials,
            Int64(blocks),
            grid_dim=min(most, table.tensors - first),
            block_dim=THREADS,
        )
        _ = buffer^
