"""Sorting, the largest elements, and windows along a dimension."""

from __future__ import annotations

import math

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe

NAN, INF = math.nan, math.inf

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
    Case("topk_gradient", gradients(lambda x: x.topk(3, 1).values), recipe(randn(2, 7, 3)), exact=True),
    Case("topk_smallest_int", lambda x: x.topk(2, 0, largest=False).values, recipe(integers(5, 3, dtype=torch.int64)),
         exact=True),
    Case("sort_bool", lambda x: torch.sort(x > 0, stable=True), recipe(randn(3, 6)), exact=True),
    Case("unfold", gradients(lambda x: x.unfold(1, 3, 2)), recipe(randn(2, 8, 3)), length=2),
    Case("unfold_whole", lambda x: x.unfold(0, 2, 2), recipe(randn(6, 3)), exact=True),
]  # fmt: skip
#: They repeat a lowering in another dtype or shape.
CASES = core(CASES, "topk_smallest_int", "sort_bool", "unfold_whole")

batch = batch_fixture(CASES, name="sorting")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
