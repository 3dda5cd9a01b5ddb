"""The plan of a launch list's workspace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_max_backend.launches.memory import ALIGNMENT, Room, Span, Spare, fullest, planned

SPARES = st.lists(st.builds(Spare, st.integers(0, 6000), st.integers(-1, 20)), max_size=5)
SPANS = st.lists(
    st.builds(
        lambda size, first, length, replaces: Span(size, first, first + length, replaces),
        st.integers(0, 5000),
        st.integers(0, 20),
        st.integers(0, 8),
        st.frozensets(st.integers(0, 4), max_size=2),
    ),
    max_size=30,
)


@given(SPANS, SPARES)
def test_values_that_live_together_do_not_overlap(spans: list[Span], spares: list[Spare]) -> None:
    rooms, total = planned(spans, spares)
    placed = list(zip(spans, rooms, strict=True))
    for number, (span, room) in enumerate(placed):
        end = total if room.spare is None else spares[room.spare].size
        assert room.offset % ALIGNMENT == 0 and room.offset >= 0 and room.offset + span.size <= end
        for other, place in placed[:number]:
            together = span.first <= other.last and other.first <= span.last and room.spare == place.spare
            assert not together or room.offset + span.size <= place.offset or place.offset + other.size <= room.offset


@given(SPANS, SPARES)
def test_what_is_still_read_is_written_over_in_its_place_alone(spans: list[Span], spares: list[Spare]) -> None:
    for span, room in zip(spans, planned(spans, spares)[0], strict=True):
        if room.spare is not None and span.first <= spares[room.spare].last:
            assert room.spare in span.replaces and room.offset == 0


@given(SPANS)
def test_the_whole_is_no_more_than_everything_apart(spans: list[Span]) -> None:
    assert planned(spans)[1] <= sum(max(1, -(-span.size // ALIGNMENT)) * ALIGNMENT for span in spans)


def test_memory_is_used_again() -> None:
    """A chain needs two places, however long it is."""
    assert planned([Span(ALIGNMENT, number, number + 1) for number in range(50)])[1] == 2 * ALIGNMENT


def test_spares_come_first() -> None:
    """The smallest one that is large enough and free; it is when the value replaces what is in it."""
    size = 4 * ALIGNMENT
    spares = [Spare(size - 1, -1), Spare(size, 3), Spare(2 * size, 2)]
    assert planned([Span(size, 3, 5)], spares) == ([Room(0, 2)], 0)
    assert planned([Span(size, 3, 5, frozenset({1}))], spares) == ([Room(0, 1)], 0)


def test_few_spares_are_used() -> None:
    size = ALIGNMENT
    rooms, workspace = planned([Span(size, number, number) for number in range(9)], [Spare(size, -1)] * 3)
    assert {room.spare for room in rooms} == {0} and workspace == 0


@given(SPANS)
def test_the_fullest_launch(spans: list[Span]) -> None:
    def live(launch: int) -> int:
        return sum(span.size for span in spans if span.first <= launch <= span.last)

    found = fullest(spans)
    assert (found >= 0) == (sum(span.size for span in spans) > 0)
    assert all(live(launch) <= live(found) for launch in range(30))
