"""The differences of two files of launches (``benchmarks launches``), in sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SETTINGS = ("model", "batch", "target")
_TOKEN = re.compile(r'"[^"]*"|DType\.\w+|[A-Za-z_]\w*|\d[\w.]*|\S')
_NAME = re.compile(r"[A-Za-z_]\w*")
_LITERALS = frozenset({"True", "False"})
_SHOWN = 20
"""Differences of one kind that are told one by one."""

Row = Mapping[str, Any]


@dataclass
class Comparison:
    """The result of comparing two files.

    Attributes:
        launches: how many are equal but for names.
        kernels: how many kernels have the same PTX but for names; None where a file has none.
        differences: in sentences.
        renamed: new names by old ones.
    """

    launches: int = 0
    kernels: int | None = None
    differences: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [*self.differences, *(f"renamed: {old} is now {new}" for old, new in self.renamed.items())]
        kernels = "" if self.kernels is None else f" and the PTX of {self.kernels} kernels"
        lines.append(f"{self.launches} launches{kernels} are equal but for names")
        if self.differences:
            lines.append("there are differences")
        return "\n".join(lines)


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares the contents of two files.

    Raises:
        ValueError: they are of other models, batches or targets.
    """
    other = [name for name in SETTINGS if before[name] != after[name]]
    if other:
        raise ValueError(f"the files have another {', '.join(other)}")
    comparison, names = Comparison(), _Names()
    graphs = [_by_graph(each["graphs"]) for each in (before, after)]
    launches = [_by_graph(each["rows"]) for each in (before, after)]
    for graph in dict.fromkeys([*graphs[0], *graphs[1]]):
        if graph not in graphs[0] or graph not in graphs[1]:
            comparison.differences.append(f"{graph}: is {'new' if graph in graphs[1] else 'gone'}")
            continue
        sides = [
            [_Launch(row, each["functions"][row["function"]]) for row in rows.get(graph, ())]
            for each, rows in zip((before, after), launches, strict=True)
        ]
        found = list(_between(*sides, names))
        comparison.launches += len(sides[0]) - sum(number is not None for number, _ in found)
        comparison.differences += _told(graph, [text for _, text in found])
        (old,), (new,) = graphs[0][graph], graphs[1][graph]
        for what in (name for name in old if name not in ("model", "graph")):
            one, other = ([each] if isinstance(each, int) else each for each in (old[what], new[what]))
            comparison.differences += [f"{graph}, {what}: {text}" for text in _of_lists("value", one, other)][:_SHOWN]
    comparison.renamed = {old: new for old, new in names.after.items() if old != new}
    if "kernels" in before and "kernels" in after:
        _compare_kernels(before["kernels"], after["kernels"], comparison)
    return comparison


def _by_graph(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['model']}, {row['graph']}", []).append(row)
    return found


def _told(graph: str, texts: Sequence[str]) -> list[str]:
    rest = [f"{graph}: and {len(texts) - _SHOWN} differences more"] if len(texts) > _SHOWN else []
    return [f"{graph}: {text}" for text in texts[:_SHOWN]] + rest


class _Names:
    """A one-to-one map from the names of before to those of after."""

    def __init__(self) -> None:
        self.after: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def agree(self, before: Sequence[str], after: Sequence[str]) -> bool:
        """Whether two lists of tokens are equal but for names, and these agree with what was seen so far."""
        if len(before) != len(after):
            return False
        found = [(old, new) for old, new in zip(before, after, strict=True) if _is_name(old) or old != new]
        if not all(_is_name(old) and _is_name(new) for old, new in found):
            return False
        forth, back = dict(found), {new: old for old, new in found}
        if any(forth[old] != new or back[new] != old for old, new in found):
            return False
        if any(self.after.get(old, new) != new or self._before.get(new, old) != old for old, new in found):
            return False
        self.after |= forth
        self._before |= back
        return True


def _is_name(token: str) -> bool:
    return bool(_NAME.fullmatch(token)) and token not in _LITERALS


class _Launch:
    """A launch, with its function's source."""

    def __init__(self, row: Row, source: str) -> None:
        self.row = row
        self.tokens = _TOKEN.findall(source)
        self.called = source.split("\n", 1)[0]
        self.text = f"launch {row['launch']} ({row['ops'] or self.called.partition('[')[0]})"
        extents = tuple(tuple(tensor[1:]) for tensor in row["tensors"])
        form = tuple("name" if _is_name(token) else token for token in self.tokens)
        self.key = (form, tuple(row["numbers"]), extents)
        """Equal for launches that are equal but for names and places."""


def _between(before: list[_Launch], after: list[_Launch], names: _Names) -> Iterator[tuple[int | None, str]]:
    """The differences, each with the number that its launch had before; None for a new one."""
    matcher = difflib.SequenceMatcher(None, [each.key for each in before], [each.key for each in after], autojunk=False)
    for kind, begin, end, first, last in matcher.get_opcodes():
        if kind == "equal" or end - begin == last - first:
            for old, new in zip(before[begin:end], after[first:last], strict=True):
                text = "; ".join(_of_pair(old, new, names))
                if text:
                    yield old.row["launch"], f"{old.text}: {text}"
        else:
            yield from ((each.row["launch"], f"{each.text}: is gone") for each in before[begin:end])
            yield from ((None, f"{each.text}: is new, calls {each.called}") for each in after[first:last])


def _of_pair(old: _Launch, new: _Launch, names: _Names) -> Iterator[str]:
    """The differences between a launch and the one in its place, in words."""
    if not names.agree(old.tokens, new.tokens):
        yield f"called {old.called}, calls {new.called}" if old.called != new.called else "its program has changed"
    yield from _of_lists("number", old.row["numbers"], new.row["numbers"])
    pairs = list(zip(old.row["tensors"], new.row["tensors"], strict=False))
    if len(old.row["tensors"]) != len(new.row["tensors"]):
        yield f"had {len(old.row['tensors'])} tensors, has {len(new.row['tensors'])}"
    for number, ((place, *extents), (other, *others)) in enumerate(pairs):
        if place != other:
            yield f"tensor {number} lay at {place}, lies at {other}"
        if extents != others:
            yield f"tensor {number} had extents {extents}, has {others}"


def _of_lists(what: str, old: Sequence[object], new: Sequence[object]) -> Iterator[str]:
    if len(old) != len(new):
        yield f"had {len(old)} {what}s, has {len(new)}"
        return
    for number, (one, other) in enumerate(zip(old, new, strict=True)):
        if one != other:
            yield f"{what} {number} was {one}, is {other}"


def _compare_kernels(before: Mapping[str, list[str]], after: Mapping[str, list[str]], comparison: Comparison) -> None:
    """Adds what is different about the kernels."""
    comparison.kernels = len(before.keys() & after.keys())
    gone, new = (
        [name for digest in one.keys() - other.keys() for name in one[digest]]
        for one, other in ((before, after), (after, before))
    )
    words = [(name, "has other PTX") for name in gone if name in new]
    words += [(name, "is gone") for name in gone if name not in new]
    words += [(name, "is new") for name in new if name not in gone]
    comparison.differences += [f"kernel {name}: {text}" for name, text in sorted(set(words))]
    for digest in before.keys() & after.keys():
        if before[digest] != after[digest]:
            comparison.renamed |= {", ".join(before[digest]): ", ".join(after[digest])}
