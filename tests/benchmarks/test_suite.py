"""The command `suite`: its models, what it calls right, what becomes of failures, and how it goes on."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks.suites import accuracy, adversarial, contrast, darknet, dense, flow, suite, worker
from benchmarks.suites.models import suites

CPU = torch.device("cpu")
CASES = "tests.benchmarks.suite_cases"


def _run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(suite.measure)
    return CliRunner().invoke(app, ["--suite", "torchbench", *arguments], catch_exceptions=False).output


Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def rows_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rows:
    """The rows of a case for eager and ours, measured in this process."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    torch._dynamo.reset()

    def measured(name: str) -> list[dict[str, Any]]:
        case, folder, end = f"{CASES}:{name}", str(tmp_path), time.time() + 600
        settings = "torchbench", case, "cpu", "none", "training", 0, ["eager", "max"], folder, end, False, False
        worker.run(worker.Settings(*settings))
        lines = (line.partition(worker.MARK)[2] for line in capsys.readouterr().out.splitlines())
        said = [json.loads(line) for line in lines if line]
        return [each["row"] for each in said if each["event"] == "row"]

    return measured


def test_volumes_and_their_model_are_channels_last(tmp_path: Path) -> None:
    case, end = f"{CASES}:volumes", time.time() + 60
    settings = "torchbench", case, "cpu", "none", "training", 0, ["eager"], str(tmp_path), end, False, True
    measured = worker.Measured(worker.Settings(*settings))
    (images,), _ = measured.batch
    for tensor in (images, *(weight for weight in measured.base.parameters() if weight.dim() > 1)):
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d)


def test_rows_are_kept_and_a_second_run_measures_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "suite.json"
    models = ["--model", f"{CASES}:tiny", "--model", f"{CASES}:crashing"]
    fixed = ["--output", str(file), "--minutes", "8", "--side-by-side", "2", "--caches", "kept"]
    _run(*fixed, *models, "--contender", "max")
    document = json.loads(file.read_text())
    rows = {(row["model"].partition(":")[2], row["contender"]): row for row in document["rows"]}
    assert rows.keys() == {("tiny", "eager"), ("tiny", "max"), ("crashing", "max")}
    ours = rows["tiny", "max"]
    assert ours["right"] and ours["sharp"] and ours["batch"] == 4
    assert ours["cudnn_benchmark"] is document["cudnn_benchmark"] is True
    assert ours["step_ms"] > 0 and ours["eager_ms"] == rows["tiny", "eager"]["step_ms"]
    assert not ours["left_to_pytorch"] and ours["compiled_by_max"] == 0
    assert "ended with status 3" in rows["crashing", "max"]["error"]
    before = file.read_bytes()
    _run(*fixed, *models, "--contender", "max")
    assert file.read_bytes() == before
    assert "results with another amp" in _run(*fixed, *models, "--amp", "bf16")


def test_a_wrong_gradient_is_found(rows_of: Rows) -> None:
    rows = rows_of("wrong_gradient")
    eager, ours = rows
    assert eager["right"] and not ours["right"]
    assert ours["wrong"] == ["gradient of head.bias"] == [ours["worst"]]


def test_a_contender_that_fails_is_a_row(rows_of: Rows) -> None:
    rows = rows_of("not_compiled")
    failing, eager = rows
    assert failing["contender"] == "max" and "size mismatch" in failing["error"]
    assert eager["contender"] == "eager" and eager["right"]


def test_a_model_that_is_not_there_is_a_row(rows_of: Rows) -> None:
    rows = rows_of("removed")
    assert [row["contender"] for row in rows] == ["eager", "max"]
    assert all("not built: AttributeError" in row["error"] for row in rows)


def _verdict(exact: Tensor, found: Tensor, allowed: float = 1e-3) -> dict[str, Any]:
    others = {"gradient of other": torch.ones(8, dtype=torch.float64)}
    near = {name: tensor.float() for name, tensor in others.items()}
    name = "gradient of weight"
    return accuracy.judged(
        {**others, name: exact}, {**near, name: exact.float()}, {**near, name: found}, allowed, CPU
    )  # fmt: skip


def test_errors_are_measured_against_eagers() -> None:
    exact = torch.randn(2000, dtype=torch.float64)
    assert _verdict(exact, exact.float())["right"]
    twice = _verdict(exact, 2 * exact.float())
    assert (twice["right"], twice["sharp"], twice["worst"]) == (False, False, "gradient of weight")
    assert twice["errors"][0] == pytest.approx(1.0, abs=1e-3)


def test_small_gradients_are_measured_in_their_own_units() -> None:
    exact = 1e-3 * torch.randn(2000, dtype=torch.float64)
    lost = _verdict(exact, torch.zeros(2000), allowed=1e-2)
    assert lost["right"] and not lost["sharp"]
    assert _verdict(1e-12 * exact, torch.zeros(2000))["sharp"]  # zero but for roundings


def test_what_is_missing_or_not_a_number_is_wrong() -> None:
    exact = {"gradient of a": torch.ones(4, dtype=torch.float64)}
    eager = {"gradient of a": torch.ones(4)}
    assert accuracy.judged(exact, eager, {}, 1e-2, CPU)["wrong"] == ["gradient of a"]
    for found in (torch.full((4,), float("nan")), torch.ones(2, 2)):
        verdict = accuracy.judged(exact, eager, {"gradient of a": found}, 1e-2, CPU)
        assert (verdict["right"], verdict["sharp"]) == (False, False)


def test_suites_have_the_dashboards_models_and_dense_ones() -> None:
    found = suites()
    counts = {"attention": 9, "timm": 18, "torchbench": 17, "dense": 7}
    assert {name: len(cases) for name, cases in found.items()} == counts
    assert all(case.batch > 0 for cases in found.values() for case in cases.values())


class _Encoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8))


def test_written_models_learn_with_all_weights() -> None:
    torch.manual_seed(0)
    images = [torch.rand(2, 3, 64, 64) for _ in range(2)]
    domains = [torch.randint(0, 2, (2, 5)).float() for _ in range(2)]
    boxes = tuple(torch.rand(2, 255, side, side).round() for side in (2, 4, 8))
    learning: list[tuple[nn.Module, tuple[Tensor, ...], Any]] = [
        (adversarial.Dcgan(4, 6), (torch.randn(2, 6, 1, 1), images[0]), adversarial.deceive),
        (
            adversarial.StarGan(width=4, blocks=1, side=64), (images[0], *domains),
            lambda outputs: adversarial.translate(outputs, images[0], *domains),
        ),
        (contrast.MomentumContrast(_Encoder(), 8, queue=6), tuple(images), contrast.contrast),
        (flow.SlowMotion(4), tuple(images), lambda outputs: flow.reconstruct(outputs, images[0])),
        (darknet.Yolo3(width=4), (images[0],), lambda outputs: darknet.detect(outputs, *boxes)),
    ]  # fmt: skip
    for model, inputs, loss in learning:
        loss(model(*inputs)).backward()
        learned = [weight.grad is not None for weight in model.parameters() if weight.requires_grad]
        assert learned and all(learned), type(model).__name__


@pytest.mark.parametrize("name", suites()["dense"])
def test_dense_models_learn_with_all_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SIDE", 64)
    monkeypatch.setattr(dense, "FRAME", (128, 128))
    torch.manual_seed(0)
    case = suites()["dense"][name]
    model = case.build().train()
    inputs, targets = case.draw(model, 2)
    outputs = model(*inputs)
    last = outputs[-1] if isinstance(outputs, list) else outputs
    assert last.shape[-2:] == inputs[0].shape[-2:]
    case.loss(outputs, *targets).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_queue_moves_on_and_the_key_encoder_follows() -> None:
    torch.manual_seed(0)
    model = contrast.MomentumContrast(_Encoder(), 8, queue=6, momentum=0.5)
    queue, weight = model.queue.clone(), model.key[0].weight.clone()
    with torch.no_grad():
        model.query[0].weight.add_(1.0)
    logits = model(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    assert logits.shape == (2, 7)
    assert torch.equal(model.queue[2:], queue[:-2])
    assert torch.allclose(model.key[0].weight, weight + 0.5)


def test_a_frame_is_looked_up_where_the_flow_leads() -> None:
    image = torch.arange(36.0).view(1, 1, 6, 6)
    flow_ = torch.zeros(1, 2, 6, 6)
    flow_[:, 0], flow_[:, 1] = 1.0, 2.0
    assert torch.allclose(flow.warped(image, flow_)[0, 0, :4, :5], image[0, 0, 2:, 1:])


def test_pools_of_device_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender's memory is what it holds since its first step and what its steps add, beside that of others."""
    others, pool, more = 700, 2**30, 2**29
    held = {"reserved": others + pool, "peak": 0}

    def step() -> None:
        held["reserved"] += more
        held["peak"] = max(held["peak"], held["reserved"])
        held["reserved"] -= more

    step.state_bytes = lambda: 2**28  # type: ignore[attr-defined]
    measured = worker.Measured.__new__(worker.Measured)
    measured.device, measured.steps, measured._held = torch.device("cuda"), {"theirs": step}, {"theirs": pool}
    monkeypatch.setattr(worker, "release", lambda _: None)
    monkeypatch.setattr(worker, "reserved", lambda _: held["reserved"])
    for name, found in {
        "memory_allocated": lambda: others,
        "max_memory_allocated": lambda: others + more,
        "max_memory_reserved": lambda: held["peak"],
        "reset_peak_memory_stats": lambda: None,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, found)
    assert measured._memory("theirs") == {"peak_gib": 0.75, "taken_gib": 1.5}
