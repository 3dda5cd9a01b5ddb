"""Cumulative sums: a typed function."""

from __future__ import annotations

import functools
import operator

from max.dtype import DType
from max.graph import Dim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions


@beartype
def cumsum(x: TensorValue, axis: int) -> TensorValue:
    """The running sum of numbers along ``axis``, of x's shape and dtype."""
    if x.dtype == DType.bool:
        raise ValueError("x has dtype bool: must be a number's")
    before, after = list(x.shape[:axis]), list(x.shape[axis + 1 :])
    outer, inner = (functools.reduce(operator.mul, dims, Dim(1)) for dims in (before, after))
    flat = ops.reshape(x, [outer, x.shape[axis], inner])
    result = TensorType(x.dtype, flat.shape, x.device)
    (y,) = functions.call("reduction", "cumsum", x.device, [flat], [result], (x.dtype,))
    return ops.reshape(y, list(x.shape))
