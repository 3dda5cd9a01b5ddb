"""One pointwise program over many tensors, each of a size of its own.

A tensor's operands are read in order, as its results are written, or are one number for all of it. The work of a core
or a block is a number of elements, not of tensors: a network has many small tensors and a few large ones.
"""

from std.reflection import get_function_name
from std.math import ceildiv
from std.utils.index import IndexList

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..common.argument import KernelArgument
from ..common.gpu import VECTOR_BYTES
from ..common.library import Arguments
from ..common.parallel import sync_parallelize, workers_for
from .cpu import walk
from .program import ProgramOperands, RunPositions

comptime THREADS = 256
# Vectors that a thread computes: finding its block's tensor costs as much as some of them.
comptime VECTORS_PER_THREAD = 4
# A kernel's arguments are 4096 bytes at most.
comptime ARGUMENT_BYTES = 3584
comptime MAX_TENSORS = 48


struct TensorTable[count: Int](ImplicitlyCopyable, TrivialRegisterPassable):
    """For each tensor its size and the addresses of its operands, results first.
    Behind them come the bits of the expression's numbers, which are operands, too.
    """

    var _words: MutPointer[Int, MutUntrackedOrigin]
    var tensors: Int

    def __init__(out self, words: Int, tensors: Int):
        """Makes a table of `tensors` tensors; `words` is the address that `words_of_tensors` took.
        """
        self.tensors = tensors
        self._words = MutPointer[Int, MutUntrackedOrigin](
            unsafe_from_address=words
        )

    @always_inline
    def size(self, tensor: Int) -> Int:
        return self._words[unsafe_offset=tensor * (Self.count + 1)]

    @always_inline
    def address(self, tensor: Int, operand: Int) -> Int:
        return self._words[
            unsafe_offset=tensor * (Self.count + 1) + 1 + operand
        ]

    @always_inline
    def operands(self, tensor: Int) -> ProgramOperands[Self.count, 1]:
        var operands = ProgramOperands[Self.count, 1]()
        comptime for n in range(Self.count):
            operands.data[n] = self.address(tensor, n)
        return operands


def words_of_tensors[
    count: Int
](mut arguments: Arguments, tensors: Int) -> List[Int]:
    """The words of a table of tensors with `count` operands."""
    var length = tensors * (count + 1)
    var words = List[Int](capacity=length)
    for _ in range(length):
        words.append(arguments.take_word())
    return words^


@no_inline
def many_cpu[
    count: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, 1], RunPositions[1, parts]
    ) thin -> None,
    vector: Int,
](table: TensorTable[count]):
    """Equal shares of all tensors' vectors for each core."""
    var vectors = 0
    for tensor in range(table.tensors):
        vectors += ceildiv(table.size(tensor), vector)
    var workers = workers_for(vectors * vector)

    @always_inline
    def task(worker: Int) {imm}:
        var first = vectors * worker // workers
        var last = vectors * (worker + 1) // workers
        var before = 0
        for tensor in range(table.tensors):
            var size = table.size(tensor)
            var own = ceildiv(size, vector)
            var low = max(first - before, 0)
            var high = min(last - before, own)
            if low < high:
                walk[count, 1, run, vector](
                    table.operands(tensor),
                    low * vector,
                    min(high * vector, size),
                )
            before += own

    sync_parallelize(task, workers)


struct TensorBatch[count: Int, most: Int](KernelArgument):
    """A part of a table: addresses, sizes, and the block at which each tensor begins.
    """

    var data: IndexList[Self.most * Self.count]
    var sizes: IndexList[Self.most]
    var starts: IndexList[Self.most, element_type=DType.int32]

    def __init__(out self):
        self.data = {}
        self.sizes = {}
        self.starts = IndexList[Self.most, element_type=DType.int32](
            Int(Int32.MAX)
        )


@always_inline
def tensors_at_once(count: Int) -> Int:
    """Returns how many tensors of `count` operands a kernel's arguments hold.
    """
    return min(MAX_TENSORS, ARGUMENT_BYTES // (8 * count + 12))


@fieldwise_init
struct BlockTensor[count: Int](ImplicitlyCopyable, TrivialRegisterPassable):
    """A block's tensor, and the number of the block among the tensor's."""

    var operands: ProgramOperands[Self.count, 1]
    var size: Int
    var block: Int


@always_inline
def block_tensor[
    count: Int, most: Int
](batch: TensorBatch[count, most]) -> BlockTensor[count]:
    """The tensor and the elements that this block works on."""
    var block = Int32(block_idx.x)
    var operands = ProgramOperands[count, 1]()
    var size = 0
    var start = Int32(0)
    # Unrolled: a struct that is indexed while running would be copied to local memory.
    comptime for tensor in range(most):
        if block >= Int32(batch.starts[tensor]):
            comptime for n in range(count):
                operands.data[n] = batch.data[tensor * count + n]
            size = batch.sizes[tensor]
            start = Int32(batch.starts[tensor])
    return BlockTensor[count](operands, size, Int(block - start))


@always_inline
def is_aligned[
    count: Int, ordered: Int
](operands: ProgramOperands[count, 1]) -> Bool:
    """Returns whether vectors may be moved: whether the operands that are read in order are aligned.
    """
    var together = 0
    comptime for n in range(count):
        comptime if (ordered >> n) & 1 == 1:
            together |= operands.data[n]
    return together % VECTOR_BYTES == 0


@__name(t"many_{get_function_name[run]()}")
def many_kernel[
    count: Int,
    most: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, 1], RunPositions[1, parts]
    ) thin -> None,
    vector: Int,
    ordered: Int,
](batch: TensorBatch[count, most]):
    var mine = block_tensor(batch)
    var aligned = is_aligned[count, ordered](mine.operands)
    var first = mine.block * THREADS * VECTORS_PER_THREAD + Int(thread_idx.x)
    for round in range(VECTORS_PER_THREAD):
        var i = (first + round * THREADS) * vector
        if i >= mine.size:
            return
        if aligned and i + vector <= mine.size:
            run[vector, 1](mine.operands, mine.operands.place(i))
        else:
            for at in range(i, min(i + vector, mine.size)):
                run[1, 1](mine.operands, mine.operands.place(at))


@always_inline
def filled[
    count: Int, most: Int
](
    mut batch: TensorBatch[count, most],
    table: TensorTable[count],
    first: Int,
    elements: Int,
) -> Int:
    """Fills `batch` with the tensors from `first` on, of which a block takes `elements`; returns how many blocks that
    makes."""
    var blocks = 0
    for place in range(min(most, table.tensors - first)):
        comptime for n in range(count):
            batch.data[place * count + n] = table.address(first + place, n)
        batch.sizes[place] = table.size(first + place)
        batch.starts[place] = blocks
        blocks += ceildiv(table.size(first + place), elements)
    return blocks


@no_inline
def many_gpu[
    count: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, 1], RunPositions[1, parts]
    ) thin -> None,
    vector: Int,
    ordered: Int,
](table: TensorTable[count], ctx: DeviceContext) raises:
    """Runs a program over many tensors, as many in a launch as its arguments hold; none is empty.
    """
    comptime most = tensors_at_once(count)
    for first in range(0, table.tensors, most):
        var batch = TensorBatch[count, most]()
        var blocks = filled(
            batch, table, first, THREADS * VECTORS_PER_THREAD * vector
        )
        ctx.enqueue_function[many_kernel[count, most, run, vector, ordered]](
            batch, grid_dim=blocks, block_dim=THREADS
        )
