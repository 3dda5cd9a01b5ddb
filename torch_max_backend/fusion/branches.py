"""Places a program's lines in the branch that alone needs them.

An element of a concatenated value is computed from one of its parts, one of a padded value perhaps from none. Where all
elements of a vector are in the same part, a thread goes one way and leaves the other parts' lines out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_INDENT = "    "
_VALUE = re.compile(r"\bv(\d+)\b")

Path = tuple[tuple[int, int], ...]
"""Ways inside each other: the numbers of choices, and which of their ways is taken."""


@dataclass(frozen=True)
class Choice:
    """A value that is one of several, the first whose condition holds for the vector.

    Attributes:
        type: of the value, in Mojo.
        conditions: one for each way but the last.
        values: of the ways.
    """

    type: str
    conditions: tuple[str, ...]
    values: tuple[str, ...]


def nested(steps: Sequence[str | Choice], kept: Collection[int]) -> str:
    """The lines that set v0, v1, ... to the steps' values; those that one way of a choice alone needs are in it.

    Args:
        steps: in their order.
        kept: the numbers of values that are read behind the lines.
    """
    paths: list[Path] = [()] * len(steps)
    uses: list[list[Path]] = [[()] if number in kept else [] for number in range(len(steps))]
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        paths[number] = path = _common(uses[number]) if uses[number] else ()
        ways = [(step, path)] if isinstance(step, str) else [
            (value, (*path, (number, way))) for way, value in enumerate(step.values)
        ]  # fmt: skip
        for text, where in ways:
            for name in _VALUE.findall(text):
                uses[int(name)].append(where)
    return "".join(_lines(steps, paths, ()))


def _common(paths: Sequence[Path]) -> Path:
    """The innermost way in which all of them are."""
    first, last = min(paths), max(paths)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def _lines(steps: Sequence[str | Choice], paths: Sequence[Path], path: Path) -> Iterator[str]:
    indent = _INDENT * (1 + len(path))
    for number, step in enumerate(steps):
        if paths[number] != path:
            continue
        if isinstance(step, str):
            yield f"{indent}var v{number} = {step}\n"
            continue
        yield f"{indent}var v{number}: {step.type}\n"
        for way, value in enumerate(step.values):
            word = "if" if way == 0 else "elif"
            yield f"{indent}{word} {step.conditions[way]}:\n" if way < len(step.conditions) else f"{indent}else:\n"
            yield from _lines(steps, paths, (*path, (number, way)))
            yield f"{indent}{_INDENT}v{number} = {value}\n"
