"""Cumulative sums: a typed function."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from max.dtype import DType
from max.graph import Dim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor

#: Generated programs are of this family too (``fusion/program.py``).
FAMILY = Family(
    "reduction",
    Signature("cumsum", results=(Tensor("y", "dtype", 3),), operands=(Tensor("x", "dtype", 3),)),
    first=1.0,
)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterable[functions.LibraryFunction]:
    return functions.of_each_dtype(FAMILY, target, (*dtypes, DType.int64))


@beartype
def cumsum(x: TensorValue, axis: int) -> TensorValue:
    """The running sum of numbers along ``axis``, of x's shape and dtype."""
    if x.dtype == DType.bool:
        raise ValueError("x has dtype bool: must be a number's")
    before, after = list(x.shape[:axis]), list(x.shape[axis + 1 :])
    outer, inner = (functools.reduce(operator.mul, dims, Dim(1)) for dims in (before, after))
    flat = ops.reshape(x, [outer, x.shape[axis], inner])
    result = TensorType(x.dtype, flat.shape, x.device)
    function = functions.function_of(FAMILY, "cumsum", functions.target_of(x.device), (x.dtype,))
    (y,) = functions.call(FAMILY["cumsum"], function, [flat], [result])
    return ops.reshape(y, list(x.shape))
