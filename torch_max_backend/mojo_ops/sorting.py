"""Sorting of rows: a typed function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor

FAMILY = Family(
    "sorting",
    Signature(
        "sort_rows",
        results=(Tensor("values", "dtype", 2), Tensor("indices", DType.int64, 2)),
        operands=(Tensor("x", "dtype", 2),),
    ),
)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for dtype in (*dtypes, DType.int64):
        for descending in (False, True):
            yield functions.function_of(FAMILY, "sort_rows", target, (dtype, descending))


@beartype
def sort_rows(x: TensorValue, count: Dim | int, descending: bool) -> tuple[TensorValue, TensorValue]:
    """The first ``count`` elements of each row of ``x`` [rows, length] in sorted order, and where they were.

    Equal elements stay in their order, and NaN is larger than every number. The places are int64. Raises
    ``ValueError`` for another rank, for bool, and for a count above ``length``.
    """
    if x.rank != 2:
        raise ValueError(f"x has shape {list(x.shape)}: must have rank 2, [rows, length]")
    if x.dtype == DType.bool:
        raise ValueError("x has dtype bool: must be a number's")
    count, length = Dim(count), x.shape[1]
    if isinstance(count, StaticDim) and isinstance(length, StaticDim) and int(count) > int(length):
        raise ValueError(f"count is {count}: must be at most x's length, {length}")
    shape = [x.shape[0], count]
    results = [TensorType(x.dtype, shape, x.device), TensorType(DType.int64, shape, x.device)]
    function = functions.function_of(FAMILY, "sort_rows", functions.target_of(x.device), (x.dtype, descending))
    values, indices = functions.call(FAMILY["sort_rows"], function, [x], results)
    return values, indices
