"""The examples, with few steps and narrow models: they run, all in MAX, and a picture is there at the end.

Graphs are built and PyTorch runs them, since that takes seconds where compiling takes minutes; with
``TORCH_MAX_BACKEND_CASES=all`` they are compiled.
"""

from __future__ import annotations

import functools
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from tests.harness import ALL_CASES
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph

#: By script: arguments, the picture, and how many pairs of graphs it compiles.
EXAMPLES: dict[str, tuple[list[str], str, int]] = {
    "segment_unet": (["--steps", "2", "--batch", "2", "--width", "2", "--depth", "2"], "segment.png", 1),
    "classify_ct": (["--steps", "2", "--batch", "2", "--width", "2"], "ct.png", 1),
    "diffuse_digits": (["--steps", "2", "--batch", "2", "--width", "8"], "diffusion.png", 1),
    "train_gan": (["--steps", "2", "--batch", "4", "--width", "4"], "gan.png", 3),
}
TIMM = ["--model", "test_resnet", "--images", "80", "--batch", "32", "--workers", "0", "--amp", "bf16"]

Run = Callable[..., list[str]]
"""Runs an example by its name, with arguments; the names of the graphs that it made."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graphs: list[CompiledGraph]) -> Iterator[Run]:
    genuine = torch.compile
    strict = functools.partial(backend.max_backend if ALL_CASES else backend.build_only, options={"fallback": "error"})

    def compiled(model: Any, **given: Any) -> Any:
        return genuine(model, **{**given, "backend": strict})

    def ran(name: str, *arguments: str) -> list[str]:
        graphs.clear()
        torch._dynamo.reset()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        assert not end.value.code
        return [graph.name for graph in graphs]

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    yield ran
    torch._dynamo.reset()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, run: Run, tmp_path: Path) -> None:
    arguments, picture, pairs = EXAMPLES[name]
    assert sorted(run(name, *arguments)) == ["backward"] * pairs + ["forward"] * pairs
    assert (tmp_path / picture).stat().st_size > 1000


def test_fine_tuning_goes_on_from_its_checkpoint(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    assert run("finetune_timm", *TIMM, "--epochs", "1")[:2] == ["forward", "backward"]
    first = torch.load(tmp_path / "finetune.pt", weights_only=True)
    run("finetune_timm", *TIMM, "--epochs", "2", "--resume")
    second = torch.load(tmp_path / "finetune.pt", weights_only=True)
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert second["losses"][: len(first["losses"])] == first["losses"]
    assert len(second["losses"]) == 2 * len(first["losses"]) > 0
    assert {int(state["step"]) for state in second["optimizer"]["state"].values()} == {len(second["losses"])}
    assert (tmp_path / "finetune.png").stat().st_size > 1000
