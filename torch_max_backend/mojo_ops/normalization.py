"""Batch normalization's reductions, one typed function each.

x and dy are [rows, C], contiguous; per-channel tensors are [C] in the accumulation dtype: float64 for float64, else
float32. Normalizing itself is elementwise and left to the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions

_FLOATS = (DType.float32, DType.bfloat16, DType.float16, DType.float64)


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


def accumulation_dtype(dtype: DType) -> DType:
    """The dtype of statistics and sums."""
    return DType.float64 if dtype == DType.float64 else DType.float32


def _check_rows(name: str, value: TensorValue) -> None:
    if value.rank != 2:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 2, [rows, C]")
    if value.dtype not in _FLOATS:
        raise ValueError(f"{name} has dtype {value.dtype}: must be one of {[str(d) for d in _FLOATS]}")
    if value.dtype == DType.float64 and value.device.is_gpu():
        raise ValueError(f"{name} has dtype {value.dtype}: float64 is supported on the CPU only")


def _check_channels(name: str, value: TensorValue, x: TensorValue) -> None:
    wanted = accumulation_dtype(x.dtype)
    if list(value.shape) != [x.shape[1]]:
        raise ValueError(f"{name} has shape {list(value.shape)}: must be [{x.shape[1]}], the channels of x")
    if value.dtype != wanted:
        raise ValueError(f"{name} has dtype {value.dtype}: must be {wanted} for x of {x.dtype}")


def _channel_type(x: TensorValue) -> TensorType:
    return TensorType(accumulation_dtype(x.dtype), [x.shape[1]], x.device)


def _call(
    op: str,
    x: TensorValue,
    values: list[TensorValue],
    results: int,
    in_order: Mapping[int, frozenset[int]] | None = None,
) -> list[TensorValue]:
    types = [_channel_type(x)] * results
    return functions.call("normalization", op, x.device, values, types, (x.dtype,), in_order)


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
    settings = ops.constant(np.array([momentum, epsilon], np.float64), DType.float64, device=DeviceRef.CPU())
    if running_mean is None or running_var is None:
        if running_mean is not running_var:
            raise ValueError("running_mean and running_var: must both be given or both be None")
        mean, invstd = _call("batch_norm_statistics_only", x, [x, settings], 2)
        return Statistics(mean, invstd, None, None)
    _check_channels("running_mean", running_mean, x)
    _check_channels("running_var", running_var, x)
    values = [x, running_mean, running_var, settings]
    # A channel's new running statistics read that channel's old ones.
    in_order = {2: frozenset({1}), 3: frozenset({2})}
    return Statistics(*_call("batch_norm_statistics", x, values, 4, in_order))


@beartype
def batch_norm_gradient_sums(dy: TensorValue, x: TensorValue, mean: TensorValue, invstd: TensorValue) -> GradientSums:
    """Everything that the backward pass reduces over rows."""
    _check_rows("x", x)
    if list(dy.shape) != list(x.shape) or dy.dtype != x.dtype:
        raise ValueError(f"dy is {dy.dtype} {list(dy.shape)}: must be as x, {x.dtype} {list(x.shape)}")
    _check_channels("mean", mean, x)
    _check_channels("invstd", invstd, x)
    values = [dy, x, mean, invstd]
    return GradientSums(*_call("batch_norm_gradient_sums", x, values, 4))
