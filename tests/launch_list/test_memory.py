"""The plan of a launch list's workspace."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from torch_max_backend.launch_list.memory import (
    ALIGNMENT,
    Content,
    Lease,
    Room,
    Span,
    Spare,
    fullest,
    lease_in,
    planned,
)

#: Gap before a content, its size, who reads it last, and for how many launches it is there.
PARTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3000), st.integers(-1, 20), st.integers(0, 20)), min_size=1, max_size=4
)


def spare(parts: list[tuple[int, int, int, int]]) -> Spare:
    """Contents one behind the other, aligned as values in packs are."""
    contents, end = [], 0
    for gap, size, last, launches in parts:
        begin = end + gap * 2 * ALIGNMENT
        contents.append(Content(begin, size, last, max(-1, last - launches)))
        end = begin + -(-size // (2 * ALIGNMENT)) * 2 * ALIGNMENT
    return Spare(contents[-1].offset + contents[-1].size, tuple(contents))


def whole(size: int, last: int) -> Spare:
    """One content."""
    return Spare(size, (Content(0, size, last),))


SPARES = st.lists(PARTS.map(spare), max_size=5)
SPANS = st.lists(
    st.builds(
        lambda size, first, length: Span(size, first, first + length),
        st.integers(0, 5000),
        st.integers(0, 20),
        st.integers(0, 8),
    ),
    max_size=30,
)


@given(SPANS, SPARES, st.randoms())
def test_contents_are_written_over_when_they_are_read_no_more(
    spans: list[Span], spares: list[Spare], random: Random
) -> None:
    """Or by the launch that reads them last, in their place, where it says so."""
    spans = [_replacing(span, spares) if random.random() < 0.5 else span for span in spans]
    for span, room in zip(spans, planned(spans, spares)[0], strict=True):
        for content in spares[room.spare].contents if room.spare is not None else ():
            apart = room.offset + span.size <= content.offset or content.offset + content.size <= room.offset
            there = (room.spare, content.offset) in span.replaces and room.offset == content.offset
            apart = apart or span.first > content.last or span.last < content.first
            assert apart or (there and content.first < 0) or not span.size


def bounds(span: Span) -> tuple[int, int, int]:
    return span.size, span.first, span.last


def _replacing(span: Span, spares: list[Spare]) -> Span:
    """The value takes the place of all contents that it may."""
    dying = {
        (number, content.offset)
        for number, each in enumerate(spares)
        for content in each.contents
        if content.last == span.first and content.size == span.size
    }
    return replace(span, replaces=frozenset(dying))


def _taking(spans: list[Span]) -> list[Span]:
    """Each value takes all that it may: what is as large and read last where it is made."""
    return [
        replace(
            span,
            takes=frozenset(
                number for number, other in enumerate(spans)
                if other.last == span.first > other.first and other.size == span.size
            ),
        )
        for span in spans
    ]  # fmt: skip


@given(SPANS, SPARES, st.booleans(), st.sampled_from([1, 2000]))
def test_values_that_live_together_do_not_overlap(
    spans: list[Span], spares: list[Spare], taking: bool, step: int
) -> None:
    """But for one that lies where the other one lies, which it takes."""
    spans = [replace(span, size=span.size // step * step) for span in spans]
    spans = _taking(spans) if taking else spans
    rooms, total = planned(spans, spares)
    placed = list(zip(spans, rooms, strict=True))
    for number, (span, room) in enumerate(placed):
        end = total if room.spare is None else spares[room.spare].size
        assert room.offset % ALIGNMENT == 0 and room.offset >= 0 and room.offset + span.size <= end
        for index, (other, place) in enumerate(placed[:number]):
            together = span.first <= other.last and other.first <= span.last and room.spare == place.spare
            apart = room.offset + span.size <= place.offset or place.offset + other.size <= room.offset
            takes = number in other.takes or index in span.takes
            assert not together or apart or (takes and room == place and span.size == other.size)


@given(SPANS, SPANS)
def test_more_values_lie_where_nothing_else_does(spans: list[Span], more: list[Span]) -> None:
    rooms, total = planned(spans)
    leases = [Lease(room.offset, *bounds(span)) for span, room in zip(spans, rooms, strict=True)]
    for span in more:
        lease = lease_in(total, leases, span)
        if lease is None:
            continue
        assert bounds(span) == (lease.size, lease.first, lease.last) and 0 <= lease.offset <= total - span.size
        for other in leases:
            together = lease.first <= other.last and other.first <= lease.last
            apart = lease.offset + lease.size <= other.offset or other.offset + other.size <= lease.offset
            assert apart or not together
        leases.append(lease)


def test_a_value_that_lives_before_all_others_lies_below_them() -> None:
    leases = [Lease(0, 4 * ALIGNMENT, 3, 9)]
    assert lease_in(4 * ALIGNMENT, leases, Span(3 * ALIGNMENT, 0, 2)) == Lease(0, 3 * ALIGNMENT, 0, 2)
    assert lease_in(4 * ALIGNMENT, leases, Span(3 * ALIGNMENT, 0, 3)) is None


@given(SPANS)
def test_the_whole_is_no_more_than_everything_apart(spans: list[Span]) -> None:
    assert planned(spans)[1] <= sum(max(1, -(-span.size // ALIGNMENT)) * ALIGNMENT for span in spans)


def test_memory_is_used_again() -> None:
    """A chain needs two places, however long it is."""
    assert planned([Span(ALIGNMENT, number, number + 1) for number in range(50)])[1] == 2 * ALIGNMENT


def test_a_sum_takes_the_place_of_an_operand() -> None:
    """A chain of sums needs the place of one of them beside that of the next operand."""
    size = ALIGNMENT
    operands = [Span(size, number, number + 1) for number in range(0, 20, 2)]
    before = [0, *range(len(operands), 2 * len(operands) - 1)]
    sums = [
        Span(size, operand.last, operand.last + 2, takes=frozenset({other}))
        for operand, other in zip(operands, before, strict=True)
    ]
    rooms, total = planned([*operands, *sums])
    assert total == 2 * ALIGNMENT and len({room.offset for room in rooms[len(operands) :]}) == 1
    assert planned([replace(span, takes=frozenset()) for span in (*operands, *sums)])[1] == 3 * ALIGNMENT


def test_no_two_results_take_one_place() -> None:
    size = ALIGNMENT
    both = [Span(size, 1, 2, takes=frozenset({0})), Span(size, 1, 2, takes=frozenset({0}))]
    rooms, total = planned([Span(size, 0, 1), *both])
    assert rooms[1] != rooms[2] and total == 2 * ALIGNMENT


def test_spares_come_first() -> None:
    """The smallest one that is large enough and free; it is when the value replaces what is in it."""
    size = 4 * ALIGNMENT
    spares = [whole(size - 1, -1), whole(size, 3), whole(2 * size, 2)]
    assert planned([Span(size, 3, 5)], spares) == ([Room(0, 2)], 0)
    assert planned([Span(size, 3, 5, frozenset({(1, 0)}))], spares) == ([Room(0, 1)], 0)


def test_what_is_made_later_lends_its_memory() -> None:
    result = Spare(2 * ALIGNMENT, (Content(0, 2 * ALIGNMENT, 99, 5),))
    rooms, total = planned([Span(2 * ALIGNMENT, 1, 4), Span(2 * ALIGNMENT, 4, 5)], [result])
    assert rooms == [Room(0, 0), Room(0)] and total == 2 * ALIGNMENT


def test_neighbours_in_a_spare_serve_together() -> None:
    """A value lies over two contents when both are needed no more, and takes the place of the one that it replaces."""
    size = 2 * ALIGNMENT
    spares = [Spare(3 * size, (Content(0, size, 9), Content(size, size, 2), Content(2 * size, size, 4)))]
    assert planned([Span(2 * size, 5, 6)], spares) == ([Room(size, 0)], 0)
    assert planned([Span(2 * size, 4, 6)], spares) == ([Room(0)], 2 * size)
    assert planned([Span(size, 4, 6, frozenset({(0, 2 * size)}))], spares)[0] == [Room(2 * size, 0)]
    taken = [Span(size + 1, 3, 3), Span(size, 4, 6, frozenset({(0, 2 * size)}))]
    assert planned(taken, spares)[0] == [Room(0), Room(2 * size, 0)]


def test_few_spares_are_used() -> None:
    size = ALIGNMENT
    rooms, workspace = planned([Span(size, number, number) for number in range(9)], [whole(size, -1)] * 3)
    assert {room.spare for room in rooms} == {0} and workspace == 0


@given(SPANS)
def test_the_fullest_launch(spans: list[Span]) -> None:
    def live(launch: int) -> int:
        return sum(span.size for span in spans if span.first <= launch <= span.last)

    found = fullest(spans)
    assert (found >= 0) == (sum(span.size for span in spans) > 0)
    assert all(live(launch) <= live(found) for launch in range(30))
