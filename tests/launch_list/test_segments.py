"""Where a launch list is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_max_backend.launch_list import Kind, Launch, LaunchList, Place
from torch_max_backend.launch_list.segments import Segments, segments_of


def _listing(*written: tuple[int, ...], results: int) -> LaunchList:
    """Launches that name these results."""
    launches = tuple(Launch("f", (7, *(Place(Kind.RESULT, number) for number in of))) for of in written)
    return LaunchList(launches, 1, tuple(Place(Kind.RESULT, number) for number in range(results)), (), 0)


def test_a_segment_ends_where_it_has_completed_enough() -> None:
    listing = _listing((2,), (1,), (), (0,), (3,), results=4)
    assert segments_of(listing, [10, 10, 10, 10], 20) == Segments((2, 5), (1, 0, 0, 1))
    assert segments_of(listing, [10, 10, 10, 10], 10) == Segments((1, 2, 4, 5), (2, 1, 0, 3))


@pytest.mark.parametrize("least", [40, 41])
def test_too_little_is_not_cut(least: int) -> None:
    assert segments_of(_listing((0,), (1,), results=2), [20, 20], least) is None


def test_a_result_that_is_read_later_is_not_complete() -> None:
    """Whoever gets it may write to it."""
    assert segments_of(_listing((0,), (1,), (2, 0), results=3), [10, 10, 10], 10) == Segments((2, 3), (1, 0, 1))


def test_a_copy_and_what_it_copies_are_complete_at_the_end() -> None:
    listing = _listing((0,), (1,), (2,), results=4)
    listing = replace(listing, results=(*listing.results[:3], Place(Kind.RESULT, 0)))
    assert segments_of(listing, [10, 10, 10, 10], 10) == Segments((2, 3), (1, 0, 1, 1))


def test_results_of_one_launch_stay_together() -> None:
    assert segments_of(_listing((0, 1), (2,), results=3), [10, 10, 10], 10) == Segments((1, 2), (0, 0, 1))


def test_a_list_that_updates_arguments_is_not_cut() -> None:
    assert segments_of(replace(_listing((0,), (1,), results=2), updates={0: 0}), [10, 10], 5) is None


def test_a_gradient_is_complete_when_its_weight_is_read_no_more() -> None:
    launches = (
        Launch("f", (Place(Kind.RESULT, 0),)), Launch("f", (Place(Kind.ARGUMENT, 0),)),
        Launch("f", (Place(Kind.RESULT, 1),)),
    )  # fmt: skip
    listing = LaunchList(launches, 1, tuple(Place(Kind.RESULT, number) for number in range(2)), (), 0)
    assert segments_of(listing, [10, 10], 10) == Segments((1, 3), (0, 1))
    assert segments_of(listing, [10, 10], 10, {0: [0]}) == Segments((2, 3), (0, 1))
