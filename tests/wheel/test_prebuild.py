"""What a wheel carries: all that a common network calls, and nothing that was not asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from max.dtype import DType

from benchmarks import ROOT, zoo
from torch_max_backend import MaxBackendError, OptionError, explain
from torch_max_backend.mojo_ops import functions
from torch_max_backend.wheel import prebuild


@pytest.mark.parametrize(("model", "like"), [("digits", "digits*"), ("resnet18", "residual")])
def test_a_network_calls_nothing_that_is_not_carried(model: str, like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other sizes than the typical one, in training and evaluated."""
    carried = {*prebuild._programs(None, [like]), *functions.all_functions("cpu", (DType.float32,))}
    make, shape = zoo.MODELS[model]
    network = make().to(memory_format=torch.channels_last)
    for training, least in ((True, 15), (False, 5)):
        monkeypatch.setattr(functions, "_required", set())
        with torch.set_grad_enabled(training):
            explain(network.train(training), torch.zeros(4, *shape), quiet=True, compile=False)
        called = functions.required()
        assert len(called) > least and called <= carried


def test_a_network_calls_nothing_on_hopper_that_is_not_carried() -> None:
    """Narrow and wide layers, and strided ones, have kernels of their own there. In a process of its own, as a wheel's
    kernels are found in one."""
    command = [sys.executable, "-m", "tests.wheel.carried_on_hopper", "resnet18", "residual", "bottleneck"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["called"] > 25 and found["missing"] == []


def test_what_is_not_selected_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_required", set())
    assert prebuild._programs(None, ["conv_*"]) == []


def test_unknown_targets_and_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="target 'sm_1': expected one of x86-64-v4, x86-64-v3, sm_80"):
        prebuild.prebuild("sm_1", tmp_path / "a")
    monkeypatch.setattr(functions, "_required", set())
    with pytest.raises(OptionError, match=r"select=\['nothing'\]: nothing has such a name"):
        prebuild.prebuild("x86-64-v3", tmp_path / "a", ["nothing"])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("here", ["/a", "/a/folder/with/a/path/that/is/longer/than/the/one/in/its/place"])
def test_no_byte_moves_where_the_run_path_is_replaced(here: str) -> None:
    ours = prebuild._MAX_LIBRARIES
    before, after = b"\x7fELF\0\1\0", b"\0other\0"
    moved = prebuild._elsewhere(b"%s%s:%s%s" % (before, here.encode(), ours.encode(), after), Path(here))
    padding = b"\0" * (len(here) + 1)
    assert moved == before + ours.encode() + padding + after
    with pytest.raises(MaxBackendError, match="run path: expected"):
        prebuild._elsewhere(before + after, Path(here))
