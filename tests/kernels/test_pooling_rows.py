"""Which kernel every pooling problem of the benchmarks gets, so that no change of a table orphans one in silence.

`pooling_rows.txt` holds the answers; `python -m tests.kernels.test_pooling_rows` writes it anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from benchmarks.kernels import problems
from benchmarks.kernels.pooling.run import Case
from tests.kernels.programs import built
from torch_max_backend.mojo_ops import KERNELS_PATH

SOURCE = Path(__file__).with_name("pooling_rows.mojo")
EXPECTED = Path(__file__).with_name("pooling_rows.txt")
COLUMNS = tuple(product(("cpu", "gpu"), ("fprop", "dgrad")))
#: On a CPU the dtypes take the same kernels.
DTYPES = {"cpu": ("float32",), "gpu": ("float32", "bfloat16")}


def questions(case: Case, layout: str, device: str, direction: str) -> Iterator[tuple[str, str]]:
    """What distinguishes a question within one column, and the program's argument."""
    problem = case.problem()
    batch = case.n if device == "gpu" else case.cpu_n
    batch, channels = (batch, case.c) if layout == "channels_last" else (batch * case.c, 1)
    axes = zip(
        problem.input,
        problem.output,
        problem.window,
        problem.stride,
        problem.padding,
        problem.dilation,
        strict=True,
    )
    numbers = [batch, channels, *(value for axis in axes for value in axis), int(case.count_include_pad), 0]
    for argmaxes in ("index", "offset") if case.op == "max" else ("average",):
        for dtype in DTYPES[device]:
            yield f"{argmaxes} {dtype}", ",".join(map(str, [device, direction, dtype, argmaxes, *numbers]))


def answers(program: Path) -> str:
    """A line for each problem and layout, a column for each device and pass."""
    cases = [Case(**line) for line in problems.poolings("")]
    lines = list(product(cases, ("contiguous", "channels_last")))
    asked = [
        (line, column, what, argument)
        for line, (case, layout) in enumerate(lines)
        for column in COLUMNS
        for what, argument in questions(case, layout, *column)
    ]
    run = subprocess.run([program, *(argument for *_, argument in asked)], capture_output=True, text=True, check=True)
    names: dict[tuple[int, tuple[str, str]], dict[str, str]] = {}
    for (line, column, what, _), name in zip(asked, run.stdout.split(), strict=True):
        names.setdefault((line, column), {})[what] = name
    rows = [["problem", "layout", *(" ".join(column) for column in COLUMNS)]]
    for line, (case, layout) in enumerate(lines):
        rows.append([case.name, layout, *(_together(names[line, column]) for column in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def _together(named: dict[str, str]) -> str:
    """One name where all are equal, else each with what it is for."""
    if len(set(named.values())) == 1:
        return next(iter(named.values()))
    return ", ".join(f"{name} ({what})" for what, name in named.items())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return answers(built(SOURCE, tmp_path_factory.mktemp("pooling_rows")))


def test_rows_run_the_kernels_that_are_written_down(table: str) -> None:
    assert table == EXPECTED.read_text(), "python -m tests.kernels.test_pooling_rows writes what changed"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_fast_kernel_has_a_row(table: str, device: str) -> None:
    sources = (KERNELS_PATH / "pooling" / device).glob("*.mojo")
    names = {name for path in sources for name in re.findall(r'NAME: StaticString = "(\w+)"', path.read_text())}
    assert len(names) > 5
    assert names <= set(re.findall(r"\w+", table))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        EXPECTED.write_text(answers(built(SOURCE, Path(folder))))
    sys.exit(0)
