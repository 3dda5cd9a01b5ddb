"""Interpolation's kernels on a GPU, against float64 on random problems; and the same bits from every run."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.kernels.interpolation.calls import Calls
from benchmarks.kernels.interpolation.drawn import draw
from benchmarks.kernels.interpolation.random_check import DTYPES, check
from benchmarks.kernels.library import LAYOUTS, shown
from tests.kernels.test_interpolation import CHOSEN

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls(torch.device("cuda", torch.cuda.current_device()), DTYPES)


@pytest.mark.parametrize(("seed", "count", "most"), [(3, 3000, 1 << 15), (4, 200, 1 << 20)])
def test_random_problems(calls: Calls, seed: int, count: int, most: int) -> None:
    problems = [each for each, _ in zip(draw(random.Random(seed), most=most), range(count), strict=False)]
    assert check(calls, problems, DTYPES) == []


@pytest.mark.parametrize("drawn", CHOSEN, ids=str)
def test_chosen_problems(calls: Calls, drawn: object) -> None:
    assert check(calls, [drawn] * 6, DTYPES) == []  # type: ignore[list-item]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_repeat_to_the_bit(calls: Calls, layout: str) -> None:
    for drawn, _ in zip(draw(random.Random(5), most=1 << 20, least=1 << 16), range(20), strict=False):
        dy = shown(torch.randn(drawn.result_shape), layout).to(calls.device)
        results = []
        for _ in range(3):
            dx = torch.empty_like(shown(torch.empty(drawn.shape), layout), device=calls.device)
            calls.bind(dy, dx, drawn.axes(is_gpu=True), gradient=True)()
            results.append(dx)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
