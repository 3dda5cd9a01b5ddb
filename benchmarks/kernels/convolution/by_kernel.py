"""Ratios of drawn convolutions by the kernel that today's tables give each problem, from the result files.

    python -m benchmarks convolution.by_kernel

Runs nothing but the tables, so it needs no GPU. It writes benchmarks/results/convolution_by_kernel.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, records
from benchmarks.kernels.convolution import cpu
from benchmarks.kernels.convolution.calls import which_of
from benchmarks.kernels.convolution.drawn import GPU, PASSES, draw
from tests.kernels.programs import built
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.mojo_ops.convolution import workspace_limit
from torch_max_backend.problems.convolution import ConvolutionProblem

SOURCE = Path(__file__).with_name("kernel_names.mojo")
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: A multiple of 16 bytes.
ADDRESS = 4096
#: By table, the accelerator that is compiled for, and the result files by dtype.
MEASURED = {
    "sm90": ("sm_90a", {dtype: f"convolution_drawn_h200_{dtype}" for dtype in ITEMSIZES}),
    "cpu": ("", {dtype: f"convolution_cpu_{dtype}" for dtype in ("bfloat16", "float32")}),
}


def question(p: ConvolutionProblem, table: str, direction: str, dtype: str) -> str:
    """The program's argument, for fprop, dgrad or wgrad with tensors at aligned addresses; float32 may be TF32."""
    on_gpu = table != "cpu"
    # On a CPU filters lie in PyTorch's order.
    settings = [workspace_limit(p, ITEMSIZES[dtype], on_gpu=on_gpu), 1, int(not on_gpu)]
    extents = [*p.input_size, *p.filter_size, *p.output_size]
    numbers = [p.n, p.c, p.k, p.groups, *extents, *p.stride, *p.dilation, *p.padding, *settings]
    return ",".join(map(str, [table, direction, dtype, ADDRESS, *numbers]))


def names(program: Path, questions: Sequence[str]) -> list[str]:
    """The kernels that the problems get."""
    run = subprocess.run([program, *questions], capture_output=True, text=True, check=True)
    return run.stdout.split()


def rows(table: str, dtype: str, document: dict[str, Any], program: Path) -> list[dict[str, Any]]:
    """By kernel and pass: how many problems of a result file, and the ratios' mean, least and greatest."""
    rules = cpu.RULES if table == "cpu" else GPU
    # A class that was drawn again later has a draw of its own.
    draws = document["draw"] if isinstance(document["draw"], list) else [document["draw"]]
    known = {
        str(each): each
        for chosen in draws
        for each in draw(chosen["half"], chosen["seed"], chosen["count"], chosen["kinds"], rules)
    }
    asked, ratios = [], []
    for row in document["rows"]:
        # Rows that name a kernel ran on one that today's table does not give them.
        if "ratio" in row and "kernel" not in row:
            drawn = known[row["problem"]]
            problem = drawn.convolution.problem(drawn.batch)
            case = ConvolutionCase("", problem, PASSES[row["pass"]], torch.float32, torch.device("cpu"))
            asked.append((which_of(case).value.removeprefix("conv_"), drawn))
            ratios.append(row["ratio"])
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    answers = names(
        program,
        [question(drawn.convolution.problem(drawn.batch), table, direction, dtype) for direction, drawn in asked],
    )
    for (direction, _), kernel, ratio in zip(asked, answers, ratios, strict=True):
        found[kernel, direction].append(ratio)
    return [
        {
            "table": table, "kernel": kernel, "pass": direction, "dtype": dtype, "problems": len(each),
            "ratio": round(statistics.geometric_mean(each), 2), "least": min(each), "greatest": max(each),
        }
        for (kernel, direction), each in sorted(found.items())
    ]  # fmt: skip


def main() -> None:
    """Asks, prints and writes."""
    found, dates = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for table, (accelerator, files) in MEASURED.items():
            # The CPU of the result files has no tile registers.
            program = built(SOURCE, Path(folder), accelerator, own_features=False)
            for dtype, name in files.items():
                document = json.loads((RESULTS / f"{name}.json").read_text())
                found += rows(table, dtype, document, program)
                dates[name] = document["date"]
    for row in found:
        print(*row.values())
    facts = {"date": records.date(), "versions": records.versions(torch.device("cpu")), "measured": dates}
    records.write(RESULTS / "convolution_by_kernel.json", {**facts, "rows": found})


if __name__ == "__main__":
    main()
