"""Every GPU kernel compiles for every architecture that the project names, on a machine without a GPU.

Each architecture takes one dtype here, another one each; ``TORCH_MAX_BACKEND_TARGETS=all`` gives every one all dtypes,
in half an hour. The Hopper convolutions' epilogue is proved without a GPU as well: by what a graph
for one calls.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.targets import DTYPES, TARGETS, Report, case_names
from torch_max_backend.mojo_ops.convolution import WGRAD_BIAS
from torch_max_backend.mojo_ops.signatures import declared, load_all

ROOT = Path(__file__).resolve().parents[2]
CPU_ALONE = {"assert_true"}
OF_PASSES = {WGRAD_BIAS}
"""Entries that no lowering calls: passes put them in the place of others."""
PAIRS = (
    [(target, dtype.name) for target in TARGETS for dtype in DTYPES]
    if os.environ.get("TORCH_MAX_BACKEND_TARGETS") == "all"
    else [("sm_80", "float32"), ("sm_90a", "bfloat16"), ("gfx942", "float16")]
)


def test_every_entry_that_lowerings_call_is_among_the_cases() -> None:
    load_all()
    named = {each.name for family in declared.values() for each in family.signatures}
    assert len(named) > 20
    assert named - CPU_ALONE - OF_PASSES <= case_names()


@functools.cache
def compiled(target: str, dtype: str) -> Report:
    """What ``targets.py`` tells, in a process of its own, since each has one kind of virtual device."""
    command = [sys.executable, "-m", "tests.kernels.targets", target, dtype]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-4000:]
    return Report(**json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("target", "dtype"), PAIRS)
def test_every_kernel_compiles(target: str, dtype: str) -> None:
    report = compiled(target, dtype)
    assert report.target == target
    assert not report.unlisted
    # The graphs of elementwise.py: several programs, some of them for many tensors, and reductions.
    assert len(report.programs) >= 12
    assert sum("reduction" in symbol for symbol in report.programs) >= 8
    assert sum("pointwise_many" in symbol for symbol in report.programs) >= 2
    assert sum("reduction_many" in symbol for symbol in report.programs) >= 1


@pytest.mark.parametrize("target", ["sm_90a"])
def test_all_elementwise_successors_run_in_the_convolution(target: str) -> None:
    """One call for each graph, and no operation beside it."""
    assert compiled(target, "bfloat16").taking == ["conv_pointwise", "conv_pointwise"]


@pytest.mark.parametrize("target", ["sm_90a"])
def test_tensors_of_the_results_shape_and_dtype_are_read_ahead(target: str) -> None:
    """The residual, but not the factors for pixels, the addends for channels and the mask beside it; of the gradient
    through batch normalization both tensors. A bias is not, and no program at all in front of moments."""
    assert compiled(target, "bfloat16").ahead == [0, 0, 1, 2]


@pytest.mark.parametrize("target", ["sm_90a"])
def test_a_convolution_whose_result_is_wanted_too_stays_apart(target: str) -> None:
    assert compiled(target, "bfloat16").apart == ["conv_fprop", "pointwise"]


@pytest.mark.parametrize("target", ["sm_90a"])
def test_sums_of_batch_normalization_run_in_the_convolution(target: str) -> None:
    """Beside it normalizing is left, forward and backward."""
    assert compiled(target, "bfloat16").summing == ["conv_pointwise_sums", "pointwise"] * 2


@pytest.mark.parametrize("target", ["sm_90a"])
def test_sums_with_what_is_made_of_the_result_stay_apart(target: str) -> None:
    assert compiled(target, "bfloat16").sums_apart == ["conv_dgrad", "pointwise", "batch_norm_gradient_sums"]
