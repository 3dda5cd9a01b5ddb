"""What a GPU's thread does with several runs of elements, run on a CPU. No GPU runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kernels.programs import built


def test_runs_together_are_runs_one_by_one(tmp_path: Path) -> None:
    program = built(Path(__file__).with_name("program_runs.mojo"), tmp_path)
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.strip() == "right", result.stdout + result.stderr
