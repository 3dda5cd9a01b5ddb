"""Chains of operations that a GPU computes faster by other instructions (kernels/common/arithmetic.mojo).

The lowerings (``lowering/numerics.py``) write out what MAX's operations leave undefined: an exponential outside its
range, a sigmoid as a quotient. NVIDIA's instructions handle the former themselves, and their exact division takes ten
times as long as a reciprocal that is accurate to one unit in the last place. Operations without readers stay in the
source; the compiler drops them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from max.dtype import DType

from torch_max_backend.fusion.terms import Leaf, Step

FUNCTIONS = frozenset({"exponential", "quotient_above_one"})
"""Functions of kernels/common/arithmetic.mojo that replace chains of operations."""


def idioms(steps: Sequence[Step | Leaf]) -> dict[int, str]:
    """The replacements of some steps' expressions, by the steps' numbers."""
    found: dict[int, str] = {}
    exponentials: set[int] = set()
    for number, step in enumerate(steps):
        if isinstance(step, Leaf) or step.value.dtype != DType.float32:
            continue
        exponent = _exponent(steps, number) if step.name == "select" else None
        if exponent is not None:
            found[number] = f"exponential[width](v{exponent})"
            exponentials.add(number)
        elif step.name == "div" and _is_above_one(steps, step.operands[1], exponentials):
            found[number] = "quotient_above_one[width]({})".format(", ".join(f"v{each}" for each in step.operands))
    return found


def _exponent(steps: Sequence[Step | Leaf], number: int) -> int | None:
    """The exponent in selections that end at ``number`` and complete an exponential: NaN, then zero and infinity."""
    conditions: list[tuple[str, tuple[int, ...], int]] = []
    while (step := steps[number]) and isinstance(step, Step) and step.name == "select":
        condition, chosen, number = step.operands
        test = steps[condition]
        if not isinstance(test, Step):
            return None
        conditions.append((test.name, test.operands, chosen))
    if not isinstance(step, Step) or step.name != "exp":
        return None
    (x,) = step.operands
    if [name for name, _, _ in conditions] != ["is_nan", "greater", "greater"]:
        return None
    (_, nan, kept), (_, below, zero), (_, above, infinite) = conditions
    whole = nan == (x,) and kept == x and below[1] == x and above[0] == x
    return x if whole and _is(steps[zero], 0) and _is(steps[infinite], np.inf) else None


def _is_above_one(steps: Sequence[Step | Leaf], number: int, exponentials: set[int]) -> bool:
    """Whether the step is one plus an exponential."""
    step = steps[number]
    if not isinstance(step, Step) or step.name != "add":
        return False
    first, second = step.operands
    return (_is(steps[first], 1) and second in exponentials) or (_is(steps[second], 1) and first in exponentials)


def _is(step: Step | Leaf, number: float) -> bool:
    return isinstance(step, Step) and not step.operands and step.number is not None and float(step.number) == number
