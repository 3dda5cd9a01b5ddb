"""Which kernel drawn convolutions get on a Hopper GPU, so that no change of a table orphans one in silence.

`convolution_rows.txt` holds the answers; `python -m tests.kernels.test_convolution_rows` writes it anew.
"""

from __future__ import annotations

import math
import random
import re
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest
from max.dtype import DType

from benchmarks.kernels.convolution.by_kernel import SOURCE, names, question
from benchmarks.kernels.convolution.drawn import draw
from benchmarks.kernels.convolution.random_check import random_problem
from tests.kernels.programs import built
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.convolution import Geometry
from torch_max_backend.mojo_ops.fused_convolution import FusedPass, phases_in_store
from torch_max_backend.problems.convolution import ConvolutionProblem

EXPECTED = Path(__file__).with_name("convolution_rows.txt")
PASSES = ("fprop", "dgrad", "wgrad")
#: With more along an axis no forward pass is read by the copy engine.
MAX_STRIDE = 8
MAX_PHASES = 16
DTYPES = ("bfloat16", "float32")


def answers(program: Path) -> str:
    """A line for each problem, a column for each pass; in float32 with TF32."""
    problems = draw("tuning", seed=0, count=150)
    asked = list(product(problems, PASSES, DTYPES))
    questions = [
        question(drawn.convolution.problem(drawn.batch), "sm90", direction, dtype) for drawn, direction, dtype in asked
    ]
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


def forecast(p: ConvolutionProblem, which: FusedPass, dtype: DType) -> int:
    """What fusion expects of a kernel with a program in its store, 0 where it expects none."""
    geometry = Geometry(tuple(p.stride), tuple(p.padding), tuple(p.dilation), p.groups)
    x, w, y = (p.n, *p.input_size, p.c), (p.k, *p.filter_size, p.c // p.groups), (p.n, *p.output_size, p.k)
    result, a = (y, x) if which == "conv_fprop" else (x, y)
    return phases_in_store(which, dtype, geometry, list(map(int, result)), list(map(int, a)), w) or 0


def test_fusion_expects_what_kernels_with_a_program_in_their_store_take(program: Path) -> None:
    """Which problems, and for how many phases of a data gradient."""
    chance = random.Random(2)
    drawn = [random_problem(chance) for _ in range(600)]
    # Of 5 to 8 along an axis: what a kernel for more than a few phases takes, and what none does.
    strides = [[4], [3], [2, 4], [2, 5], [4, 5], [1, 8]]
    drawn += [ConvolutionProblem.from_sizes(2, 64, 72, [23, 23], [3, 3], stride=stride) for stride in strides]
    problems = [p for p in drawn if max(p.stride) <= MAX_STRIDE]
    fused: dict[str, FusedPass] = {"fprop": "conv_fprop", "dgrad": "conv_dgrad"}
    asked = list(product(problems, fused, (DType.bfloat16, DType.float32)))
    # Forward passes with so many phases are rare, and not fused, though kernels take some.
    asked = [each for each in asked if each[1] == "dgrad" or math.prod(each[0].stride) <= MAX_PHASES]
    answers = names(program, [question(p, "fused", direction, dtype.name) for p, direction, dtype in asked])
    found = list(map(int, answers))
    expected = [forecast(p, fused[direction], dtype) for p, direction, dtype in asked]
    assert [(got, *each) for got, want, each in zip(found, expected, asked, strict=True) if got != want] == []
    assert all(found.count(phases) >= 5 for phases in (1, 8, MAX_PHASES)) and found.count(0) > 500


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
