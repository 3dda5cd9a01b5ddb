"""The committed convolutions of published models, and draws from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.kernels.convolution import by_kernel, zoo_problems
from benchmarks.kernels.convolution.calls import Convolutions
from benchmarks.kernels.convolution.cpu import measure
from benchmarks.kernels.convolution.drawn import PASSES, SHARES, Drawn, draw, kind_of, spread, summary
from benchmarks.kernels.convolution.random_check import check, random_problem
from benchmarks.kernels.convolution.zoo_problems import HALVES, ZOO, Convolution, Half, read, text_of
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.problems.convolution import Pass


@pytest.fixture(scope="module")
def lines() -> dict[Half, list[zoo_problems.Line]]:
    return {half: read(half) for half in HALVES}


def test_the_file_is_what_the_script_writes(lines: dict[Half, list[zoo_problems.Line]]) -> None:
    assert text_of([line for half in HALVES for line in lines[half]]) == ZOO.read_text()


def test_every_line_is_a_problem_of_one_half(lines: dict[Half, list[zoo_problems.Line]]) -> None:
    models = {half: {line.model for line in lines[half]} for half in HALVES}
    assert not models["tuning"] & models["report"]
    assert len(models["tuning"] | models["report"]) > 60
    assert sum(map(len, lines.values())) * len(zoo_problems.BATCHES) > 2000
    for line in [*lines["tuning"], *lines["report"]]:
        assert line.count > 0
        assert line.convolution.problem(8).flops == 8 * line.convolution.problem().flops > 0


def test_a_draw_repeats_and_holds_every_class() -> None:
    drawn = draw("report", 3, 200)
    assert drawn == draw("report", 3, 200) != draw("report", 4, 200)
    assert len(set(drawn)) == len(drawn)
    assert {each.kind for each in drawn} == set(SHARES)
    assert 190 <= len(drawn) <= 205
    assert {each.kind for each in draw("tuning", 0, 40, "depthwise|^3-D")} == {
        "depthwise 3x3", "depthwise, larger windows", "3-D",
    }  # fmt: skip


def test_calls_of_a_model_are_counted_with_their_geometry() -> None:
    layers = [
        nn.Conv2d(3, 8, 3, (2, 1), 1),
        nn.Conv2d(8, 8, 5, padding="same", groups=8),
        nn.Conv2d(8, 8, 5, padding="same", groups=8),
        nn.ConvTranspose2d(8, 4, 4, 4),
    ]
    with zoo_problems._Recorder() as recorder, torch.no_grad():
        nn.Sequential(*layers).to("meta")(torch.empty(1, 3, 8, 8, device="meta"))
    one, two = (1, 1), (2, 2)
    first = Convolution(1, 3, 8, (8, 8), (3, 3), (2, 1), one, one, 1, False, (0, 0))
    middle = Convolution(1, 8, 8, (4, 8), (5, 5), one, two, one, 8, False, (0, 0))
    last = Convolution(1, 8, 4, (4, 8), (4, 4), (4, 4), (0, 0), one, 1, True, (0, 0))
    assert recorder.found == {first: 1, middle: 2, last: 1}
    kinds = [kind_of(convolution, 8) for convolution in (first, middle, last)]
    assert kinds == ["first layer", "depthwise, larger windows", "transposed"]
    assert last.problem(2).aten_output_shape == (2, 4, 16, 32)


def test_a_summary_tells_the_distribution_by_class_and_pass() -> None:
    assert spread([1.0, 4.0, 2.0, 2.0]) == {
        "problems": 4, "geometric mean": 2.0, "median": 2.0, "90 %": 4.0, "worst": 4.0,
    }  # fmt: skip
    rows = [{"kind": "1x1", "pass": "forward", "ratio": 2.0}, {"kind": "3-D", "pass": "forward", "ratio": 0.5}]
    rows.append({"kind": "1x1", "pass": "forward", "failed": "out of memory"})
    table = summary(rows)
    assert list(table) == ["all: forward", "3-D: forward", "1x1: forward"]
    assert table["all: forward"]["geometric mean"] == 1.0


@pytest.fixture(scope="module")
def convolutions() -> Convolutions:
    return Convolutions([torch.float32], torch.device("cpu"))


def test_a_row_of_each_kind_of_groups_is_right_on_a_cpu(
    lines: dict[Half, list[zoo_problems.Line]], convolutions: Convolutions
) -> None:
    small = [line.convolution for line in lines["tuning"] if line.convolution.problem(1).flops < 1e7]
    kinds = {(each.groups > 1) + (each.groups == each.c > 1): each for each in small}
    assert len(kinds) == 3
    for convolution in kinds.values():
        rows = [measure(Drawn("", convolution, 1), name, torch.float32, convolutions, 1) for name in PASSES]
        assert all(row["right"] and row["ours_us"] > 0 for row in rows)


def test_random_problems_are_right_on_a_cpu(convolutions: Convolutions) -> None:
    chance = random.Random(3)
    problems = [random_problem(chance) for _ in range(12)]
    assert {problem.transposed for problem in problems} == {True, False}
    for problem in problems:
        faults = [check(problem, role, torch.float32, torch.device("cpu"), convolutions, chance) for role in Pass]
        assert faults == ["", "", ""], problem


def test_a_wrong_result_is_found(convolutions: Convolutions, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(random.Random(0))
    right = ConvolutionCase.reference
    monkeypatch.setattr(ConvolutionCase, "reference", lambda self, inputs: right(self, inputs) + 1)
    fault = check(problem, Pass.FPROP, torch.float32, torch.device("cpu"), convolutions, random.Random(0))
    assert fault.endswith("differ")


def test_rows_of_a_draw_are_told_apart_by_kernel_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = draw("report", 1, 40, "transposed|1x1")
    plain, transposed = (next(each for each in problems if each.kind == kind) for kind in ("1x1", "transposed"))
    asked: list[list[str]] = []

    def names(program: Path, questions: Sequence[str]) -> list[str]:
        asked.extend(each.split(",")[:3] for each in questions)
        return ["gemm"] * len(questions)

    monkeypatch.setattr(by_kernel, "names", names)
    measured = [(plain, "forward", 2.0), (plain, "forward", 0.5), (transposed, "forward", 3.0)]
    rows = [{"problem": str(each), "pass": name, "ratio": ratio} for each, name, ratio in measured]
    rows.append({"problem": str(plain), "pass": "forward", "failed": "out of memory"})
    chosen = {"half": "report", "seed": 1, "count": 40, "kinds": "transposed|1x1"}
    found = by_kernel.rows("sm90", "float32", {"draw": chosen, "rows": rows}, Path("program"))
    # The forward pass of a transposed convolution is a data gradient.
    assert asked == [["sm90", "fprop", "float32"], ["sm90", "fprop", "float32"], ["sm90", "dgrad", "float32"]]
    told = [(row["kernel"], row["pass"], row["problems"], row["ratio"], row["greatest"]) for row in found]
    assert told == [("gemm", "dgrad", 1, 3.0, 3.0), ("gemm", "fprop", 2, 1.0, 2.0)]
