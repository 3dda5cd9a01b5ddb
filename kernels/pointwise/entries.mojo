"""The pointwise family's entries in its libraries: a generated program, run over all elements.

A call has the size, and a list of numbers, those of its loop nest: the extents of the digits, then each operand's
strides, in the order of the operands (program.mojo), then each operand's start, for each guard its start and its
extent, and the numbers' bits. Then come the operands' addresses, results first. `Program.signature` in
torch_max_backend/fusion/program.py declares it.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.arithmetic import Divisor
from ..common.gpu import VECTOR_BYTES
from ..common.library import Arguments, Operand
from .cpu import pointwise_cpu
from .gpu import pointwise_gpu
from .many import TensorTable, many_cpu, many_gpu, words_of_tensors
from .program import ProgramOperands, RunPositions


@always_inline
def operands_of[
    count: Int, dims: Int, guards: Int = 0, numbers: Int = 0
](
    loop_nest: Operand[DType.int64, 1], mut arguments: Arguments
) raises -> ProgramOperands[count, dims]:
    """The operands that come next, with their extents and strides; the last ones are guards, then numbers.
    """
    comptime tensors = count - guards - numbers
    comptime placed = count - numbers
    var wanted = dims + placed * (dims + 1) + guards + numbers
    if loop_nest.dim_size(0) != wanted:
        raise Error(
            t"pointwise: the loop nest has {loop_nest.dim_size(0)} values, not"
            t" {wanted}"
        )
    var operands = ProgramOperands[count, dims]()
    comptime for k in range(dims):
        var divisor = Divisor(Int(loop_nest[k]))
        operands.extents[k] = Int(divisor.value)
        operands.multipliers[k] = Int(divisor.multiplier)
        operands.shifts[k] = Int(divisor.shift)
    comptime for i in range(placed * dims):
        operands.strides[i] = Int(loop_nest[dims + i])
    var next = dims + placed * dims
    comptime for n in range(tensors):
        operands.data[n] = arguments.take_word()
        operands.starts[n] = Int(loop_nest[next + n])
    next += tensors
    comptime for guard in range(guards):
        comptime n = tensors + guard
        operands.starts[n] = Int(loop_nest[next + 2 * guard])
        operands.data[n] = Int(loop_nest[next + 2 * guard + 1])
    next += 2 * guards
    comptime for number in range(numbers):
        operands.data[placed + number] = Int(loop_nest[next + number])
    return operands


def pointwise[
    target: StaticString,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], RunPositions[dims, parts]
    ) thin -> None,
    vector: Int,
    parts: Int,
    guards: Int,
    numbers: Int,
    outermost: Int,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """One program over operands of any shapes; a GPU's thread computes `parts` vectors, and threads count digit
    `outermost` last.
    """
    var size = arguments.take_word()
    var loop_nest = arguments.take_list()
    var operands = operands_of[count, dims, guards, numbers](
        loop_nest, arguments
    )
    var together = 0
    comptime for n in range(count - guards - numbers):
        together |= operands.data[n]
    comptime if is_cpu[target]():
        pointwise_cpu[count, dims, run, vector](operands, size)
    else:
        pointwise_gpu[count, dims, run, vector, parts, outermost](
            operands, size, together % VECTOR_BYTES == 0, ctx
        )


def pointwise_many[
    target: StaticString,
    count: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, 1], RunPositions[1, parts]
    ) thin -> None,
    vector: Int,
    ordered: Int,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """One program over the tensors of a table (many.mojo), which comes behind its length.

    `ordered` has a bit for each of a tensor's operands that is read or written in order; the others are one number.
    """
    var tensors = arguments.take_word()
    var words = words_of_tensors[count](arguments, tensors)
    var table = TensorTable[count](Int(words.unsafe_ptr()), tensors)
    comptime if is_cpu[target]():
        many_cpu[count, run, vector](table)
    else:
        many_gpu[count, run, vector, ordered](table, ctx)
    _ = words^
