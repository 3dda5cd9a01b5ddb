"""The tables of PyTorch's suites, from rows whose means are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.pages import charts, suite_tables
from benchmarks.pages import parts as table_parts


def _row(model: str, contender: str, ms: float, **more: Any) -> dict[str, Any]:
    figures = {"step_ms": ms, "queued_ms": ms - 1, "eager_ms": 16.0, "peak_gib": ms, "first_step_s": 10.0}
    accuracy = {"right": True, "sharp": True, "worst": "loss", "errors": [0.1, 0.2], "wrong": []}
    return {"model": model, "contender": contender, "batch": 8, **figures, **accuracy, **more}


ROWS = [
    _row("a", "eager", 16.0), _row("a", "max", 8.0, left_to_pytorch={"aten.sort": "no lowering"}, graphs=2),
    _row("a", "max, captured", 4.0, taken_gib=3.0), _row("a", "inductor", 16.0, taken_gib=8.0),
    _row("a", "inductor, CUDA graphs", 8.0, taken_gib=4.0),
    _row("b", "eager", 16.0), _row("b", "max", 2.0, sharp=False, worst="gradient of w", errors=[0.5, 0.125]),
    _row("b", "max, captured", 4.0), _row("b", "inductor", 8.0), _row("b", "inductor, CUDA graphs", 2.0),
    _row("c", "eager", 16.0), {"model": "c", "contender": "max", "batch": 8, "error": "LoweringError: no"},
    _row("c", "max, captured", 1.0, right=False, wrong=["gradient of v"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (suite_tables, table_parts):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    facts = {"suite": "timm", "mode": "training", "caches": "empty"}
    facts |= {"amp": "bf16", "device": "cuda", "date": "2026-11-27", "cudnn_benchmark": True}
    facts |= {"hardware": {"gpu": "some GPU"}, "versions": {"torch": "2.11.0", "max": "26.7.0"}}
    records.write(tmp_path / "suite_timm.json", {**facts, "rows": ROWS})
    return tmp_path


def _cells(table: str, first: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if f"| {first} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_means_are_of_models_where_the_contender_is_right() -> None:
    table = suite_tables.suites()
    # Speeds 2 and 8, times over CUDA graphs 1 and 1, memory 1/2 and 1/8 of eager's.
    assert _cells(table, "ours")[2:] == ["2 of 3", "4.00", "1.00", "10.0", "0.25", ""]
    # What is reserved is known of one model.
    assert _cells(table, "ours, captured")[2:] == ["2 of 3", "4.00", "1.00", "10.0", "0.25", "0.75"]
    assert _cells(table, "Inductor")[2:] == ["2 of 2", "1.41", "2.83", "10.0", "0.71", "2.00"]
    assert _cells(table, "Inductor, CUDA graphs")[2:] == ["2 of 2", "4.00", "", "10.0", "", ""]
    assert "some GPU, PyTorch 2.11.0" in table


def test_a_models_row_says_why() -> None:
    table = suite_tables.suite_models()
    assert table.startswith("### timm, training, bfloat16, cuda")
    assert _cells(table, "a, 8")[1:6] == ["16.0 (15.0)", "8.0 (7.0)", "4.0 (3.0)", "16.0 (15.0)", "8.0 (7.0)"]
    sizes = ["16.0, 4.0, 16.0", "3.0, 8.0, 4.0"]
    assert _cells(table, "a, 8")[6:] == ["0.50", "10, 10", *sizes, "aten.sort stays in PyTorch: no lowering"]
    assert _cells(table, "b, 8")[6] == "2.00"
    notes = _cells(table, "b, 8")[-1]
    assert "ours: gradient of w is off by 0.5 of its size, eager's by 0.12" in notes
    assert "ours, captured is slower than Inductor, CUDA graphs (2.00)" in notes
    failing = _cells(table, "c, 8")
    assert failing[2:4] == ["fails", "1.0 (0.0), wrong"]
    assert failing[-1] == "ours fails: LoweringError: no; ours, captured is wrong in gradient of v"


def test_rows_say_where_cudnn_did_not_search(results: Path) -> None:
    rows = [{**row, "cudnn_benchmark": row["model"] != "b"} for row in ROWS]
    document = json.loads((results / "suite_timm.json").read_text())
    records.write(results / "suite_timm.json", {**document, "cudnn_benchmark": False, "rows": rows})
    table = suite_tables.suite_models()
    assert "cuDNN did not time its kernels first" in _cells(table, "b, 8")[-1]
    assert "cuDNN" not in _cells(table, "a, 8")[-1]


def test_the_picture_has_a_bar_for_each_contender(tmp_path: Path) -> None:
    (speeds,) = suite_tables.speeds().values()
    assert speeds == pytest.approx({"ours": 4.0, "ours, captured": 4.0, "Inductor": 2**0.5, "Inductor, CUDA graphs": 4})
    charts.suites(tmp_path / "suites.png")
    assert (tmp_path / "suites.png").stat().st_size > 1000


def test_without_results_the_pages_say_so(results: Path) -> None:
    (results / "suite_timm.json").unlink()
    assert "no result files" in suite_tables.suites()
    assert "no result files" in suite_tables.suite_models()
