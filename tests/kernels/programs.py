"""Programs in Mojo that tests run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torch_max_backend.mojo_ops import KERNELS_PATH


def built(source: Path, folder: Path) -> Path:
    """The program that ``source`` makes, in ``folder``; it may import the kernels."""
    program = folder / source.stem
    command = ["mojo", "build", "-O1", "-I", str(KERNELS_PATH.parent), str(source), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-4000:]
    return program
