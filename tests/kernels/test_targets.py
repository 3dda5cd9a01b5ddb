"""Every GPU kernel compiles for every architecture that the project names, on a machine without a GPU.

Each architecture takes one dtype here, another one each; ``TORCH_MAX_BACKEND_TARGETS=all`` gives every one all dtypes,
in a quarter of an hour.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.targets import DTYPES, TARGETS, case_names
from torch_max_backend.mojo_ops import KERNELS_PATH

ROOT = Path(__file__).resolve().parents[2]
#: The Hopper family under its own names, with a tuning operand: the ordinary ops reach the same kernels. And ops that
#: take elementwise work into their store, which test_convolution_epilogue.py compiles with such work behind them.
FORCED = re.compile(r"_sm90$|_fused$")
PAIRS = (
    [(target, dtype.name) for target in TARGETS for dtype in DTYPES]
    if os.environ.get("TORCH_MAX_BACKEND_TARGETS") == "all"
    else [("sm_80", "float32"), ("sm_90a", "bfloat16"), ("gfx942", "float16")]
)


def test_every_registered_op_is_among_the_cases() -> None:
    registered = {
        name
        for file in KERNELS_PATH.rglob("*.mojo")
        for name in re.findall(r'@extensibility\.register\("(\w+)"', file.read_text())
    }
    assert len(registered) > 20
    assert {name for name in registered if not FORCED.search(name)} <= case_names()


@pytest.mark.parametrize(("target", "dtype"), PAIRS)
def test_every_kernel_compiles(target: str, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.targets", target, dtype]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0 and f"COMPILED {target}" in result.stdout, result.stderr[-4000:]
