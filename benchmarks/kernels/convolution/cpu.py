"""Convolutions drawn from published models, beside PyTorch eager on a CPU: by class and pass.

    python -m benchmarks convolution.cpu --dtype bfloat16 --output FILE    # a fresh draw from the report half
    python -m benchmarks convolution.cpu --half tuning --seed 7 --kinds "first layer|grouped"

Our kernels run as in training: called by a launch list, on PyTorch's threads, activations channels-last and filters in
PyTorch's order. Eager runs in the default layout and in channels_last; the faster one counts. All take turns, over
inputs that together exceed the cache, and the best time of each counts. Results are compared with float64 (bfloat16's
with float32).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.convolution.calls import Convolutions, logical
from benchmarks.kernels.convolution.drawn import PASSES, Drawn, Rules, draw, kind_of, relative_error, summary
from benchmarks.kernels.convolution.zoo_problems import HALVES, Convolution
from torch_max_backend.bench.ceilings import ceilings
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.bench.memory import cache_bytes
from torch_max_backend.bench.timing import interleaved

CPU = torch.device("cpu")
#: Pixels of an image's result that are few.
SMALL_PLANE = 64
#: ||result - reference|| / ||reference||: sums in float32, rounded once to 8 bits of mantissa.
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def class_of(c: Convolution, batch: int) -> str:
    """As for a GPU, but that small planes and strides are classes of their own."""
    kind = kind_of(c, batch)
    if kind not in ("batch 1", "1x1", "3x3", "other"):
        return kind
    if math.prod(c.problem().output_size) <= SMALL_PLANE:
        return "small planes"
    return "strided" if max(c.stride) > 1 else kind


RULES = Rules(
    {
        "first layer": 8, "1x1": 16, "3x3": 12, "strided": 8, "small planes": 12, "batch 1": 6, "other": 4,
        "depthwise 3x3": 10, "depthwise, larger windows": 8, "grouped": 6, "3-D": 4, "patch embedding": 4,
        "transposed": 2,
    },
    batches=(1, 2, 4, 8, 16), most_bytes=1 << 27, most_flops=4e9, kind=class_of,
)  # fmt: skip


def measure(drawn: Drawn, name: str, dtype: torch.dtype, convolutions: Convolutions, runs: int) -> dict[str, Any]:
    """One row of the results."""
    problem = drawn.convolution.problem(drawn.batch)
    last, plain = (
        ConvolutionCase(str(drawn), problem, PASSES[name], dtype, CPU, layout)
        for layout in ("channels_last", "contiguous")
    )
    generator = torch.Generator().manual_seed(0)
    count = max(2, min(8, math.ceil(2 * cache_bytes(CPU) / last.set_bytes)))
    sets = [plain.inputs(2, generator) for _ in range(count)]
    like = last.inputs(0, generator)
    lasts = [[torch.empty_like(to).copy_(one) for one, to in zip(each, like, strict=True)] for each in sets]
    calls: dict[str, list[Callable[[], torch.Tensor]]] = {
        "ours": [convolutions.bind(plain, inputs) for inputs in sets],
        "channels_last": [partial(last.theirs, *inputs) for inputs in lasts],
        "contiguous": [partial(plain.theirs, *inputs) for inputs in sets],
    }
    wide = torch.float32 if dtype == torch.bfloat16 else torch.float64
    exact = plain.theirs(*(tensor.to(wide) for tensor in sets[0]))
    error = relative_error(logical(plain, calls["ours"][0]()), exact)
    times = {key: value.best for key, value in interleaved(calls, runs, CPU).items()}
    row: dict[str, Any] = {"kind": drawn.kind, "pass": name, "problem": str(drawn)}
    row |= {f"{key}_us": round(value * 1e6, 1) for key, value in times.items()}
    row["ratio"] = round(times["ours"] / min(times["channels_last"], times["contiguous"]), 3)
    row["share"] = float(f"{problem.flops / times['ours'] / ceilings(CPU, dtype).flops_per_second:.3g}")
    row["error"] = float(f"{error:.2g}") if math.isfinite(error) else "not finite"
    row["right"] = error <= ERRORS[dtype]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; a fresh one without it")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--kinds", default="", help="regular expression over the classes' names")
    parser.add_argument("--dtype", choices=[str(dtype).removeprefix("torch.") for dtype in ERRORS], default="float32")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="the result file")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    seed = int(time.time()) if options.seed is None else options.seed
    problems = draw(options.half, seed, options.count, options.kinds, RULES)
    random.Random(seed).shuffle(problems)
    began, before = time.perf_counter(), os.getloadavg()[0]
    convolutions = Convolutions([dtype], CPU)
    peak = ceilings(CPU, dtype).flops_per_second
    print(f"{len(problems)} problems, seed {seed}, a matmul's {peak / 1e9:.0f} GFLOP/s", flush=True)
    rows = []
    with torch.no_grad():
        for drawn in problems:
            for name in PASSES:
                row = measure(drawn, name, dtype, convolutions, options.runs)
                rows.append(row)
                figures = [row[key] for key in ("ours_us", "channels_last_us", "contiguous_us", "share")]
                verdict = "" if row["right"] else f"WRONG {row['error']}"
                print(f"{drawn.kind:26} {name:15} {drawn!s:52} {row['ratio']:6.2f} {figures} {verdict}", flush=True)
    table = summary(rows, RULES.shares)
    for name, values in table.items():
        print(f"{name:45} {values}", flush=True)
    bad = [row for row in rows if not row["right"]]
    print(f"{len(rows)} results, {len(bad)} wrong, {time.perf_counter() - began:.0f} s", flush=True)
    if options.output:
        document = {
            **records.provenance(CPU),
            "load average": [round(value, 1) for value in (before, os.getloadavg()[0])],
            "ratio": "our best time over eager's better layout's, in turns",
            "draw": {"half": options.half, "seed": seed, "count": options.count, "kinds": options.kinds},
            "dtype": options.dtype,
            "matmul GFLOP/s": round(peak / 1e9, 1),
            "summary": table,
            "rows": rows,
        }
        records.write(options.output, document)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
