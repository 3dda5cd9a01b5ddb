"""Batch normalization's reductions, one typed function each.

x and dy are [rows, C], contiguous; per-channel tensors are [C] in the accumulation dtype: float64 for float64, else
float32. Normalizing itself is elementwise and left to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from max.graph import TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import accumulation_dtype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Family, Number, Signature, Tensor

_X, _DY = Tensor("x", "dtype", 2), Tensor("dy", "dtype", 2)
_NUMBERS: dict[str, type[Number]] = {"momentum": float, "epsilon": float}
_MEAN, _INVSTD = Tensor("mean", "acc", 1), Tensor("invstd", "acc", 1)
_OLD, _NEW, _SUMS = (
    tuple(Tensor(name, "acc", 1) for name in names)
    for names in (
        ("old_mean", "old_variance"),
        ("new_mean", "new_variance"),
        ("sum_dy", "grad_weight", "mean_dy", "projection"),
    )
)
FAMILY = Family(
    "normalization",
    Signature(
        "batch_norm_statistics",
        results=(_MEAN, _INVSTD, *_NEW),
        operands=(_X, *_OLD),
        numbers=_NUMBERS,
        # A channel's new running statistics read that channel's old ones.
        in_order={2: frozenset({1}), 3: frozenset({2})},
    ),
    Signature("batch_norm_statistics_only", results=(_MEAN, _INVSTD), operands=(_X,), numbers=_NUMBERS),
    Signature("batch_norm_gradient_sums", results=_SUMS, operands=(_DY, _X, _MEAN, _INVSTD)),
    first=1.0,
)


class Statistics(NamedTuple):
    """Mean and 1 / sqrt(variance + epsilon), and the running statistics after the step where there are any."""

    mean: TensorValue
    invstd: TensorValue
    running_mean: TensorValue | None
    running_var: TensorValue | None


class GradientSums(NamedTuple):
    """sum(dy); sum(dy * xhat); sum(dy) / rows; sum(dy * xhat) * invstd / rows."""

    sum_dy: TensorValue
    grad_weight: TensorValue
    mean_dy: TensorValue
    projection: TensorValue


def _check_rows(name: str, value: TensorValue) -> None:
    if value.rank != 2:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 2, [rows, C]")
    check_float(name, value)


def _check_channels(name: str, value: TensorValue, x: TensorValue) -> None:
    wanted = accumulation_dtype(x.dtype)
    if list(value.shape) != [x.shape[1]]:
        raise ValueError(f"{name} has shape {list(value.shape)}: must be [{x.shape[1]}], the channels of x")
    if value.dtype != wanted:
        raise ValueError(f"{name} has dtype {value.dtype}: must be {wanted} for x of {x.dtype}")


def _channel_type(x: TensorValue) -> TensorType:
    return TensorType(accumulation_dtype(x.dtype), [x.shape[1]], x.device)


def _call(entry: str, x: TensorValue, values: list[TensorValue], numbers: Sequence[Number] = ()) -> list[TensorValue]:
    function = functions.function_of(FAMILY, entry, functions.target_of(x.device), (x.dtype,))
    signature = FAMILY[entry]
    return functions.call(signature, function, values, [_channel_type(x)] * len(signature.results), numbers)


@beartype
def batch_norm_statistics(
    x: TensorValue,
    running_mean: TensorValue | None,
    running_var: TensorValue | None,
    momentum: float,
    epsilon: float,
) -> Statistics:
    """The statistics of each channel of ``x``, and the running ones moved by ``momentum`` towards them."""
    _check_rows("x", x)
    if running_mean is None or running_var is None:
        if running_mean is not running_var:
            raise ValueError("running_mean and running_var: must both be given or both be None")
        mean, invstd = _call("batch_norm_statistics_only", x, [x], [momentum, epsilon])
        return Statistics(mean, invstd, None, None)
    _check_channels("running_mean", running_mean, x)
    _check_channels("running_var", running_var, x)
    return Statistics(*_call("batch_norm_statistics", x, [x, running_mean, running_var], [momentum, epsilon]))


@beartype
def batch_norm_gradient_sums(dy: TensorValue, x: TensorValue, mean: TensorValue, invstd: TensorValue) -> GradientSums:
    """Everything that the backward pass reduces over rows."""
    _check_rows("x", x)
    if list(dy.shape) != list(x.shape) or dy.dtype != x.dtype:
        raise ValueError(f"dy is {dy.dtype} {list(dy.shape)}: must be as x, {x.dtype} {list(x.shape)}")
    _check_channels("mean", mean, x)
    _check_channels("invstd", invstd, x)
    return GradientSums(*_call("batch_norm_gradient_sums", x, [dy, x, mean, invstd]))
