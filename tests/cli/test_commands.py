"""The command line: exit codes and messages without compiling, then two commands from end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.cli import app
from torch_max_backend.inspection import support
from torch_max_backend.mojo_ops import KERNELS_PATH

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _plain(text: str) -> str:
    """Without colours, boxes and line ends."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(torch, "compile", refuse)


BAD = [
    ("conv-fwd 1 2 3 2 0", "N = 0: expected an integer from 1 to 2147483647"),
    ("conv-bwd-data 1 2 3 2 -1", "N = -1: expected an integer from 1 to 2147483647"),
    ("conv-bwd-weight 0 1 x", "time = 'x': expected an integer from 0 to"),
    ("grouped-conv-bwd-data 0 1 5 2 0", "G = 0: expected an integer from 1 to"),
    ("grouped-conv-bwd-data 0 1 5 2 2 4", "K = (missing): expected 20 values: verify init time ndim G N K C"),
    ("maxpool2d-bwd 0 7 1", "init = 7: expected an integer from 0 to 2"),
    ("avgpool3d-bwd --divisor 0", "--divisor = 0: expected any integer but zero"),
    ("conv-fwd --speed 3", "option = --speed: expected one of those that --help names"),
    ("conv-fwd --device cuda --dtype float64", "--dtype = float64: expected float32, bfloat16 or float16"),
    ("conv-fwd 0 1 1 2 2000000 2000 2000 3 3 99 99 1 1 1 1 1 1 1 1", "the problem's size = conv-fwd,"),
    ("conv-fwd --dtype int8", "--dtype"),
    ("conv-fwd --device tpu", "--device"),
    ("conv-fwd --layout nhwc", "--layout"),
    ("grouped-conv-bwd-data --epilogue gelu", "--epilogue"),
    ("maxpool2d-bwd --form magic", "--form"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[command for command, _ in BAD])
@pytest.mark.usefixtures("_nothing_compiles")
def test_bad_arguments_exit_with_2_and_name_the_argument(command: str, message: str) -> None:
    result = _invoke("bench", *command.split())
    assert result.exit_code == 2, result.output
    assert message in _plain(result.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.usefixtures("_nothing_compiles")
def test_no_gpu() -> None:
    result = _invoke("bench", "conv-fwd", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device = cuda: expected cpu: PyTorch sees no CUDA device here" in _plain(result.output)


def test_info() -> None:
    result = _invoke("info")
    assert result.exit_code == 0
    values = dict(line.split("  ", 1) for line in result.output.splitlines())
    assert values["torch"].strip() == torch.__version__
    assert str(KERNELS_PATH) in values["kernels"]
    assert re.search(r"sha256 [0-9a-f]{64}$", values["kernels"])
    assert re.search(r": [\d.]+ MiB in \d+ entries$", values["cache"])


def test_ops() -> None:
    result = _invoke("ops")
    assert result.exit_code == 0
    assert "aten.convolution_backward" in result.output


def test_the_support_table_is_fresh() -> None:
    result = _invoke("ops", "--markdown")
    assert result.exit_code == 0
    assert "| `aten.max_pool2d_with_indices_backward` |" in result.output
    assert len(re.findall(r"^\| `", result.output, re.MULTILINE)) == sum(map(len, support.families().values()))
    assert (DOCS / "support.md").read_text() == result.output, (
        "docs/support.md is stale: uv run torch-max-backend ops --markdown > docs/support.md"
    )


VERIFY_ONLY = "1 1 0 1 2 4 4 3 9 1 1 1 1"
PERF = r"^Perf: [\d.e+-]+ ms, [\d.e+-]+ TFlops, [\d.e+-]+ GB/s$"
END_TO_END = {
    "conv-bwd-data": (
        "1 2 3 2 2 8 4 3 3 9 9 2 2 1 1 1 1 1 1",
        "in_n_c_hi_wi: dim 4, lengths {2, 4, 9, 9}, strides {324, 1, 36, 4}",
    ),
    "maxpool2d-bwd": (
        "1 1 3 2 4 3 3 9 9 2 2 1 1 1 1 1 1",
        "din_n_c_hi_wi: dim 4, lengths {2, 4, 9, 9}, strides {324, 1, 36, 4}",
    ),
}


@pytest.mark.parametrize("command", END_TO_END)
def test_end_to_end(command: str) -> None:
    values, description = END_TO_END[command]
    result = _invoke("bench", command, *values.split(), "--compare", "--seed", 5)
    assert result.exit_code == 0, result.output
    assert description in result.output
    assert re.search(PERF, result.output, re.MULTILINE)
    for line in ("Verify: passed", "Floor: ", "PyTorch: ", "Runs: 3"):
        assert line in result.output


def test_without_timing_only_verification_is_printed() -> None:
    result = _invoke("bench", "conv-bwd-data", *VERIFY_ONLY.split())
    assert result.exit_code == 0, result.output
    assert "Verify: passed, against float64: max error 0, relative 0, exact equality" in result.output
    assert "Perf" not in result.output


def test_a_failed_verification_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ConvolutionCase.reference
    monkeypatch.setattr(ConvolutionCase, "reference", lambda self, inputs: right(self, inputs) + 1)
    result = _invoke("bench", "conv-bwd-data", *VERIFY_ONLY.split())
    assert result.exit_code == 1
    assert "Verify: FAILED" in result.output
