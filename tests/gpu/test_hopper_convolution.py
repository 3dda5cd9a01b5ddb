"""The Hopper convolution kernels, forced: every tile shape, split and cluster, in every dtype; and their epilogues."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.convolution import sm90_check, sm90_epilogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
DTYPES = ["bfloat16", "float16", "float32"]


@pytest.fixture(scope="module")
def calls() -> sm90_check.Calls:
    return sm90_check.Calls(DTYPES, sm90_check.PASSES)


@pytest.mark.parametrize(
    ("passing", "dtype"),
    sm90_check.functions_of(DTYPES, sm90_check.PASSES),
)
def test_every_kernel(calls: sm90_check.Calls, passing: str, dtype: str) -> None:
    """Whole numbers exact, normal ones near float64, the same bits twice."""
    torch.manual_seed(0)
    wrong = []
    for problem in sm90_check.read("sm90_check", ""):
        if not problem.is_taken(passing, dtype):
            continue
        chosen = [sm90_check.AUTOMATIC, *sm90_check.tunings(passing, problem, 12, dtype)]
        wrong += sm90_check.check(calls, passing, dtype, problem, chosen)
    assert not wrong


def test_epilogues_run_in_the_kernels_store() -> None:
    graphs = sm90_epilogue.build()
    torch.manual_seed(0)
    rows = [*sm90_epilogue.check_small(graphs), *(sm90_epilogue.measure(graphs, p) for p in sm90_epilogue.PROBLEMS)]
    assert all(row["ok"] for row in rows), rows
