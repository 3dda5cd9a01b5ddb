"""The plan of a launch list's workspace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_max_backend.launches.memory import ALIGNMENT, Span, planned

SPANS = st.builds(
    lambda size, first, length: Span(size, first, first + length),
    st.integers(0, 5000),
    st.integers(0, 20),
    st.integers(0, 8),
)


@given(st.lists(SPANS, max_size=30))
def test_values_that_live_together_do_not_overlap(spans: list[Span]) -> None:
    offsets, total = planned(spans)
    placed = list(zip(spans, offsets, strict=True))
    for number, (span, offset) in enumerate(placed):
        assert offset % ALIGNMENT == 0 and offset >= 0 and offset + span.size <= total
        for other, place in placed[:number]:
            together = span.first <= other.last and other.first <= span.last
            assert not together or offset + span.size <= place or place + other.size <= offset


@given(st.lists(SPANS, max_size=30))
def test_the_whole_is_no_more_than_everything_apart(spans: list[Span]) -> None:
    assert planned(spans)[1] <= sum(max(1, -(-span.size // ALIGNMENT)) * ALIGNMENT for span in spans)


def test_memory_is_used_again() -> None:
    """A chain needs two places, however long it is."""
    assert planned([Span(ALIGNMENT, number, number + 1) for number in range(50)])[1] == 2 * ALIGNMENT
