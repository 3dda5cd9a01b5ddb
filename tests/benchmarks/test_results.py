"""Result files: one row in one line, and no more of them than a page, a test or a program reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import RESULTS, ROOT, records
from benchmarks.__main__ import benchmarks, run

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            {"a": 1, "rows": [{"x": [1, 2]}, {"x": None}]},
            '{\n "a": 1,\n "rows": [\n  {"x": [1, 2]},\n  {"x": null}\n ]\n}\n',
        ),
        ({"of": {"b": {"c": 1}, "d": {}}}, '{\n "of": {\n  "b": {"c": 1},\n  "d": {}\n }\n}\n'),
        ([{"runs": [{"ms": 2.5}]}], '[\n {\n  "runs": [\n   {"ms": 2.5}\n  ]\n }\n]\n'),
        ({"wrong": [], "hardware": {"gpu": "é"}}, '{\n "wrong": [],\n "hardware": {"gpu": "\\u00e9"}\n}\n'),
    ],
)
def test_a_row_is_a_line(content: Any, text: str) -> None:
    assert records.compact(content) == text


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        records.write(tmp_path / "file.json", {"ms": float("nan")})


def test_a_file_says_what_it_was_measured_on(tmp_path: Path) -> None:
    records.write(tmp_path / "new" / "file.json", records.provenance(torch.device("cpu")))
    read = json.loads((tmp_path / "new" / "file.json").read_text())
    assert {"cpu", "cores", "threads"} <= set(read["hardware"])
    assert {"python", "torch", "max", "mojo", "kernels"} <= set(read["versions"])


def _results(path: Path, *, retry: bool = False, **settings: object) -> records.Results:
    return records.Results(path, settings, key=("model", "contender"), order=("model",), retry=retry)


def test_a_run_goes_on_with_the_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    first = _results(path, amp="none")
    first.facts = {"date": "today"}
    first.add({"model": "b", "contender": "max", "ms": 2.0})
    first.add({"model": "a", "contender": "max", "error": "gone"})
    again = _results(path, amp="none")
    assert again.facts == {"date": "today"}
    assert again.get({"model": "b", "contender": "max", "more": 1}) == {"model": "b", "contender": "max", "ms": 2.0}
    assert again.get({"model": "b", "contender": "eager"}) is None
    again.add({"model": "b", "contender": "max", "ms": 3.0})
    document = json.loads(path.read_text())
    assert (document["amp"], document["date"]) == ("none", "today")
    assert [(row["model"], row.get("ms")) for row in document["rows"]] == [("a", None), ("b", 3.0)]


def test_rows_that_others_wrote_meanwhile_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    runs = [_results(path) for _ in range(2)]
    for number, run_ in enumerate([*runs, *runs]):
        run_.add({"model": f"{number}", "contender": "max"})
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["0", "1", "2", "3"]


def test_failures_are_left_out_where_they_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    _results(path).add({"model": "a", "contender": "max", "error": "gone"})
    again = _results(path, retry=True)
    assert not again.rows
    again.add({"model": "b", "contender": "max", "error": "gone, too"})
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["b"]


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    _results(path, amp="none").add({"model": "a", "contender": "max"})
    with pytest.raises(Exception, match="another amp, steps"):
        _results(path, amp="bf16", steps=2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_files_are_compact_and_read(path: Path) -> None:
    text = path.read_text()
    assert text == records.compact(json.loads(text))
    readers = [
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]
    assert any(path.stem in reader.read_text() for reader in readers)


def test_the_repository_holds_little_json() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").rglob("*.json")) <= 10_000


def test_the_runner_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"training_step", "pooling.run", "convolution.cpu", "convolution.any_gpu"} <= set(benchmarks())
    assert run([]) == 0
    assert run(["absent"]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed and each.summary in printed for name, each in benchmarks().items())
