"""Compiling for a GPU that is not there: the graphs that are traced, and the entry that the GPU's machine will find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from max.graph import Module
from torch import nn
from typer.testing import CliRunner, Result

from torch_max_backend import OptionError, ahead, compile_ahead
from torch_max_backend.ahead import trace_ahead
from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.cli import app
from torch_max_backend.graph.fake_cuda import autograd_walk
from torch_max_backend.graph.fake_cuda.attention_choice import AttentionCall, chosen
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.engine import session
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

    def note(module: Module, device: torch.device, names: Sequence[str], *_: object) -> dict[str, None]:
        texts.append(session._PROCESS.sub("", module._to_mlir_str()))
        return dict.fromkeys(names)

    monkeypatch.setattr(session, "compile_module", note)
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


class Attention(nn.Module):
    """Attention of projected rows [2, 6, 32] with two heads.

    Args:
        form: what is called; PyTorch's choice by default.
    """

    def __init__(self, form: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.form = form
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.form(query, key, value, mask).transpose(1, 2).flatten(2)


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, mask, True)[0]


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=0.25)[0]


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None:
        mask = F.pad(mask.expand(2, 2, 6, 6), (0, 10))[..., :6]
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True)[0]


def _key(model: nn.Module, *inputs: torch.Tensor, target: str, autocast: torch.dtype | None) -> list[object]:
    """What the graphs of a training step launch, with which results."""
    with recorded_graphs() as graphs:
        trace_ahead(build_only, model, inputs, {}, target=target, autocast=autocast)
    executables = [executable for graph in graphs for executable in graph.executables]
    assert [graph.name for graph in graphs] == ["forward", "backward"] and len(executables) == 2
    return [(each.built.listing, each.built.outputs, each.built.ops) for each in executables]


@pytest.mark.parametrize(
    ("target", "autocast", "masked", "form"),
    [("sm_90a", torch.bfloat16, False, _cudnn), ("sm_90a", torch.float16, True, _cudnn),
     ("sm_90a", None, False, _efficient), ("sm_80", torch.bfloat16, False, _flash), ("sm_80", None, True, _efficient)],
)  # fmt: skip
def test_attention_is_what_the_gpu_would_take(
    target: str, autocast: torch.dtype | None, masked: bool, form: Callable[..., torch.Tensor]
) -> None:
    inputs = [torch.randn(2, 6, 32), *([torch.randn(6, 6, dtype=autocast)] if masked else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        model = Attention()
        named = Attention(form)
        named.load_state_dict(model.state_dict())
        asked, given = (_key(each, *inputs, target=target, autocast=autocast) for each in (model, named))
    assert asked == given
    assert any("attention_backward" in op for op in asked[1][2])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"dropout": 0.1}, "FLASH_ATTENTION"),
        ({"dropout": 0.125}, "CUDNN_ATTENTION"),
        ({"head": 20}, "FLASH_ATTENTION"),
        ({"head": 20, "mask": (6, 6)}, "MATH"),
        ({"mask": (6, 5)}, "EFFICIENT_ATTENTION"),
        ({"mask": (2, 6, 6)}, "EFFICIENT_ATTENTION"),
        ({"dtype": torch.float64}, "MATH"),
        ({"dtype": torch.float32, "head": 12}, "EFFICIENT_ATTENTION"),
        ({"architecture": "gfx942"}, "FLASH_ATTENTION"),
        ({"keys": 0}, "MATH"),
        ({"keys": 1}, "FLASH_ATTENTION"),
        ({"heads": 1}, "MATH"),
        ({"heads": 1, "grouped": True}, "CUDNN_ATTENTION"),
        ({"is_causal": True, "keys": 5, "architecture": "sm_80"}, "EFFICIENT_ATTENTION"),
    ],
)
def test_the_kernel_is_chosen_by_pytorchs_rules(
    call: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    given = {"dtype": torch.bfloat16, "head": 16, "heads": 2, "keys": 6, "mask": None} | call
    dtype, head = given.pop("dtype"), given.pop("head")
    query = torch.empty(2, 2, 6, head, dtype=dtype)
    key = torch.empty(2, given.pop("heads"), given.pop("keys"), head, dtype=dtype)
    shape = given.pop("mask")
    mask = None if shape is None else torch.empty(shape, dtype=dtype)
    given = {"dropout": 0.0, "is_causal": False, "grouped": False, "architecture": "sm_90a"} | given
    assert chosen(AttentionCall(query=query, key=key, value=key, mask=mask, **given)).name == expected


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
