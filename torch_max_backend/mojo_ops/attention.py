"""Scaled dot product attention, one typed function for each pass.

Query, key, value and output are rank 4 in memory with a row's elements last; ``axes`` says for each of the four where
batch, heads and rows lie: (0, 1, 2) for [batch, heads, rows, elements], (0, 2, 1) for [batch, rows, heads, elements].
A gradient lies as its tensor. A pass over the graph (``fusion/attention.py``) may have query, key, value and their
gradients lie in larger tensors, and says how far apart batches, heads and rows are there. H heads of queries may share
G heads of keys and values. logsumexp is [batch, H, rows] in float32 (float64 for float64); it is 0 for a row that sees
no key, whose output is 0.

A bias is contiguous and broadcastable to [batch, H, queries, keys], or has a part of the batches and is repeated; it is
added to ``scale * Q @ K.T``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import accumulation_dtype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Cost, Family, Number, Signature, Tensor

_Word = TypeVar("_Word")
Axes = tuple[int, int, int]
#: Of query, key, value and output.
AllAxes = tuple[Axes, Axes, Axes, Axes]

STRIDED = ("query", "key", "value", "query_grad", "key_grad", "value_grad")
"""The tensors that may lie in larger ones. Steps of 0 are those of a tensor of its own."""
_NUMBERS: dict[str, type[Number]] = {
    "scale": float,
    "is_causal": int,
    "aligned_at_end": int,
    "hidden_is_nan": int,
    **{f"{what}_{axis}": int for what in ("query", "key", "value", "output") for axis in ("batch", "heads", "rows")},
    **{f"{what}_{axis}_step": int for what in STRIDED for axis in ("batch", "heads", "rows")},
}
_AXES, _STEPS = list(_NUMBERS).index("query_batch"), list(_NUMBERS).index("query_batch_step")
"""The position of these among a call's numbers."""


def _tensors(*names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, "dtype", 4) for name in names)


_SUMS, _BIAS = Tensor("sums", "acc", 3), Tensor("bias", "bias_type", 4)
_READ, _GRADIENTS = _tensors("query", "key", "value"), _tensors("query_grad", "key_grad", "value_grad")
_MADE = (*_tensors("grad"), *_READ, *_tensors("output"), _SUMS)


_COST = Cost(4.0, 14.0)
FAMILY = Family(
    "attention",
    Signature("attention_fprop", (*_tensors("output"), _SUMS), _READ, _NUMBERS, cost=_COST),
    Signature("attention_fprop_biased", (*_tensors("output"), _SUMS), (*_READ, _BIAS), _NUMBERS, cost=_COST),
    Signature("attention_dgrad", _GRADIENTS, _MADE, _NUMBERS, cost=_COST),
    Signature("attention_dgrad_biased", _GRADIENTS, (*_MADE, _BIAS), _NUMBERS, cost=_COST),
    Signature("attention_dgrad_bias", (*_GRADIENTS, *_tensors("bias_grad")), (*_MADE, _BIAS), _NUMBERS, cost=_COST),
    first=1.0,
)

#: A row of more elements needs the kernels with more registers.
NARROW = 64


def axes_of(numbers: Sequence[int], tensor: int) -> Sequence[int]:
    """Where batch, heads and rows of query, key, value or output, by their numbers, lie in memory."""
    return numbers[_AXES + 3 * tensor : _AXES + 3 * tensor + 3]


def with_steps(words: Sequence[_Word], steps: Mapping[int, Sequence[int]]) -> list[_Word | int]:
    """The words of a call of tensors that lie in larger ones.

    Args:
        words: of a call, the numbers first.
        steps: by the numbers of ``STRIDED``, elements from batch to batch, head to head and row to row.
    """
    found: list[_Word | int] = list(words)
    for tensor, own in steps.items():
        found[_STEPS + 3 * tensor : _STEPS + 3 * tensor + 3] = own
    return found


class Output(NamedTuple):
    """The output, in the memory order that was asked for, and logsumexp."""

    output: TensorValue
    logsumexp: TensorValue


class Gradients(NamedTuple):
    """Each in its tensor's memory order and dtype; the bias's is the scores', [batch, H, queries, keys] in the query's
    dtype, None where it was not wanted."""

    query: TensorValue
    key: TensorValue
    value: TensorValue
    bias: TensorValue | None


def _check(name: str, value: TensorValue, query: TensorValue, rank: int = 4) -> None:
    if value.rank != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank {rank}")
    if value.dtype != query.dtype:
        raise ValueError(f"{name} has dtype {value.dtype}: must be the query's, {query.dtype}")


def _check_operands(query: TensorValue, key: TensorValue, value: TensorValue, axes: AllAxes) -> None:
    check_float("query", query)
    for name, operand in (("query", query), ("key", key), ("value", value)):
        _check(name, operand, query)
    for each in axes:
        if sorted(each) != [0, 1, 2]:
            raise ValueError(f"axes {each}: must say where batch, heads and rows lie among 0, 1 and 2")


def _logical(value: TensorValue, axes: Axes) -> tuple[Dim, Dim, Dim, Dim]:
    shape = value.shape
    return shape[axes[0]], shape[axes[1]], shape[axes[2]], shape[3]


def _is_wide(query: TensorValue, value: TensorValue) -> bool:
    """Whether a row may be longer than the kernels for short rows take. One kernel serves all on a CPU."""
    sizes = [query.shape[3], value.shape[3]]
    return query.device.is_gpu() and not all(isinstance(size, StaticDim) and int(size) <= NARROW for size in sizes)


def attention_function(
    entry: str, target: Literal["cpu", "gpu"], dtype: DType, bias: DType | None = None, *, wide: bool = False
) -> functions.LibraryFunction:
    """The library function of an entry.

    Args:
        entry: of kernels/attention.
        target: MAX's word for the kind of device.
        dtype: of the query.
        bias: the bias's dtype, where the entry takes one.
        wide: rows may have more than ``NARROW`` elements, on a GPU.
    """
    return functions.function_of(FAMILY, entry, target, (dtype, wide) if bias is None else (dtype, bias, wide))


def _call(
    entry: str,
    operands: list[TensorValue],
    bias: TensorValue | None,
    wide: bool,
    types: list[TensorType],
    numbers: list[Number],
    axes: AllAxes,
) -> list[TensorValue]:
    first = operands[0]
    function = attention_function(
        entry, functions.target_of(first.device), first.dtype, None if bias is None else bias.dtype, wide=wide
    )
    values = operands if bias is None else [*operands, bias]
    places = [place for each in axes for place in each] + [0] * (3 * len(STRIDED))
    return functions.call(FAMILY[entry], function, values, types, [*numbers, *places])


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in (signature.name for signature in FAMILY.signatures):
        for dtype in dtypes:
            # A bias that is a mask has the query's dtype, one that was trained may stay in float32.
            biases = dict.fromkeys((dtype, DType.float32)) if "bias" in entry else (None,)
            for bias in biases:
                for wide in (False, True) if target == "gpu" else (False,):
                    yield attention_function(entry, target, dtype, bias, wide=wide)


def _type_of(value: TensorValue) -> TensorType:
    return TensorType(value.dtype, value.shape, value.device)


def _check_bias(bias: TensorValue) -> None:
    if bias.rank != 4 or not bias.dtype.is_float():
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}: must be floats of rank 4")


@beartype
def attention_fprop(
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    bias: TensorValue | None,
    *,
    axes: AllAxes,
    scale: float,
    is_causal: bool,
    aligned_at_end: bool,
    hidden_is_nan: bool = False,
) -> Output:
    """softmax(scale * Q @ K.T + bias) @ V.

    Args:
        query: M rows of D elements for each of H heads.
        key: N rows of D elements for each of G heads.
        value: N rows of E elements for each of G heads.
        bias: None, or floats of rank 4.
        axes: where batch, heads and rows of query, key, value and output lie.
        scale: of the scores.
        is_causal: whether query i sees the keys up to number i only.
        aligned_at_end: whether it is then the last query that sees up to the last key.
        hidden_is_nan: whether a row whose scores are all -inf is NaN, as softmax's, instead of 0.
    """
    _check_operands(query, key, value, axes)
    batch, heads, rows, _ = _logical(query, axes[0])
    extents = {axes[3][0]: batch, axes[3][1]: heads, axes[3][2]: rows, 3: value.shape[3]}
    types = [
        TensorType(query.dtype, [extents[i] for i in range(4)], query.device),
        TensorType(accumulation_dtype(query.dtype), [batch, heads, rows], query.device),
    ]
    if bias is not None:
        _check_bias(bias)
    entry = "attention_fprop" if bias is None else "attention_fprop_biased"
    numbers = [scale, is_causal, aligned_at_end, hidden_is_nan]
    return Output(*_call(entry, [query, key, value], bias, _is_wide(query, value), types, numbers, axes))


@beartype
def attention_dgrad(
    grad: TensorValue,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    output: TensorValue,
    logsumexp: TensorValue,
    bias: TensorValue | None,
    *,
    axes: AllAxes,
    scale: float,
    is_causal: bool,
    aligned_at_end: bool,
    hidden_is_nan: bool = False,
    bias_wanted: bool = False,
) -> Gradients:
    """The gradients of what ``attention_fprop`` computes.

    Args:
        grad: the output's gradient, in memory as ``output``.
        query: as in the forward pass, like all that follows.
        key: see there.
        value: see there.
        output: the forward pass's.
        logsumexp: the forward pass's.
        bias: see there.
        axes: see there.
        scale: see there.
        is_causal: see there.
        aligned_at_end: see there.
        hidden_is_nan: see there.
        bias_wanted: whether the bias has a gradient; there must be one.
    """
    _check_operands(query, key, value, axes)
    _check("grad", grad, query)
    _check("output", output, query)
    if logsumexp.dtype != accumulation_dtype(query.dtype) or logsumexp.rank != 3:
        raise ValueError(
            f"logsumexp is {logsumexp.dtype} {list(logsumexp.shape)}: must be "
            f"{accumulation_dtype(query.dtype)} of rank 3"
        )
    types = [_type_of(operand) for operand in (query, key, value)]
    if bias is not None:
        _check_bias(bias)
    entry = "attention_dgrad" if bias is None else "attention_dgrad_biased"
    if bias_wanted:
        if bias is None:
            raise ValueError("bias_wanted: there is no bias")
        entry = "attention_dgrad_bias"
        batch, heads, rows, _ = _logical(query, axes[0])
        types.append(TensorType(query.dtype, [batch, heads, rows, _logical(key, axes[1])[2]], query.device))
    numbers = [scale, is_causal, aligned_at_end, hidden_is_nan]
    operands = [grad, query, key, value, output, logsumexp]
    query_grad, key_grad, value_grad, *bias_grad = _call(
        entry, operands, bias, _is_wide(query, value), types, numbers, axes
    )
    return Gradients(query_grad, key_grad, value_grad, bias_grad[0] if bias_grad else None)
