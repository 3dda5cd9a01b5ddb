"""Library functions against float64 on problems drawn at random, as the benchmarks' commands check them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks.kernels import detection, indexing, padding, sampling, windows
from benchmarks.kernels.drawn import check, drawn
from benchmarks.kernels.pooling import adaptive_max

FAMILIES = (adaptive_max, indexing, padding, windows, sampling, detection)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.rpartition(".")[2])
def test_random_problems(family: ModuleType, device: str) -> None:
    """On a GPU thousands, of all sizes."""
    dtypes = DTYPES if device == "cpu" else (DTYPES[0], *DTYPES[2:])
    calls = family.Calls(torch.device(device), dtypes)
    count, most = (200, 1 << 13) if device == "cpu" else (2000, 1 << 16)
    assert check(calls, drawn(family.draw, 11, count, most), dtypes) == []
