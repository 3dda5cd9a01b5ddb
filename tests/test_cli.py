"""The command line: exit codes and messages without compiling, then two commands from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.bench.test_tasks import use_common_models
from torch_max_backend import support
from torch_max_backend.cli import app
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.runtime import session

DOCS = Path(__file__).resolve().parents[1] / "docs"


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _plain(text: str) -> str:
    """Without colours, boxes and line ends."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(session, "compile_module", refuse)


BAD = [
    ("conv-fwd 1 2 3 2 0", "N = 0: expected an integer from 1 to 2147483647"),
    ("conv-bwd-data 1 2 3 2 -1", "N = -1: expected an integer from 1 to 2147483647"),
    ("conv-bwd-weight 0 1 x", "time = 'x': expected an integer from 0 to"),
    ("grouped-conv-bwd-data 0 1 5 2 0", "G = 0: expected an integer from 1 to"),
    ("grouped-conv-bwd-data 0 1 5 2 2 4", "K = (missing): expected 20 values: verify init time ndim G N K C"),
    ("maxpool2d-bwd 0 7 1", "init = 7: expected an integer from 0 to 2"),
    ("avgpool3d-bwd --divisor 0", "--divisor = 0: expected any integer but zero"),
    ("conv-fwd --speed 3", "option = --speed: expected one of those that --help names"),
    ("conv-fwd --list absent.json", "--list = absent.json: expected a file that can be read"),
    ("conv-fwd --list absent.json 1 2 3 2", "--list = given with 4 values: expected only verify, init and time"),
    ("conv-fwd --cases stem", "--cases = stem: expected --list FILE beside it"),
    ("conv-fwd --batch 0", "--batch = 0: expected an integer of at least 1"),
    ("conv-fwd --json absent/result.json", "--json = absent/result.json: expected a file in a folder that exists"),
    ("conv-fwd --device cuda --dtype float64", "--dtype = float64: expected float32, bfloat16 or float16"),
    ("conv-fwd 0 1 1 2 2000000 2000 2000 3 3 99 99 1 1 1 1 1 1 1 1", "the problem's size = case,"),
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


@pytest.fixture(scope="module")
def _compiled_together() -> None:
    use_common_models()


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
@pytest.mark.usefixtures("_compiled_together")
def test_end_to_end(command: str, tmp_path: Path) -> None:
    values, description = END_TO_END[command]
    path = tmp_path / "result.json"
    result = _invoke("bench", command, *values.split(), "--compare", "--json", path, "--seed", 5)
    assert result.exit_code == 0, result.output
    assert description in result.output
    assert re.search(PERF, result.output, re.MULTILINE)
    for line in ("Verify: passed", "Floor: ", "PyTorch: ", "Runs: 3"):
        assert line in result.output
    document = json.loads(path.read_text())
    assert document["settings"]["seed"] == 5
    assert {"cpu", "cores", "cache_bytes"} <= set(document["hardware"])
    assert {"torch", "max", "mojo", "kernels"} <= set(document["versions"])
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", document["date"])
    [case] = document["cases"]
    assert case["verification"]["passed"]
    assert case["ratio"] == pytest.approx(case["ms"] / case["torch_ms"])
    assert case["floor_fraction"] == pytest.approx(case["floor_ms"] / case["ms"])
    assert case["tflops"] == pytest.approx(case["flops"] / case["ms"] / 1e9)


@pytest.mark.usefixtures("_compiled_together")
def test_a_list_ends_with_a_table_and_the_mean(tmp_path: Path) -> None:
    line = {"name": "small", "n": 8, "cpu_n": 1, "c": 4, "k": 8, "h": 6, "w": 6, "r": 3, "s": 3, "padding": 1}
    path = tmp_path / "list.json"
    path.write_text(json.dumps([line, {**line, "name": "strided", "stride": 2}, {**line, "name": "other"}]))
    result = _invoke("bench", "conv-bwd-data", 1, 1, 2, "--list", path, "--cases", "small|strided", "--compare")
    assert result.exit_code == 0, result.output
    table = result.output.rpartition("conv-bwd-data, float32, channels_last, cpu")[2]
    assert re.search(r"│ small .*passed", table)
    assert re.search(r"│ strided .*passed", table)
    assert "other" not in result.output
    assert re.search(r"geometric mean of our time over PyTorch's: [\d.]+ over 2 cases; worst", table)


@pytest.mark.usefixtures("_compiled_together")
def test_without_timing_only_verification_is_printed() -> None:
    result = _invoke("bench", "conv-bwd-data", *VERIFY_ONLY.split())
    assert result.exit_code == 0, result.output
    assert "Verify: passed, against float64: max error 0, relative 0, exact equality" in result.output
    assert "Perf" not in result.output


@pytest.mark.usefixtures("_compiled_together")
def test_a_failed_verification_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_max_backend.bench.convolution import ConvolutionTask

    right = ConvolutionTask.reference
    monkeypatch.setattr(ConvolutionTask, "reference", lambda self, inputs: right(self, inputs) + 1)
    result = _invoke("bench", "conv-bwd-data", *VERIFY_ONLY.split())
    assert result.exit_code == 1
    assert "Verify: FAILED" in result.output
