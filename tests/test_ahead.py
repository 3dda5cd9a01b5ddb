"""Compiling for a GPU that is not there: the graphs that are traced, and the entry that the GPU's machine will find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner, Result

from torch_max_backend import OptionError, ahead, compile_ahead
from torch_max_backend.cli import app
from torch_max_backend.graph import autograd_walk
from torch_max_backend.runtime import cache, session, tasks
from torch_max_backend.runtime.tasks import ListTask, Task
from torch_max_backend.torch_compat import FakeTensorMode, convolutions_laid_out_by_cudnn

#: Graphs that MAX would compile, whose text can be read.
GRAPHS = {"fallback": "error", "run": "graph"}


class Branches(nn.Module):
    """Gradients that are added up, summed to a shape, cast, unused; views, an in-place update, a random draw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.table, self.unused = nn.Embedding(10, 8), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(self.norm(self.conv(x)))
        y = y * y.mean((2, 3), keepdim=True) + self.linear.weight.sum() + y.sigmoid()
        rows = torch.arange(x.shape[0], device=x.device)
        z = F.dropout(F.max_pool2d(y, 2), 0.2).mean((2, 3)) + self.table(rows)
        return self.linear(z), y.detach(), z.t().std(0)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The text of what would be compiled."""
    texts: list[str] = []

    def note(chosen: Sequence[Task], lists: Sequence[ListTask] = ()) -> None:
        texts.append("".join(session._PROCESS.sub("", task.module._to_mlir_str()) for task in chosen))

    monkeypatch.setattr(tasks, "compile_all", note)
    yield texts
    torch._dynamo.reset()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_the_walk_traces_what_the_engine_traces(modules: list[str], monkeypatch: pytest.MonkeyPatch, amp: bool) -> None:
    for gradients in (torch.autograd.grad, autograd_walk.gradients):
        monkeypatch.setattr(torch.autograd, "grad", gradients)
        torch._dynamo.reset()
        torch.manual_seed(0)
        # Nothing is compiled, so that the call itself fails.
        with torch.autocast("cpu", torch.bfloat16, enabled=amp), pytest.raises(RuntimeError, match="before it was"):
            torch.compile(Branches(), backend="max", options=GRAPHS)(torch.randn(4, 3, 12, 12))
    engine, walk = modules
    assert engine == walk and "backward" in walk


def test_a_gpu_is_traced_without_one(modules: list[str]) -> None:
    model = Branches().to(memory_format=torch.channels_last)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 3, 12, 12)
    for autocast in (None, torch.bfloat16):
        compile_ahead(model, x, target="sm_90", autocast=autocast, options=GRAPHS)
    single, half = modules
    assert "f32, gpu:0>" in single and "bf16" not in single and "bf16, gpu:0>" in half
    assert "@backward" in half
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert torch.autograd.grad is not autograd_walk.gradients


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_inputs_are_called_what_they_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a program in the cache tells the types that Dynamo notes."""
    codes: list[str] = []
    monkeypatch.setattr(ahead, "max_backend", lambda gm, inputs, options: codes.append(gm.code))
    compile_ahead(nn.Linear(3, 2), torch.ones(4, 3), target="sm_90a")
    (code,) = codes
    assert "FakeTensor" not in code
    assert code.count("torch.nn.parameter.Parameter") == 2 and code.count(": torch.Tensor") == 1


def test_channels_last_convolutions_are_promised_what_cudnn_returns() -> None:
    """A GPU's machine asks for the graph with these strides, or compiles another."""
    grad, x, w = (2, 4, 5, 5), (2, 8, 5, 5), (4, 8, 3, 3)
    with FakeTensorMode(), convolutions_laid_out_by_cudnn():
        for order in (torch.channels_last, torch.contiguous_format):
            dy, image, filters = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (grad, x, w))
            dy, image, filters = (tensor.to(memory_format=order) for tensor in (dy, image, filters))
            y = torch.conv2d(image, filters, padding=1)
            backward = torch.ops.aten.convolution_backward
            found = backward(dy, image, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
            assert all(result.is_contiguous(memory_format=order) for result in (y, *found[:2]))


@pytest.mark.usefixtures("modules")
def test_what_depends_on_the_gpu_at_hand_is_told() -> None:
    with pytest.warns(UserWarning, match="scaled_dot_product_attention"):
        compile_ahead(Attention(), torch.randn(2, 2, 4, 8), target="sm_90a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"target": "sm_1"}, "sm_1"), ({"target": "sm_80", "autocast": torch.int8}, "autocast"),
     ({"target": "sm_80", "options": {"fallbck": 1}}, "fallbck")],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        compile_ahead(nn.Identity(), torch.ones(1), **arguments)  # type: ignore[arg-type]


SCRIPT = """
import torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.relu(x * self.weight) - 1

def example():
    return Scale(), (torch.randn(4, 6),)

def nothing():
    return 3

if __name__ == "__main__":
    raise SystemExit("trains")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, arguments)])


def test_the_command_fills_the_cache_for_the_target(
    script: Path, tmp_path: Path, kernels_only: Callable[[Path], dict[str, str]]
) -> None:
    # In processes of their own: MAX keeps the target of the first device that a process opens.
    command = [sys.executable, "-c", "from torch_max_backend.cli import app; app()", "compile", f"{script}:example"]
    environment = {**os.environ, **kernels_only(tmp_path / "cache")}
    first, second = (
        subprocess.run([*command, "--target", "sm_90a"], env=environment, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr
    assert "forward, backward for sm_90a: " in first.stdout and "already" not in first.stdout
    assert second.stdout.strip().endswith("in the cache already")
    # The graphs are launch lists: what is kept are their libraries.
    records = list((tmp_path / "cache" / "libraries").glob("*/entry.json"))
    assert len(records) >= 2 and not (tmp_path / "cache" / "graphs").exists()
    for record in records:
        facts = json.loads(record.read_text())["facts"]
        # What a machine with the GPU says of itself; nothing of it is this machine's CPU.
        assert facts["device"] == "cuda:sm_90a" and facts["cpu"] in ("x86-64-v3", "generic")
        assert re.search(r"_gpu_[0-9a-f]{8}$", facts["function"])
        assert all(facts[key] == value for key, value in cache.versions().items() if key != "kernels")
    assert any(b"sm_90a" in (record.parent / "library.so").read_bytes() for record in records)


def test_bad_commands_exit_with_2(script: Path) -> None:
    for source, words in (
        ("absent.py:example", "absent.py:example"),
        (script, "colon"),
        (f"{script}:train", "train"),
        (f"{script}:nothing", "nothing"),
    ):
        result = _invoke(source, "--target", "sm_80")
        assert result.exit_code == 2 and words in result.output, result.output
    result = _invoke(f"{script}:example", "--target", "sm_1")
    assert result.exit_code == 2 and "target 'sm_1': expected one of sm_80" in result.output
