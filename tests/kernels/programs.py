"""Programs in Mojo that tests run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.runtime.caches.target import cpu_features


def built(source: Path, folder: Path, accelerator: str = "", own_features: bool = True) -> Path:
    """The program that ``source`` makes, in ``folder``; it may import the kernels, compiled beside an accelerator, or
    for a CPU, with the `cpu_features` of the one at hand if these are wanted."""
    program = folder / source.stem
    beside = [f"--target-accelerator={accelerator}"] if accelerator else []
    if not accelerator and own_features and cpu_features():
        beside = [f"--target-features={','.join(cpu_features())}"]
    command = ["mojo", "build", "-O1", *beside, "-I", str(KERNELS_PATH.parent), str(source), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-4000:]
    return program


def fixture_of(source: Path) -> Callable[..., Path]:
    """A fixture of a test module: the program that ``source`` makes, built once."""

    @pytest.fixture(scope="module")
    def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return built(source, tmp_path_factory.mktemp("walk"))

    return program


def printed(program: Path, arguments: Sequence[str]) -> str:
    """What the program prints for these arguments, all of which it finds right."""
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr
    return result.stdout
