"""Chains of operations that a GPU computes faster by other instructions (kernels/common/arithmetic.mojo).

The lowerings (``lowering/numerics.py``) write out what MAX's operations leave undefined: an exponential outside its
range, a sigmoid as a quotient. NVIDIA's instructions handle the former themselves, and their exact division takes ten
times as long as a reciprocal that is accurate to one unit in the last place. Operations without readers stay in the
source; the compiler drops them. GELU and its gradient add one to an error function, which costs more than all their
other operations; before a result is rounded to 16 bits a short polynomial is exact enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from max.dtype import DType

from torch_max_backend.fusion.terms import Leaf, Step

FUNCTIONS = frozenset({"exponential", "one_plus_erf", "quotient_above_one"})
"""Functions of kernels/common/arithmetic.mojo that replace chains of operations."""


_ROOT_OF_HALF = 0.5**0.5


def idioms(steps: Sequence[Step | Leaf], rounded: bool) -> dict[int, str]:
    """The replacements of some steps' expressions, by the steps' numbers.

    Args:
        steps: of a program.
        rounded: all its results have 16 bits.
    """
    found: dict[int, str] = {}
    exponentials: dict[int, int] = {}
    for number, step in enumerate(steps):
        if isinstance(step, Leaf) or step.value.dtype != DType.float32:
            continue
        exponent = _exponent(steps, number) if step.name == "select" else None
        if exponent is not None:
            found[number] = f"exponential[width](v{exponent})"
            exponentials[number] = exponent
        elif step.name == "div" and _is_above_one(steps, step.operands[1], exponentials):
            found[number] = "quotient_above_one[width]({})".format(", ".join(f"v{each}" for each in step.operands))
        elif step.name == "add" and rounded:
            argument = next((each for each in _arguments_of_erf(steps, step)), None)
            if argument is not None:
                found[number] = f"one_plus_erf[width](v{argument}, {_gaussian(steps, argument, exponentials)})"
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


def _arguments_of_erf(steps: Sequence[Step | Leaf], total: Step) -> Iterator[int]:
    """What the error function is taken of, in a sum of it and one."""
    for erf, one in (total.operands, total.operands[::-1]):
        step = steps[erf]
        if isinstance(step, Step) and step.name == "erf" and _is(steps[one], 1):
            yield step.operands[0]


def _gaussian(steps: Sequence[Step | Leaf], number: int, exponentials: Mapping[int, int]) -> str:
    """exp(-v^2) of a step's value v = x / sqrt(2): an exponential of -x^2 / 2 that is there, or one more."""
    x = _multiplicand(steps, number, _ROOT_OF_HALF)
    for made, exponent in exponentials.items():
        square = _multiplicand(steps, exponent, -0.5)
        step = steps[square] if square is not None else None
        if isinstance(step, Step) and step.name == "mul" and step.operands == (x, x):
            return f"v{made}"
    return f"exponential[width](-v{number} * v{number})"


def _multiplicand(steps: Sequence[Step | Leaf], number: int, factor: float) -> int | None:
    """What a step multiplies by the constant."""
    step = steps[number]
    if not isinstance(step, Step) or step.name != "mul":
        return None
    for x, constant in (step.operands, step.operands[::-1]):
        if _is(steps[constant], float(np.float32(factor))):
            return x
    return None


def _is_above_one(steps: Sequence[Step | Leaf], number: int, exponentials: Collection[int]) -> bool:
    """Whether the step is one plus an exponential."""
    step = steps[number]
    if not isinstance(step, Step) or step.name != "add":
        return False
    first, second = step.operands
    return (_is(steps[first], 1) and second in exponentials) or (_is(steps[second], 1) and first in exponentials)


def _is(step: Step | Leaf, number: float) -> bool:
    return isinstance(step, Step) and not step.operands and step.number is not None and float(step.number) == number
