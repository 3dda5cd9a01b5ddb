"""Gathers and scatters by an index tensor, one typed function each.

``x`` is [outer, places, inner] and ``source`` [outer, count, inner], contiguous; indices are int64, counted from zero.
An index outside is reported when the graph runs (``runtime.launching.reports``) and nothing is written there; a gather
reads the nearest element in its stead.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from max.dtype import DType
from max.graph import Dim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Number, Signature, Tensor, ints

_X, _Y, _SOURCE = (Tensor(name, "dtype", 3) for name in ("x", "y", "source"))
_ROWS, _ELEMENTS = (Tensor("index", DType.int64, rank) for rank in (1, 3))
FAMILY = Family(
    "indexing",
    Signature("gather_rows", (_Y,), (_X, _ROWS), reports=True),
    Signature("gather_elements", (_Y,), (_X, _ELEMENTS), reports=True),
    Signature("scatter_rows_add", (_Y,), (_X, _ROWS, _SOURCE), ints("deterministic"), reports=True),
    Signature("scatter_rows_set", (_Y,), (_X, _ROWS, _SOURCE), reports=True),
    Signature("scatter_elements_add", (_Y,), (_X, _ELEMENTS, _SOURCE), ints("deterministic"), reports=True),
    Signature("scatter_elements_set", (_Y,), (_X, _ELEMENTS, _SOURCE), reports=True),
)


@dataclass(frozen=True)
class JoinedDimensions(functions.Facts):
    """Dimensions that became one.

    Attributes:
        sizes: of the dimensions; empty where it is one as it was.
    """

    sizes: tuple[int, ...]

    def outside(self, index: int, size: int) -> str:
        """Several indices, one of which is outside of its dimension, are told together."""
        if index == SEVERAL and self.sizes:
            return f"an index into dimensions of {', '.join(map(str, self.sizes))}"
        return super().outside(index, size)


SEVERAL = -(2**62)
"""Stands for an index into several dimensions, one of which it is outside of."""


@dataclass(frozen=True)
class Zeros:
    """The target of a scatter, [outer, ``places``, inner], when it is zero before."""

    places: Dim


Base: TypeAlias = TensorValue | Zeros
"""The target of a scatter: a tensor, or zeros, which need no memory."""


def _check(x: Base, index: TensorValue, source: TensorValue, index_shape: list[Dim]) -> None:
    for name, value in (("x", x), ("source", source)):
        if isinstance(value, TensorValue) and value.rank != 3:
            raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 3, [outer, places, inner]")
    if isinstance(x, TensorValue) and x.dtype != source.dtype:
        raise ValueError(f"source has dtype {source.dtype}: must be that of x, {x.dtype}")
    if isinstance(x, TensorValue) and [source.shape[0], source.shape[2]] != [x.shape[0], x.shape[2]]:
        raise ValueError(
            f"source has shape {list(source.shape)}: first and last extent must be those of x, {list(x.shape)}"
        )
    if index.dtype != DType.int64:
        raise ValueError(f"index has dtype {index.dtype}: must be {DType.int64}")
    if list(index.shape) != index_shape:
        raise ValueError(f"index has shape {list(index.shape)}: must be {index_shape}")


@beartype
def gather(x: TensorValue, index: TensorValue, axis: int, sizes: Sequence[int] = ()) -> TensorValue:
    """Entries of ``x``'s axis ``axis``, which the axes of ``index``, int64, replace.

    Args:
        x: of any rank.
        index: of any rank.
        axis: of ``x``.
        sizes: of the dimensions that became the axis, for an error.
    """
    if index.dtype != DType.int64:
        raise ValueError(f"index has dtype {index.dtype}: must be {DType.int64}")
    before, after = list(x.shape[:axis]), list(x.shape[axis + 1 :])
    outer, count, inner = (functools.reduce(operator.mul, dims, Dim(1)) for dims in (before, index.shape, after))
    operands = [ops.reshape(x, [outer, x.shape[axis], inner]), ops.reshape(index, [count])]
    result = TensorType(x.dtype, [outer, count, inner], x.device)
    y = _call("gather_rows", operands, result, sizes=sizes)
    return ops.reshape(y, [*before, *index.shape, *after])


@beartype
def gather_elements(x: TensorValue, index: TensorValue) -> TensorValue:
    """For each element of ``index`` [outer, count, inner] the element of ``x`` [outer, places, inner] at that place."""
    if x.rank != 3 or index.rank != 3 or [x.shape[0], x.shape[2]] != [index.shape[0], index.shape[2]]:
        raise ValueError(
            f"index has shape {list(index.shape)}, x has {list(x.shape)}: must be [outer, count, inner] and "
            "[outer, places, inner]"
        )
    if index.dtype != DType.int64:
        raise ValueError(f"index has dtype {index.dtype}: must be {DType.int64}")
    result = TensorType(x.dtype, index.shape, x.device)
    return _call("gather_elements", [x, index], result)


@beartype
def scatter_rows(
    x: Base,
    index: TensorValue,
    source: TensorValue,
    accumulate: bool,
    *,
    deterministic: bool = True,
    sizes: Sequence[int] = (),
) -> TensorValue:
    """``x`` with row i of ``source`` added to (or put in) row ``index[i]``.

    Put, the last one wins. On a GPU additions of floats are atomic unless ``deterministic``. ``sizes`` are those of the
    dimensions that became the rows, for an error.
    """
    _check(x, index, source, [source.shape[1]])
    if accumulate:
        return _scattered("scatter_rows_add", x, index, source, [deterministic], sizes)
    return _scattered("scatter_rows_set", x, index, source, sizes=sizes)


@beartype
def scatter_elements(
    x: Base, index: TensorValue, source: TensorValue, accumulate: bool, *, deterministic: bool = True
) -> TensorValue:
    """``x`` with every element of ``source`` added to (or put in) the row that ``index`` has for it.

    Put, the last one wins; added, as in ``scatter_rows``.
    """
    _check(x, index, source, list(source.shape))
    if accumulate:
        return _scattered("scatter_elements_add", x, index, source, [deterministic])
    return _scattered("scatter_elements_set", x, index, source)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterable[functions.LibraryFunction]:
    return functions.of_each_dtype(FAMILY, target, (*dtypes, DType.int64))


def _scattered(
    name: str,
    x: Base,
    index: TensorValue,
    source: TensorValue,
    numbers: Sequence[Number] = (),
    sizes: Sequence[int] = (),
) -> TensorValue:
    if isinstance(x, Zeros):
        kind = TensorType(source.dtype, [source.shape[0], x.places, source.shape[2]], source.device)
        # Kernels take a tensor without elements for zeros.
        x = ops.constant(np.zeros((0, 0, 0)), source.dtype, device=source.device)
    else:
        kind = x.type
    return _call(name, [x, index, source], kind, numbers, sizes)


def _call(
    name: str,
    values: list[TensorValue],
    result: TensorType,
    numbers: Sequence[Number] = (),
    sizes: Sequence[int] = (),
) -> TensorValue:
    x = values[0]
    function = functions.function_of(FAMILY, name, functions.target_of(x.device), (x.dtype,))
    return functions.call(FAMILY[name], function, values, [result], numbers, facts=JoinedDimensions(tuple(sizes)))[0]
