"""Sorting, the largest elements, and windows along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe

NAN, INF = math.nan, math.inf


def _repeating(rows: int, length: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Rows of few different numbers, among them -0 and 0, NaN and infinities."""

    def make(generator: torch.Generator) -> torch.Tensor:
        values = torch.tensor([-INF, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 3e38, INF, NAN])
        return values[torch.randint(0, len(values), (rows, length), generator=generator)]

    return make


def _distinct(rows: int, length: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Rows of numbers that are all different."""

    def make(generator: torch.Generator) -> torch.Tensor:
        return torch.stack([torch.randperm(length, generator=generator) / 7 - 99 for _ in range(rows)])

    return make


def _with_nan(generator: torch.Generator) -> torch.Tensor:
    """Numbers that are all different, and a NaN in two of the rows: of equal ones, PyTorch's kernels differ in which is
    the median."""
    x = torch.randperm(28, generator=generator).view(4, 7) / 7 - 2
    x[1, 2] = x[2, 4] = NAN
    return x


CASES = [
    # Equal elements, NaN and infinities: what comes first is told by the indices.
    Case(
        "sort_stable",
        lambda x: (
            *torch.sort(x, dim=0, stable=True),
            torch.sort(x).values,
            torch.argsort(x, dim=1, descending=True, stable=True),
        ),
        recipe(lambda g: torch.tensor([[1.0, NAN, 1.0, -INF], [0.0, 2.0, NAN, -INF], [1.0, -3.0, NAN, INF]])),
        exact=True,
    ),
    Case("median", lambda x, y: (*x.median(1), *x.nanmedian(0, keepdim=True), x.median(), x.nanmedian(), *y.median(0)),
         recipe(_with_nan, lambda g: torch.randperm(24, generator=g).view(8, 3)), exact=True),
    Case("median_backward", gradients(lambda x: (x.median(1).values, x.nanmedian())), recipe(_distinct(4, 6)),
         exact=True),
    # More than a CPU sorts by insertion, or a GPU by counting or in one tile: with ties, zeros of both signs and NaN.
    Case("sort_long", lambda x: (*x.sort(stable=True), *x.sort(stable=True, descending=True)),
         recipe(_repeating(5, 9001)), exact=True),
    Case("topk_long", lambda x: (*x.topk(300, 1), *x.topk(7, 1, largest=False)),
         recipe(_distinct(3, 9001)), exact=True),
    Case("sort_int64", lambda x: torch.sort(x, stable=True), recipe(integers(2, 70, dtype=torch.int64)), exact=True),
    Case("sort_bf16", lambda x: torch.sort(x, stable=True), recipe(randn(2, 70, dtype=torch.bfloat16)), exact=True),
    Case("sort_nothing", lambda x: (*torch.sort(x[:0], dim=1), *torch.sort(x[:, :0]), *x.topk(0), *torch.sort(x[0, 0])),
         recipe(randn(3, 6)), exact=True),
    Case("topk_gradient", gradients(lambda x: x.topk(3, 1).values), recipe(randn(2, 7, 3)), exact=True),
    Case("topk_smallest_int", lambda x: x.topk(2, 0, largest=False).values, recipe(integers(5, 3, dtype=torch.int64)),
         exact=True),
    Case("sort_bool", lambda x: torch.sort(x > 0, stable=True), recipe(randn(3, 6)), exact=True),
    Case("unfold", gradients(lambda x: x.unfold(1, 3, 2)), recipe(randn(2, 8, 3)), length=2),
    Case("unfold_whole", lambda x: x.unfold(0, 2, 2), recipe(randn(6, 3)), exact=True),
]  # fmt: skip
#: They repeat a lowering in another dtype or shape.
CASES = core(CASES, "topk_smallest_int", "sort_bool", "unfold_whole", "sort_int64", "sort_bf16")

batch = batch_fixture(CASES, name="sorting")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
