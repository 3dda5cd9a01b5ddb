"""Kernels for CPUs with half as many registers, half as wide, as those that the other tests build."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_max_backend.runtime.caches.target import LEVELS, cpu_level

LOWEST = list(LEVELS)[-1]


@pytest.mark.skipif(cpu_level() in (None, LOWEST), reason="the other tests build kernels for this CPU's level")
def test_random_convolutions_with_avx2() -> None:
    """Their tiles depend on the registers."""
    command = [sys.executable, "-m", "benchmarks", "convolution.random_check", "--device", "cpu", "--dtypes", "float32"]
    environment = {**os.environ, "TORCH_MAX_BACKEND_CPU_LEVEL": LOWEST}
    done = subprocess.run(
        [*command, "--count", "150", "--seed", "5"], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr
