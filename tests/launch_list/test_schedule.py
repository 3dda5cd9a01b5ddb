"""The order of launches, and what it does to a backward graph's memory."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.launch_list import LaunchList
from torch_max_backend.launch_list.schedule import launch_order

Launches = list[tuple[list[int], int]]


@st.composite
def launches(draw: st.DrawFn) -> Launches:
    """Of each launch the earlier launches whose results it reads, and the bytes that it makes."""
    count = draw(st.integers(1, 16))
    return [
        (draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else [], draw(st.integers(0, 9)))
        for number in range(count)
    ]


def peak(given: Launches, order: list[int]) -> int:
    """Bytes that live at the same time, results that nobody reads apart."""
    place = {number: at for at, number in enumerate(order)}
    last = {value: max(place[n] for n, (read, _) in enumerate(given) if value in read) for value in read_values(given)}
    return max(
        sum(given[value][1] for value in last if place[value] <= at <= last[value]) for at in range(len(order))
    )  # fmt: skip


def read_values(given: Launches) -> set[int]:
    return {value for read, _ in given for value in read}


@given(launches(), st.sets(st.integers(0, 15)))
def test_makers_come_before_readers_and_fixed_launches_keep_their_order(steps: Launches, fixed: set[int]) -> None:
    sizes = {number: steps[number][1] for number in read_values(steps)}
    order = launch_order([read for read, _ in steps], [[number] for number in range(len(steps))], sizes, fixed)
    place = {number: at for at, number in enumerate(order)}
    assert sorted(order) == list(range(len(steps)))
    assert all(place[value] < place[number] for number, (read, _) in enumerate(steps) for value in read)
    for first, second in itertools.pairwise(sorted(fixed & set(order))):
        assert place[first] < place[second]
    # What stood before a fixed launch still does: it may write over what they read.
    assert all(place[other] < place[number] for number in fixed & set(order) for other in range(number))


def test_sums_at_the_end_come_forward() -> None:
    """A chain of values, each of which a sum reads at the end: two values live at a time instead of all."""
    chain: Launches = [([number - 1] if number else [], 8) for number in range(10)]
    steps: Launches = [*chain, *(([number], 0) for number in range(10))]
    sizes = dict.fromkeys(range(10), 8)
    order = launch_order([read for read, _ in steps], [[number] for number in range(len(steps))], sizes, ())
    assert peak(steps, list(range(len(steps)))) == 80
    assert peak(steps, order) == 16


def test_a_backward_pass_of_many_layers_needs_the_memory_of_one() -> None:
    """Linear layers with biases, whose gradients are sums."""

    def workspace(layers: int) -> int:
        blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(layers))
        torch.compiler.reset()
        with recorded_graphs() as graphs:
            torch.compile(nn.Sequential(*blocks), backend=build_only)(torch.randn(512, 32)).sum().backward()
        listing = graphs[1].executables[0].built.listing
        assert isinstance(listing, LaunchList)
        return listing.workspace

    assert workspace(6) < 1.1 * workspace(2)
