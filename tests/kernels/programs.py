"""Programs in Mojo that tests run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torch_max_backend.mojo_ops import KERNELS_PATH


def built(source: Path, folder: Path, accelerator: str = "") -> Path:
    """The program that ``source`` makes, in ``folder``; it may import the kernels, compiled beside an accelerator."""
    program = folder / source.stem
    beside = [f"--target-accelerator={accelerator}"] if accelerator else []
    command = ["mojo", "build", "-O1", *beside, "-I", str(KERNELS_PATH.parent), str(source), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-4000:]
    return program
