"""Every lowering's cases again, on a GPU: one compilation for each family."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.families import FAMILIES, cases_of
from tests.harness import Batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    cases = cases_of(family)
    # TF32 would hide what a float32 kernel loses, here and in the reference.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    batch = Batch(cases, "cuda", family)
    failures = {}
    for case in cases:
        try:
            batch.check(case)
        except AssertionError as error:
            failures[case.id] = str(error).splitlines()[0]
    assert not failures, f"{len(failures)} of {len(cases)} fail: {failures}"
