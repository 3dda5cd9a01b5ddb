"""The loops over a result's elements, and how a program's operands are read in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_max_backend.fusion.index_map import refined
from torch_max_backend.fusion.terms import MAX_GUARDS, Terms

MAX_DIGITS = 8
_SHORT_ROWS = {2: "pair", 4: "four"}
"""Lengths of rows of which a GPU's vector has several, as where channels of two tensors take turns, and their names."""
IN_ROWS = frozenset({"linear", "row", "same", "column"})
"""Ways to read a vector's elements at once."""
_BYTES_READ = 128
"""Bytes that a GPU's thread reads before it computes."""
_SHORT_RUN = 2048
"""Elements: parts that follow each other more closely fall to threads of one warp, which then goes all ways."""


@dataclass(frozen=True)
class LoopNest:
    """The loops over a result's elements: their extents (digits of an element's number), and the strides of each leaf,
    and of each guard's place, along them."""

    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    guards: tuple[tuple[int, ...], ...]


def loop_nest_of(terms: Terms) -> LoopNest | None:
    """The loop nest that reads the leaves; None if too many digits would be needed."""
    if len(terms.guards) > MAX_GUARDS:
        return None
    leaves = [leaf.map for leaf in terms.leaves]
    maps = [each.plain for each in leaves if each != terms.identity] + [guard.place for guard in terms.guards]
    found = refined(maps or [terms.identity])
    if found is None or len(found[0]) > MAX_DIGITS:
        return None
    extents, strides = found
    if not extents:
        extents, strides = [terms.size], [[0]] * len(strides)
    others = iter(strides)
    # What is read in order needs no strides.
    own = [[0] * len(extents) if each == terms.identity else next(others) for each in leaves]
    guards = [next(others) for _ in terms.guards]
    return LoopNest(tuple(extents), tuple(map(tuple, own)), tuple(map(tuple, guards)))


def vector_of(terms: Terms, target: Literal["cpu", "gpu"]) -> int:
    """The number of elements per vector: 16 bytes of the narrowest operand on a GPU, 64 of the widest on a CPU."""
    sizes = [value.dtype.size_in_bytes for value in (*terms.roots, *(leaf.value for leaf in terms.leaves))]
    return 64 // max(4, *sizes) if target == "cpu" else min(8, 16 // min(sizes))


def vector_within(terms: Terms, loops: LoopNest, vector: int) -> int:
    """The largest vector up to ``vector`` that leaves no row, or has several short ones; if one can be, all in the same
    part of a concatenated value. ``vector`` if there is none."""
    if len(loops.extents) == 1:
        return vector
    found = [each for each in (vector, vector // 2, vector // 4) if each > 1 and _fits(loops, each)]
    alike = (each for each in found if "row" not in asked_of(terms, loops, each, "gpu"))
    return next(alike, next(iter(found), vector))


def _fits(loops: LoopNest, vector: int) -> bool:
    return loops.extents[-1] % vector == 0 or _short_row(loops, vector) > 0


def _short_row(loops: LoopNest, vector: int) -> int:
    """The length of rows of which a vector has several, whole ones, within one place of the digit before; else 0."""
    row = loops.extents[-1]
    several = row in _SHORT_ROWS and row < vector and len(loops.extents) > 1
    return row if several and loops.extents[-2] * row % vector == 0 else 0


def ways_of(
    terms: Terms, loops: LoopNest, vector: int, target: str, stored: tuple[int, ...] | None = None
) -> list[str]:
    """How each leaf is read; the result of a convolution is ``stored``, by pixels."""
    shared = _share_last_digit(terms, loops, stored)
    ways = []
    for leaf, strides in zip(terms.leaves, loops.strides, strict=True):
        way = "linear"
        if leaf.map != terms.identity:
            guards = [loops.guards[terms.guards.index(guard)] for guard in leaf.map.guards]
            way = _way(loops, strides, leaf.map.constant, guards, vector, target)
            if target == "gpu" and shared and way == "row" and not any(strides[:-1]) and not leaf.map.guards:
                way = "column"
        ways.append(way)
    return ways


def _share_last_digit(terms: Terms, loops: LoopNest, stored: tuple[int, ...] | None) -> bool:
    """Whether the vectors of a GPU's thread do: they lie whole rows apart, or whole pixels."""
    row, extents = loops.extents[-1], terms.extents
    if len(loops.extents) == 1:
        return False
    if stored is not None:
        return stored[-1] % row == 0
    return extents is None or (extents.inner > 1 and extents.inner % row == 0)


def _way(
    loops: LoopNest,
    strides: tuple[int, ...],
    start: int,
    guards: Sequence[tuple[int, ...]],
    vector: int,
    target: str,
) -> str:
    """How a leaf is read."""
    if _crosses(loops, vector, target):
        short = _short_row(loops, vector)
        if not short:
            return "each"
        # What one place of all rows has lies together, and is read or not as a whole.
        places = (start, strides[-1], *strides[:-2])
        together = strides[-2] == 1 and not any(number % (vector // short) for number in places)
        in_lines = together and not any(guard[-2] for guard in guards)
        return _SHORT_ROWS[short] + ("_lines" if in_lines else "s")
    if strides[-1] == 0:
        return "same"
    if strides[-1] == 1 and (target == "cpu" or all(number % vector == 0 for number in (start, *strides[:-1]))):
        return "row"
    return "strided"


def _crosses(loops: LoopNest, vector: int, target: str) -> bool:
    """Whether a vector may leave a row: never on a CPU, and on a GPU only where rows end within one."""
    return target == "gpu" and loops.extents[-1] % vector != 0


def asked_of(terms: Terms, loops: LoopNest, vector: int, target: str) -> list[str]:
    """How each guard is asked: once where it holds for all elements of a vector or for none."""
    if _crosses(loops, vector, target):
        short = _short_row(loops, vector)
        return [f"{_SHORT_ROWS[short]}s" if short else "each"] * len(loops.guards)
    asked = []
    for guard, strides in zip(terms.guards, loops.guards, strict=True):
        numbers = guard.start, guard.count, *strides[:-1]
        whole = target == "gpu" and strides[-1] == 1 and not any(number % vector for number in numbers)
        asked.append("same" if whole or not strides[-1] else "row")
    return asked


def parts_of(terms: Terms, ways: Sequence[str], vector: int) -> int:
    """How many vectors a GPU's thread reads before it computes: as many as leave most registers to the computation."""
    if terms.guards or not IN_ROWS.issuperset(ways):
        return 1
    wide = (leaf for leaf, way in zip(terms.leaves, ways, strict=True) if way in ("linear", "row"))
    size = sum(leaf.value.dtype.size_in_bytes for leaf in wide) * vector
    return next(parts for parts in (4, 2, 1) if parts == 1 or parts * size <= _BYTES_READ)


def outermost_of(loops: LoopNest, asked: Sequence[str]) -> int:
    """The digit by which parts of a concatenated value differ, where they are short."""
    digits = {digit for strides in loops.guards for digit, stride in enumerate(strides) if stride}
    if len(digits) != 1 or set(asked) != {"same"} or len(loops.extents) - 1 in digits:
        return 0
    (digit,) = digits
    return digit if math.prod(loops.extents[digit + 1 :]) < _SHORT_RUN else 0
