"""Copies that have kernels of their own (kernels/movement/): permutations and concatenations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_max_backend.fusion.loop_nest import LoopNest
from torch_max_backend.fusion.terms import MAX_ELEMENTS, MAX_GUARDS, Leaf, Terms
from torch_max_backend.typed_graph.operations import Concat, Operation, Value

_MIN_TRANSPOSED = 1 << 16
"""Smaller tensors are copied by programs, several at once."""
_MIN_LONGER = 64
"""The least length of a tile's longer side: with less, both sides would be mostly empty."""
_MAX_DIGITS = 6
"""The most digits of a place, as in kernels/movement/transpose.mojo."""


@dataclass(frozen=True)
class Concatenation:
    """Many tensors one behind the other, as the kernel takes them.

    Attributes:
        result: of the operation.
        parts: which have elements.
        extents: the extent before the axis, and each part's elements behind.
    """

    result: Value
    parts: list[Value]
    extents: list[int]


def transposition(terms: Terms, loops: LoopNest | None) -> list[int] | None:
    """The sizes of a permuted copy, where ``terms`` are one that goes through tiles."""
    if loops is None or len(terms.roots) > 1 or terms.extents is not None or terms.size < _MIN_TRANSPOSED:
        return None
    if len(terms.steps) != 1 or not isinstance(terms.steps[0], Leaf):
        return None
    (strides,), extents = loops.strides, loops.extents
    guarded = terms.guards or terms.leaves[0].map.constant
    if guarded or not 2 <= len(extents) <= _MAX_DIGITS or strides[-1] == 1 or 1 not in strides:
        return None
    if max(extents[-1], extents[strides.index(1)]) < _MIN_LONGER:
        return None
    return [*extents, *strides]


def concatenation(operation: Operation) -> Concatenation | None:
    """The operation as a call of the kernel, where it has more parts than a program takes."""
    if not isinstance(operation, Concat):
        return None
    (result,) = operation.results
    parts = [operand for operand in operation.operands if operand.size]
    if len(parts) <= MAX_GUARDS or result.shape is None or result.size > MAX_ELEMENTS:
        return None
    outer = math.prod(result.shape[: operation.axis])
    return Concatenation(result, parts, [outer, *(part.size // outer for part in parts)])
