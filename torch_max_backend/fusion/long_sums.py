"""Sums of many large values that are made far apart, as gradients of what an iterative network reads in each iteration.

One program that adds them all moves the fewest bytes, and all of them wait for the last one. Stored after a few
operands, a partial sum frees these; it is written and read once more.
"""

from __future__ import annotations

from collections.abc import Collection

from torch_max_backend.fusion.terms import Leaf, Terms
from torch_max_backend.typed_graph.operations import Call, Operation, Value

LEAST = 2**24
"""Bytes of each operand: those of smaller ones do not count for a peak."""
OPERANDS = 3
"""That wait for a partial sum."""


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


def _waits(value: Value) -> bool:
    """Whether a large value of a library's function is there for one reader alone."""
    return value.bytes >= LEAST and isinstance(value.maker, Call) and len(value.readers) == 1
