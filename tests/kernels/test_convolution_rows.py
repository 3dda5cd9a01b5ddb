"""Which kernel drawn convolutions get on a Hopper GPU, so that no change of a table orphans one in silence.

`convolution_rows.txt` holds the answers; `python -m tests.kernels.test_convolution_rows` writes it anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

from benchmarks.kernels.convolution.by_kernel import SOURCE, names, question
from benchmarks.kernels.convolution.drawn import draw
from tests.kernels.programs import built
from torch_max_backend.mojo_ops import KERNELS_PATH

EXPECTED = Path(__file__).with_name("convolution_rows.txt")
PASSES = ("fprop", "dgrad", "wgrad")
DTYPES = ("bfloat16", "float32")


def answers(program: Path) -> str:
    """A line for each problem, a column for each pass; in float32 with TF32."""
    problems = draw("tuning", seed=0, count=150)
    asked = list(product(problems, PASSES, DTYPES))
    questions = [question(drawn, "sm90", direction, dtype) for drawn, direction, dtype in asked]
    named = dict(zip(asked, names(program, questions), strict=True))
    rows = [["problem", *PASSES]]
    for drawn in problems:
        each = [[named[drawn, direction, dtype] for dtype in DTYPES] for direction in PASSES]
        rows.append([str(drawn), *(a if a == b else f"{a}, float32: {b}" for a, b in each)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def program_in(folder: Path) -> Path:
    """Compiled for Hopper; it runs on the host."""
    return built(SOURCE, folder, accelerator="sm_90a")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_in(tmp_path_factory.mktemp("convolution_rows"))


def test_rows_run_the_kernels_that_are_written_down(program: Path) -> None:
    assert answers(program) == EXPECTED.read_text(), "python -m tests.kernels.test_convolution_rows writes what changed"


def test_every_fast_kernel_has_a_row() -> None:
    sources = [path for device in ("gpu", "sm90") for path in (KERNELS_PATH / "convolution" / device).glob("*.mojo")]
    known = {name for path in sources for name in re.findall(r'NAME: StaticString = "(\w+)"', path.read_text())}
    assert len(known) > 10
    # The one for GPUs without tensor cores.
    assert known - {"tiled"} <= set(re.findall(r"\w+", EXPECTED.read_text()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        EXPECTED.write_text(answers(program_in(Path(folder))))
    sys.exit(0)
