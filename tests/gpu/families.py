"""The lowering tests' cases that run on a GPU too."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from tests.harness import Case

FAMILIES = sorted(
    path.stem
    for path in (Path(__file__).parent.parent / "lowering").glob("test_*.py")
    if "batch_fixture" in path.read_text()
)


def _runs_on_gpu(case: Case) -> bool:
    """float64 is declared to run on the CPU only."""
    return not case.cpu_only and all(t.dtype != torch.float64 for t in case.inputs(torch.Generator().manual_seed(0)))


def cases_of(family: str) -> list[Case]:
    """The cases of ``tests/lowering/<family>.py`` without those in float64."""
    module = importlib.import_module(f"tests.lowering.{family}")
    return [case for case in module.CASES if _runs_on_gpu(case)]
