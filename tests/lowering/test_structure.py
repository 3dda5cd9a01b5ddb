"""Ops that name or pass on values."""

from __future__ import annotations

import pytest
import torch

from tests.harness import Batch, Case, batch_fixture, parametrize, randn, recipe

aten = torch.ops.aten

CASES = [
    Case("clone", lambda x: aten.clone(x), recipe(randn(3, 4)), exact=True),
    Case(
        "clone_channels_last",
        lambda x: aten.clone(x, memory_format=torch.channels_last),
        recipe(randn(2, 3, 4, 5)),
        exact=True,
        strides=True,
    ),
]

batch = batch_fixture(CASES, name="structure")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


def test_a_refused_case_is_reported(batch: Batch) -> None:
    refused = Case("refused", lambda x: aten.linalg_inv_ex(x)[0], recipe(randn(3, 3)))
    alone = Batch([refused])
    with pytest.raises(AssertionError, match="linalg_inv_ex"):
        alone.check(refused)
