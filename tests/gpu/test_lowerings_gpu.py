"""Every lowering's cases again, on a GPU: one compilation for each family."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.harness import Batch, Case

pytestmark = pytest.mark.gpu

FAMILIES = sorted(path.stem for path in (Path(__file__).parent.parent / "lowering").glob("test_*.py"))


def _runs_on_gpu(case: Case) -> bool:
    """float64 is declared to run on the CPU only."""
    return all(t.dtype != torch.float64 for t in case.inputs(torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    module = importlib.import_module(f"tests.lowering.{family}")
    cases = [case for case in module.CASES if _runs_on_gpu(case)]
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
