"""Nothing of the user's is touched: random numbers, warnings, signals, settings, threads."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import torch_max_backend
from torch_max_backend.problems.convolution import ConvolutionProblem


def test_a_program_keeps_what_belongs_to_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.untouched"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_draws_of_a_compiled_program_are_eagers(tmp_path: Path) -> None:
    """Python's numbers around and between the steps, in a process that has compiled nothing before."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = {
        backend: subprocess.run([sys.executable, program, backend], capture_output=True, text=True, check=True).stdout
        for backend in ("eager", "max")
    }
    assert found["max"] == found["eager"] != ""


def test_checks_of_arguments_draw_nothing() -> None:
    """beartype picks the item of a container that it looks at by Python's ``random``, unless told otherwise."""
    files = [path for path in Path(torch_max_backend.__file__).parent.rglob("*.py") if path.name != "checked.py"]
    assert not [path for path in files if "from beartype import beartype" in path.read_text()]
    state = random.getstate()
    ConvolutionProblem.from_sizes(2, 3, 4, (8, 8), (3, 3))
    assert random.getstate() == state


PROGRAM = """
import random, sys
import numpy as np
import torch
random.seed(1); np.random.seed(2); torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Dropout(0.5))
run = torch.compile(model, backend=sys.argv[1])
for _ in range(4):
    size = random.randint(2, 9)
    kept = run(torch.randn(size, 3, 8)).sum()
    kept.backward()
    print(size, random.random(), np.random.rand(), torch.rand(1).item())
"""
