"""The built wheel: what it holds, and that it works away from the sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torch_max_backend import __version__
from torch_max_backend.runtime.caches.target import cpu_level

ROOT = Path(__file__).resolve().parents[2]

TRAINS = """
import pathlib, sys, torch
model = torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
x = torch.randn(1, 2, 8, 8)
run = torch.compile(model, backend="max", options={"fallback": "error"})
run(x).sum().backward()
assert torch.allclose(run(x), model(x), atol=1e-5) and model[0].weight.grad.abs().sum() > 0
import torch_max_backend
from torch_max_backend.mojo_ops import KERNELS_PATH
home = pathlib.Path(sys.argv[1])
assert home in pathlib.Path(torch_max_backend.__file__).parents, torch_max_backend.__file__
assert home in KERNELS_PATH.parents, KERNELS_PATH
print("TRAINED")
"""


def built(folder: Path, **environment: str) -> Path:
    """A wheel of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("dist"))


def trained(wheel: Path, home: Path, **environment: str) -> None:
    """Unpacks a wheel in ``home`` and trains with it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    result = subprocess.run(
        [sys.executable, "-c", TRAINS, str(home)],
        cwd=home.parent,
        env={**os.environ, "PYTHONPATH": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0 and "TRAINED" in result.stdout, result.stderr


def test_it_holds_the_package_the_kernels_and_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        points = archive.read(entry_points).decode()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        for source, packaged in (("torch_max_backend", "torch_max_backend"), ("kernels", "torch_max_backend/kernels")):
            for file in (ROOT / source).rglob("*"):
                if file.suffix in (".py", ".mojo"):
                    name = f"{packaged}/{file.relative_to(ROOT / source).as_posix()}"
                    assert archive.read(name) == file.read_bytes(), name
    assert "[torch_dynamo_backends]\nmax = torch_max_backend.backend:max_backend" in points
    assert "torch-max-backend = torch_max_backend.cli:app" in points
    assert any("licenses/LICENSE" in name for name in names)
    assert "torch_max_backend/py.typed" in names
    assert f"Name: torch-max-training\nVersion: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: <3.14,>=3.11" in metadata
    outside = {name for name in names if not name.startswith("torch_max_backend/") and ".dist-info/" not in name}
    assert not outside


def test_it_trains_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    """By the name "max" alone, which its entry point makes known."""
    assert wheel.name.endswith("-py3-none-any.whl")
    trained(wheel, tmp_path / "site")


@pytest.mark.skipif(cpu_level() is None, reason="wheels carry kernels for CPUs with AVX2 and for GPUs")
def test_it_builds_no_kernel_that_it_carries(tmp_path: Path) -> None:
    entries = ("batch_norm_*", "max_pool_*", "walk")
    chosen = {"TORCH_MAX_BACKEND_WHEEL": str(cpu_level()), "TORCH_MAX_BACKEND_WHEEL_SELECT": " ".join(entries)}
    wheel = built(tmp_path, **chosen)
    assert "-py3-none-linux_" in wheel.name
    trained(wheel, tmp_path / "site", TORCH_MAX_BACKEND_CACHE_DIR=str(tmp_path / "cache"))
    records = (tmp_path / "cache" / "libraries").glob("*/entry.json")
    functions = [json.loads(record.read_text())["facts"]["function"] for record in records]
    assert functions and all(name.startswith(("torch_max_pointwise", "torch_max_reduction")) for name in functions)
