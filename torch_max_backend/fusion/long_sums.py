"""Sums of many large values that are made far apart, as gradients of what an iterative network reads in each iteration.

One program that adds them all moves the fewest bytes, and all of them wait for the last one. Stored after a few
operands, a partial sum frees these; it is written and read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch_max_backend.fusion.terms import Leaf, Terms
from torch_max_backend.typed_graph.operations import Call, Operation, Value

MIN_BYTES = 2**24
"""Bytes of each operand: those of smaller ones do not count for a peak."""
OPERANDS = 3
"""The number of operands that wait for a partial sum."""


def partial_sum(terms: Terms, roots: Collection[Value], fusible: Collection[Operation]) -> Value | None:
    """The first sum of ``OPERANDS`` values that wait, in a longer one, that is to be stored; None where there is none.

    Args:
        terms: a program.
        roots: what is stored already.
        fusible: operations that programs can compute.
    """
    waiting: list[int | None] = []
    found: tuple[int, Value] | None = None
    for number, step in enumerate(terms.steps):
        if isinstance(step, Leaf):
            waiting.append(int(step.value not in roots and _waits(step.value)))
            continue
        parts = [waiting[operand] for operand in step.operands]
        known = [part for part in parts if part is not None]
        chained = step.name in ("add", "cast") and len(known) == len(parts)
        waiting.append(sum(known) if chained else None)
        if step.value.maker not in fusible or step.value in terms.roots:
            continue
        if found is None and step.name == "add" and chained and sum(known) >= OPERANDS:
            found = number, step.value
        elif found is not None and step.operands == (found[0],) and step.value.bytes < found[1].bytes:
            # Rounded, as the sum is before the next operand.
            found = number, step.value
    total = waiting[-1] if waiting else None
    return found[1] if found is not None and (total is None or total > OPERANDS) else None


def joined_sum(
    terms: Terms, roots: Collection[Value], fusible: Collection[Operation], joins: Callable[[Value], bool]
) -> Value | None:
    """The first sum of two values that wait, in a longer one, that is to be stored because what makes the second one
    adds the first one while it stores: no bytes more are moved. None where there is none.

    Args:
        terms: a program.
        roots: what is stored already.
        fusible: operations that programs can compute.
        joins: whether a value's maker takes in what is computed with the value.
    """
    waiting: list[set[Value]] = []
    found: tuple[int, Value] | None = None
    for number, step in enumerate(terms.steps):
        if isinstance(step, Leaf):
            large = _waits(step.value) or (step.value in roots and _is_large(step.value))
            waiting.append({step.value} if large and step.map == terms.identity else set())
            continue
        waiting.append(set().union(*(waiting[operand] for operand in step.operands)))
        if step.value.maker not in fusible or step.value in terms.roots or step.value in roots:
            continue
        if found is None and step.name == "add" and len(waiting[-1]) >= 2 and joins(max(waiting[-1], key=_position)):
            found = number, step.value
        elif found is not None and step.operands == (found[0],) and step.value.bytes < found[1].bytes:
            # Rounded, as the sum is before the next operand.
            found = number, step.value
    if found is None or len(waiting[-1]) <= len(waiting[found[0]]):
        return None
    number, total = found
    # A kernel stores what it makes in one dtype.
    return total if max(waiting[number], key=_position).dtype == total.dtype else None


def _position(value: Value) -> int:
    assert value.maker is not None
    return value.maker.position


def _waits(value: Value) -> bool:
    """Whether a large value of a library's function is there for one reader alone."""
    return _is_large(value) and isinstance(value.maker, Call)


def _is_large(value: Value) -> bool:
    return value.bytes >= MIN_BYTES and value.maker is not None and len(value.readers) == 1
