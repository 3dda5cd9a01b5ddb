"""Kernels for CPUs with half as many registers, half as wide, as those that the other tests build, and no bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_max_backend.runtime.caches.target import LEVELS, cpu_level

LOWEST = list(LEVELS)[-1]
GROUPS = """
import torch

torch.manual_seed(0)
for groups, dtype in ((6, torch.float64), (12, torch.float32)):
    channels = 48
    x = torch.randint(-2, 3, (2, channels, 9, 8), dtype=dtype, requires_grad=True)
    w = torch.randint(-2, 3, (channels, channels // groups, 3, 3), dtype=dtype, requires_grad=True)

    def convolution(x, w):
        return torch.conv2d(x, w, padding=1, groups=groups)

    wanted = convolution(x, w)
    found = torch.compile(convolution, backend="max", options={"fallback": "error"}, dynamic=False)(x, w)
    assert torch.equal(found, wanted), (groups, dtype)
    dy = torch.randint(-2, 3, wanted.shape, dtype=dtype)
    pairs = zip(torch.autograd.grad(found, (x, w), dy), torch.autograd.grad(wanted, (x, w), dy), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), (groups, dtype)
    torch.compiler.reset()
"""


@pytest.mark.skipif(cpu_level() in (None, LOWEST), reason="the other tests build kernels for this CPU's level")
def test_random_convolutions_with_avx2() -> None:
    """Their tiles depend on the registers."""
    command = [sys.executable, "-m", "benchmarks", "convolution.random_check", "--device", "cpu"]
    command += ["--dtypes", "float32,bfloat16"]
    environment = {**os.environ, "TORCH_MAX_BACKEND_CPU_LEVEL": LOWEST}
    done = subprocess.run(
        [*command, "--count", "150", "--seed", "5"], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(cpu_level() in (None, LOWEST), reason="the other tests build kernels for this CPU's level")
def test_groups_that_no_vector_holds() -> None:
    """Four float64 are a vector with AVX2: less than a group of eight channels."""
    environment = {**os.environ, "TORCH_MAX_BACKEND_CPU_LEVEL": LOWEST}
    done = subprocess.run([sys.executable, "-c", GROUPS], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
