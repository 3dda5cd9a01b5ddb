"""Plans the workspace: an offset for each value that lives between two launches, first fit, the largest value first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes: as CUDA's allocator deals memory out, and more than any vector load asks for."""

TORCH_ALIGNMENT = 512
"""The same of PyTorch's allocator."""


def rounded_up(size: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is no less than ``size``."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Span:
    """A value that lives between two launches.

    Attributes:
        size: bytes.
        first: the launch that makes it.
        last: the launch that reads it last.
        replaces: spares that launch ``first`` reads last, and of which it reads an element for the value's element at
            the same place alone.
    """

    size: int
    first: int
    last: int
    replaces: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Spare:
    """Memory with something in it that no launch after ``last`` needs.

    Attributes:
        size: bytes.
        last: the launch that reads the content last; -1 for none.
    """

    size: int
    last: int


@dataclass(frozen=True)
class Room:
    """Where a value lies: in the workspace, or in a spare.

    Attributes:
        offset: bytes from its beginning.
        spare: the spare's number; None for the workspace.
    """

    offset: int
    spare: int | None = None


def planned(spans: Sequence[Span], spares: Sequence[Spare] = ()) -> tuple[list[Room], int]:
    """Room for each span, such that spans that live at the same time do not overlap, and the workspace's bytes.

    Values are placed in the order of their size, each at the lowest offset that is free for as long as it lives
    (greedy by size, Pisarchyk and Lee 2020, https://arxiv.org/abs/2001.03288): in a spare that has one, else in the
    workspace. Few spares are used: one that is taken already goes before the others, a small one before a large one.
    """
    rooms = [Room(0)] * len(spans)
    workspace = _Tenants()
    tenants = [_Tenants() for _ in spares]
    for number in sorted(range(len(spans)), key=lambda each: -spans[each].size):
        span = spans[number]
        for each in sorted(range(len(spares)), key=lambda each: (not tenants[each].end, spares[each].size)):
            spare = spares[each]
            offset = tenants[each].lowest(span)
            over = each in span.replaces and offset == 0
            if offset + span.size <= spare.size and (span.first > spare.last or over):
                tenants[each].take(span, offset)
                rooms[number] = Room(offset, each)
                break
        else:
            offset = workspace.lowest(span)
            workspace.take(span, offset)
            rooms[number] = Room(offset)
    return rooms, workspace.end


def fullest(spans: Sequence[Span]) -> int:
    """The launch at which the spans that live have the most bytes, the first of several; -1 without spans."""
    changes: dict[int, int] = {}
    for span in spans:
        changes[span.first] = changes.get(span.first, 0) + span.size
        changes[span.last + 1] = changes.get(span.last + 1, 0) - span.size
    live, most, found = 0, 0, -1
    for launch in sorted(changes):
        live += changes[launch]
        if live > most:
            most, found = live, launch
    return found


class _Tenants:
    """The spans in one piece of memory."""

    def __init__(self) -> None:
        self.end = 0
        self._placed: list[tuple[int, int, int, int]] = []

    def lowest(self, span: Span) -> int:
        """The lowest offset that is free for as long as ``span`` lives."""
        offset = 0
        for begin, end, first, last in self._placed:
            if first <= span.last and span.first <= last:
                if offset + _taken(span) <= begin:
                    break
                offset = max(offset, end)
        return offset

    def take(self, span: Span, offset: int) -> None:
        """Places ``span``."""
        end = offset + _taken(span)
        self.end = max(self.end, end)
        insort(self._placed, (offset, end, span.first, span.last))


def _taken(span: Span) -> int:
    return max(ALIGNMENT, rounded_up(span.size, ALIGNMENT))
