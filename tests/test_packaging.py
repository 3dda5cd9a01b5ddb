"""The built wheel: what it holds, and that it works away from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torch_max_backend import __version__

ROOT = Path(__file__).resolve().parents[1]

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (built,) = target.glob("*.whl")
    return built


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
    home = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    result = subprocess.run(
        [sys.executable, "-c", TRAINS, str(home)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0 and "TRAINED" in result.stdout, result.stderr
