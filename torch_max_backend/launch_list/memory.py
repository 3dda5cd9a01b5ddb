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
        replaces: contents of spares, as the spare's number and the offset there, that launch ``first`` reads last, and
            of which it reads an element for the value's element at the same place alone.
        takes: numbers of the spans that launch ``first`` reads last in the same way, no larger and no smaller.
    """

    size: int
    first: int
    last: int
    replaces: frozenset[tuple[int, int]] = frozenset()
    takes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Content:
    """A part of a spare that no launch before ``first`` and none after ``last`` needs.

    Attributes:
        offset: bytes from the spare's beginning.
        size: bytes.
        last: the launch that reads it last; -1 for none.
        first: the launch that makes it; -1 where it is there before.
    """

    offset: int
    size: int
    last: int
    first: int = -1


@dataclass(frozen=True)
class Spare:
    """Memory that values may lie in where its contents are needed no more, or are not made yet.

    Attributes:
        size: bytes.
        contents: apart from each other.
    """

    size: int
    contents: tuple[Content, ...]


@dataclass(frozen=True)
class Room:
    """Where a value lies: in the workspace, or in a spare.

    Attributes:
        offset: bytes from its beginning.
        spare: the spare's number; None for the workspace.
    """

    offset: int
    spare: int | None = None


@dataclass(frozen=True)
class Lease:
    """Bytes of the workspace that a value has for some launches.

    Attributes:
        offset: bytes from the workspace's beginning.
        size: bytes.
        first: the first launch.
        last: the last one.
    """

    offset: int
    size: int
    first: int
    last: int


def lease_in(size: int, leases: Sequence[Lease], span: Span) -> Lease | None:
    """Room for one more value in a workspace of ``size`` bytes, at the lowest offset that is free for as long as it
    lives; None where there is none."""
    offset = _Tenants(leases).lowest(span)
    return Lease(offset, span.size, span.first, span.last) if offset + span.size <= size else None


def planned(spans: Sequence[Span], spares: Sequence[Spare] = ()) -> tuple[list[Room], int]:
    """Room for each span, such that spans that live at the same time do not overlap, and the workspace's bytes.

    Values are placed in the order of their size, each at the lowest offset that is free for as long as it lives
    (greedy by size, Pisarchyk and Lee 2020, https://arxiv.org/abs/2001.03288): in a spare that has one, else in the
    workspace. There a value lies where what it takes lies, if it can. Few spares are used: one that is taken already
    goes before the others, a small one before a large one.
    """
    rooms: list[Room | None] = [None] * len(spans)
    workspace = _Tenants()
    partners = _partners(spans)
    tenants = [_Tenants(spare.contents) for spare in spares]
    for number in sorted(range(len(spans)), key=lambda each: -spans[each].size):
        span = spans[number]
        large = (each for each, spare in enumerate(spares) if spare.size >= span.size)
        for each in sorted(large, key=lambda each: (not tenants[each].end, spares[each].size)):
            offset = tenants[each].replacing(span, [at for spare, at in span.replaces if spare == each])
            if offset is None:
                offset = tenants[each].lowest(span)
            if offset + span.size <= spares[each].size:
                tenants[each].take(span, offset)
                rooms[number] = Room(offset, each)
                break
        else:
            near = [(spans[each], room) for each in partners[number] if (room := rooms[each]) is not None]
            offset = workspace.beside(span, [(other, room.offset) for other, room in near if room.spare is None])
            if offset is None:
                offset = workspace.lowest(span)
            workspace.take(span, offset)
            rooms[number] = Room(offset)
    return [room for room in rooms if room is not None], workspace.end


def _partners(spans: Sequence[Span]) -> list[list[int]]:
    """For each span those that may lie in its place, although a launch needs both: what it takes, what takes it."""
    found: list[list[int]] = [[] for _ in spans]
    for number, span in enumerate(spans):
        for other in sorted(span.takes):
            found[number].append(other)
            found[other].append(number)
    return found


def fullest(spans: Sequence[Span | Lease]) -> int:
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
    """The spans in one piece of memory, beside what it holds before.

    Attributes:
        end: of the spans.
    """

    def __init__(self, contents: Sequence[Content | Lease] = ()) -> None:
        self.end = 0
        self._placed = sorted((each.offset, each.offset + each.size, each.first, each.last) for each in contents)

    def lowest(self, span: Span) -> int:
        """The lowest offset that is free for as long as ``span`` lives."""
        offset = 0
        for begin, end, first, last in self._placed:
            if first <= span.last and span.first <= last:
                if offset + _taken(span) <= begin:
                    break
                offset = max(offset, rounded_up(end, ALIGNMENT))
        return offset

    def replacing(self, span: Span, offsets: Sequence[int]) -> int | None:
        """The offset among ``offsets`` of a content that ``span`` may replace, where nothing else is in the way."""
        for offset in sorted(offsets):
            others = [
                each for each in self._placed
                if each[2] <= span.last and span.first <= each[3]
                and each[0] < offset + span.size and offset < each[1]
            ]  # fmt: skip
            if [(each[0], each[2]) for each in others] == [(offset, -1)]:
                return offset
        return None

    def beside(self, span: Span, partners: Sequence[tuple[Span, int]]) -> int | None:
        """The lowest offset of a partner at which nothing but partners is in the way of ``span``."""
        allowed = {_place(each, offset) for each, offset in partners}
        for offset in sorted(offset for _, offset in partners):
            begin, end, first, last = _place(span, offset)
            others = (
                each for each in self._placed
                if each[2] <= last and first <= each[3] and each[0] < end and begin < each[1]
            )  # fmt: skip
            if all(each in allowed and each[0] == offset for each in others):
                return offset
        return None

    def take(self, span: Span, offset: int) -> None:
        """Places ``span``."""
        place = _place(span, offset)
        self.end = max(self.end, place[1])
        insort(self._placed, place)


def _place(span: Span, offset: int) -> tuple[int, int, int, int]:
    """Where ``span`` begins and ends, in bytes and in launches."""
    return offset, offset + _taken(span), span.first, span.last


def _taken(span: Span) -> int:
    return max(ALIGNMENT, rounded_up(span.size, ALIGNMENT))
