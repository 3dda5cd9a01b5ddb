"""The attention family's entries in its libraries: check the operands, then hand pointers to dispatch.

Query, key, value and output are rank 4 with a row's elements last. A gradient lies as its tensor. logsumexp is [B, H,
M] in the accumulation type (float64 for float64, else float32).

A bias is contiguous, [a part of B, H or 1, M or 1, N or 1], and is added to the scaled scores: batch b reads its batch
b modulo its extent. Its gradient is that of the scores, [B, H, M, N] of the queries' type.

`wide` says that a row may have more than 64 elements: kernels have registers for 64 or for 128.
"""

from max.gpu.host import DeviceContext
from std.utils.index import Index, IndexList

from ..common.library import Arguments, Operand
from ..common.pointer import accumulation_type
from .dispatch import run_backward, run_forward
from .pointers import BackwardPointers, ForwardPointers
from .problem import (
    OPERANDS,
    STRIDED,
    AttentionProblem,
    bias_strides,
    checked,
    replace_strides,
    strided_heads,
)


@fieldwise_init
struct AttentionNumbers(Copyable):
    """The numbers of a call."""

    var scale: Float64
    """The factor of the scores."""
    var is_causal: Bool
    var aligned_at_end: Bool
    """Whether a causal mask aligns the last query with the last key."""
    var hidden_is_nan: Bool
    """Whether a row whose keys are all hidden is NaN."""
    var axes: Array[IndexList[3], OPERANDS]
    """The axes of batch, heads and rows in memory, for query, key, value and output."""
    var steps: Array[IndexList[3], STRIDED]
    """Strides from batch to batch, head to head and row to row of tensors that are views of larger ones; else 0."""

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        var scale = arguments.take_float()
        var flags = arguments.take_words[3]()
        var axes = Array[IndexList[3], OPERANDS](fill=IndexList[3]())
        for i in range(OPERANDS):
            axes[i] = arguments.take_words[3]()
        var steps = Array[IndexList[3], STRIDED](fill=IndexList[3]())
        for i in range(STRIDED):
            steps[i] = arguments.take_words[3]()
        return Self(
            scale, flags[0] != 0, flags[1] != 0, flags[2] != 0, axes^, steps^
        )


@no_inline
def _problem(
    query: IndexList[4],
    key: IndexList[4],
    value: IndexList[4],
    output: IndexList[4],
    sums: IndexList[3],
    numbers: AttentionNumbers,
) raises -> AttentionProblem:
    var problem = checked(
        strided_heads(query, numbers.axes[0]),
        strided_heads(key, numbers.axes[1]),
        strided_heads(value, numbers.axes[2]),
        strided_heads(output, numbers.axes[3]),
        sums,
        numbers.scale,
        numbers.is_causal,
        numbers.aligned_at_end,
        numbers.hidden_is_nan,
    )
    replace_strides(problem, numbers.steps)
    return problem


@no_inline
def _check_same(name: StaticString, a: IndexList[4], b: IndexList[4]) raises:
    if a != b:
        raise Error(t"attention: the gradient of {name} is {a}, it is {b}")


@always_inline
def _forward[
    target: StaticString,
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    wide: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var numbers = AttentionNumbers.take(arguments)
    var output = arguments.take[dtype, 4]()
    var sums = arguments.take[accumulation_type[dtype], 3]()
    var query = arguments.take[dtype, 4]()
    var key = arguments.take[dtype, 4]()
    var value = arguments.take[dtype, 4]()
    var bias = Operand[bias_type, 4](
        {unsafe_from_address = Int(query.data)}, Index(1, 1, 1, 1)
    )
    comptime if biased:
        bias = arguments.take[bias_type, 4]()
    var problem = _problem(
        query.shape(),
        key.shape(),
        value.shape(),
        output.shape(),
        sums.shape(),
        numbers,
    )
    comptime if biased:
        problem.bias = bias_strides(bias.shape(), problem)
    run_forward[target, dtype, bias_type, biased, wide](
        ForwardPointers[dtype, bias_type](
            output.data,
            sums.data,
            query.data,
            key.data,
            value.data,
            bias.data,
        ),
        problem,
        ctx,
    )


def attention_fprop[
    target: StaticString, dtype: DType, wide: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Output and logsumexp."""
    _forward[target, dtype, dtype, False, wide](arguments, ctx)


def attention_fprop_biased[
    target: StaticString, dtype: DType, bias_type: DType, wide: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Output and logsumexp with a bias."""
    _forward[target, dtype, bias_type, True, wide](arguments, ctx)


@always_inline
def _backward[
    target: StaticString,
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    bias_wanted: Bool,
    wide: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    var numbers = AttentionNumbers.take(arguments)
    var query_grad = arguments.take[dtype, 4]()
    var key_grad = arguments.take[dtype, 4]()
    var value_grad = arguments.take[dtype, 4]()
    var nothing = Operand[bias_type, 4](
        {unsafe_from_address = Int(query_grad.data)}, Index(1, 1, 1, 1)
    )
    var bias_grad = query_grad
    comptime if bias_wanted:
        bias_grad = arguments.take[dtype, 4]()
    var grad = arguments.take[dtype, 4]()
    var query = arguments.take[dtype, 4]()
    var key = arguments.take[dtype, 4]()
    var value = arguments.take[dtype, 4]()
    var output = arguments.take[dtype, 4]()
    var sums = arguments.take[accumulation_type[dtype], 3]()
    var bias = nothing
    comptime if biased:
        bias = arguments.take[bias_type, 4]()
    var problem = _problem(
        query.shape(),
        key.shape(),
        value.shape(),
        output.shape(),
        sums.shape(),
        numbers,
    )
    _check_same("the output", grad.shape(), output.shape())
    _check_same("queries", query_grad.shape(), query.shape())
    _check_same("keys", key_grad.shape(), key.shape())
    _check_same("values", value_grad.shape(), value.shape())
    comptime if biased:
        problem.bias = bias_strides(bias.shape(), problem)
    comptime if bias_wanted:
        _check_same(
            "the bias",
            bias_grad.shape(),
            Index(problem.batch, problem.heads, problem.queries, problem.keys),
        )
    run_backward[target, dtype, bias_type, biased, bias_wanted, wide](
        BackwardPointers[dtype, bias_type](
            query_grad.data,
            key_grad.data,
            value_grad.data,
            bias_grad.data,
            grad.data,
            query.data,
            key.data,
            value.data,
            output.data,
            sums.data,
            bias.data,
        ),
        problem,
        ctx,
    )


def attention_dgrad[
    target: StaticString, dtype: DType, wide: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The gradients of query, key and value."""
    _backward[target, dtype, dtype, False, False, wide](arguments, ctx)


def attention_dgrad_biased[
    target: StaticString, dtype: DType, bias_type: DType, wide: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The gradients of query, key and value with a bias."""
    _backward[target, dtype, bias_type, True, False, wide](arguments, ctx)


def attention_dgrad_bias[
    target: StaticString, dtype: DType, bias_type: DType, wide: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The gradients of query, key, value and the bias."""
    _backward[target, dtype, bias_type, True, True, wide](arguments, ctx)
