"""``torch.use_deterministic_algorithms(True)``: strict mode is served, and the same inputs give the same bits.

ATen refuses the 3-D ones on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.harness import Batch, Case, batch_fixture, gradients, integers, parametrize, randn, recipe

CASES = [
    # Tall windows that overlap a lot: outside strict mode a GPU may add to their pixels atomically.
    Case(
        "max_2d_tall",
        gradients(lambda x: functional.max_pool2d(x, 7, 1, 3, return_indices=True)),
        recipe(integers(2, 8, 20, 23)),
        exact=True,
        deterministic=True,
    ),
    Case(
        "max_3d",
        gradients(lambda x: functional.max_pool3d(x, 3, 2, 1)),
        recipe(randn(1, 4, 9, 10, 11)),
        length=8,
        deterministic=True,
    ),
    Case(
        "avg_3d",
        gradients(lambda x: functional.avg_pool3d(x, 3, 1, 1)),
        recipe(randn(1, 4, 9, 10, 11)),
        length=27,
        deterministic=True,
    ),
]

batch = batch_fixture(CASES, name="deterministic")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
    first = batch.outcomes[case.id].results
    batch.run()
    again = batch.outcomes[case.id].results
    assert first is not None and again is not None
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
