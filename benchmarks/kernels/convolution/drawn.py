"""Convolutions drawn from published models: results checked, then our time beside cuDNN's, by class and pass.

    python -m benchmarks convolution.drawn --output FILE                # 200 problems of the report half, a fresh seed
    python -m benchmarks convolution.drawn --half tuning --seed 7 --kinds "depthwise|grouped"

Problems come from zoo.tsv beside this file (`convolution.zoo_problems` writes it); a class has its share of the draw,
and within a class a convolution that models have often is drawn often. A result is compared with the same pass of its
operands in float32 without TF32. Times: calls in turns over inputs that together exceed the cache, medians. cuDNN
runs with cudnn.benchmark on, in the same dtype, in both memory layouts; the faster one counts.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.convolution.calls import Convolutions, logical
from benchmarks.kernels.convolution.zoo_problems import BATCHES, HALVES, Convolution, Half, read
from benchmarks.kernels.launcher import on_stream
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.bench.timing import interleaved
from torch_max_backend.problems.convolution import Pass

#: Classes of problems, and each one's share of a draw on a GPU.
SHARES = {
    "depthwise 3x3": 10, "depthwise, larger windows": 14, "grouped": 10, "3-D": 8, "patch embedding": 8,
    "first layer": 6, "transposed": 4, "batch 1": 10, "1x1": 16, "3x3": 10, "other": 4,
}  # fmt: skip
#: ||result - reference|| / ||reference||: one rounding to 8, 11 bits of mantissa; TF32's factors have 11.
ERRORS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-3}
PASSES = {"forward": Pass.FPROP, "data gradient": Pass.DGRAD, "weight gradient": Pass.WGRAD}


@dataclass(frozen=True)
class Drawn:
    """A problem: a convolution on a batch, and its class."""

    kind: str
    convolution: Convolution
    batch: int

    def __str__(self) -> str:
        c = self.convolution

        def sizes(values: Sequence[int]) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

        text = f"n{c.n * self.batch} {c.c}>{c.k} {'x'.join(map(str, c.size))} f{'x'.join(map(str, c.filter))}"
        text += f" s{sizes(c.stride)} p{sizes(c.padding)}"
        text += f" d{sizes(c.dilation)}" if max(c.dilation) > 1 else ""
        text += f" g{c.groups}" if c.groups > 1 else ""
        return text + (" transposed" if c.transposed else "")


def kind_of(c: Convolution, batch: int) -> str:
    """The problem's class."""
    if c.transposed:
        return "transposed"
    if len(c.size) == 3:
        return "3-D"
    if c.groups == c.c > 1:
        return "depthwise 3x3" if max(c.filter) <= 3 else "depthwise, larger windows"
    if c.groups > 1:
        return "grouped"
    if max(c.filter) > 1 and c.filter == c.stride and not any(c.padding):
        return "patch embedding"
    if c.c <= 6:
        return "first layer"
    if batch == 1:
        return "batch 1"
    if max(c.filter) == 1:
        return "1x1"
    return "3x3" if set(c.filter) == {3} else "other"


@dataclass(frozen=True)
class Rules:
    """What a draw is from.

    Attributes:
        shares: each class's share.
        batches: of images.
        most_bytes: of operands in 16 bits; larger problems are not drawn.
        most_flops: likewise.
        kind: a problem's class.
    """

    shares: Mapping[str, int]
    batches: Sequence[int]
    most_bytes: int
    most_flops: float
    kind: Callable[[Convolution, int], str]


#: The float32 copies of the operands are for checking.
GPU = Rules(SHARES, BATCHES, 1 << 30, 1.5e12, kind_of)


def draw(half: Half, seed: int, count: int, kinds: str = "", rules: Rules = GPU) -> list[Drawn]:
    """About `count` different problems of the classes whose names match the regular expression; the same for a seed."""
    chance = random.Random(seed)
    keys: dict[str, list[tuple[float, Drawn]]] = {kind: [] for kind in rules.shares if re.search(kinds, kind)}
    for line in read(half):
        for batch in rules.batches:
            drawn = Drawn(rules.kind(line.convolution, batch), line.convolution, batch)
            # The largest keys are a draw without replacement, weighted by the counts.
            key = chance.random() ** (1 / line.count)
            problem = line.convolution.problem(batch)
            if drawn.kind in keys and problem.bytes(2) <= rules.most_bytes and problem.flops <= rules.most_flops:
                keys[drawn.kind].append((key, drawn))
    total = sum(rules.shares[kind] for kind in keys)
    result: list[Drawn] = []
    for kind, pairs in keys.items():
        pairs.sort(key=lambda pair: pair[0], reverse=True)
        result += [drawn for _, drawn in pairs[: round(count * rules.shares[kind] / total)]]
    return result


def cases(drawn: Drawn, role: Pass, dtype: torch.dtype, device: torch.device) -> list[ConvolutionCase]:
    """In our layout, and in PyTorch's."""
    problem = drawn.convolution.problem(drawn.batch)
    return [
        ConvolutionCase(str(drawn), problem, role, dtype, device, layout) for layout in ("channels_last", "contiguous")
    ]


def error_of(case: ConvolutionCase, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> float:
    """||result - reference|| / ||reference||, with the reference in float32, without TF32 and searching."""
    exact = ConvolutionCase(case.name, case.problem, case.role, torch.float32, case.device, case.layout)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        reference = exact.theirs(*(tensor.float() for tensor in inputs))
    return relative_error(logical(case, result), reference)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """||result - reference|| / ||reference||."""
    return (result.to(reference.dtype) - reference).norm().item() / (reference.norm().item() or 1.0)


def measure(
    drawn: Drawn, name: str, dtype: torch.dtype, device: torch.device, convolutions: Convolutions, runs: int
) -> dict[str, Any]:
    """One row of the results."""
    mine, plain = cases(drawn, PASSES[name], dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    # Twice the cache of an H200 at least; small problems stay in it on both sides.
    count = max(2, min(12, math.ceil(1e8 / mine.set_bytes)))
    sets = [mine.inputs(2, generator) for _ in range(count)]
    ours = [convolutions.bind(mine, inputs) for inputs in sets]
    error = error_of(mine, sets[0], ours[0]())
    calls: dict[str, Sequence[Callable[[], object]]] = {"ours": ours}
    # The same numbers in both layouts.
    calls["channels_last"] = [partial(mine.theirs, *inputs) for inputs in sets]
    calls["contiguous"] = [partial(plain.theirs, *(tensor.contiguous() for tensor in inputs)) for inputs in sets]
    times = interleaved(calls, runs, device)
    row: dict[str, Any] = {"kind": drawn.kind, "pass": name, "problem": str(drawn)}
    row |= {f"{key}_us": round(value.median * 1e6, 2) for key, value in times.items()}
    row["ratio"] = round(row["ours_us"] / min(row["channels_last_us"], row["contiguous_us"]), 3)
    row["error"] = float(f"{error:.2g}") if math.isfinite(error) else "not finite"
    row["right"] = error <= ERRORS[dtype]
    return row


def rows(
    problems: Sequence[Drawn],
    dtype: torch.dtype,
    device: torch.device,
    convolutions: Convolutions,
    runs: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Rows of all passes; after so many seconds no further problem is begun."""
    stop = time.perf_counter() + seconds
    for number, drawn in enumerate(problems):
        if time.perf_counter() > stop:
            print(f"left out: {len(problems) - number} problems", flush=True)
            return
        for name in PASSES:
            try:
                row = measure(drawn, name, dtype, device, convolutions, runs)
            except Exception as error:
                row = {"kind": drawn.kind, "pass": name, "problem": str(drawn), "failed": str(error)[:300]}
            figures = {key: row[key] for key in ("ours_us", "channels_last_us", "contiguous_us") if key in row}
            verdict = row.get("failed") or ("" if row["right"] else f"WRONG {row['error']}")
            print(
                f"{drawn.kind:26} {name:15} {drawn!s:52} {row.get('ratio', 0):6.2f} {list(figures.values())} {verdict}",
                flush=True,
            )
            yield row
        torch.cuda.empty_cache()


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """What a report says of ratios."""
    ordered = sorted(ratios)
    return {
        "problems": len(ordered),
        "geometric mean": round(statistics.geometric_mean(ordered), 3),
        "median": round(statistics.median(ordered), 3),
        "90 %": round(ordered[math.ceil(0.9 * len(ordered)) - 1], 3),
        "worst": round(ordered[-1], 3),
    }


def summary(measured: Sequence[dict[str, Any]], kinds: Iterable[str] = SHARES) -> dict[str, dict[str, float]]:
    """By pass, over all and by class."""
    result = {}
    for kind in ("all", *kinds):
        for name in PASSES:
            mine = (row for row in measured if row["pass"] == name and kind in ("all", row["kind"]))
            ratios = [row["ratio"] for row in mine if "ratio" in row]
            if ratios:
                result[f"{kind}: {name}"] = spread(ratios)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; a fresh one without it")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", default="", help="regular expression over the classes' names")
    parser.add_argument("--dtype", choices=[str(dtype).removeprefix("torch.") for dtype in ERRORS], default="bfloat16")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem after so long")
    parser.add_argument("--output", type=Path, help="the result file")
    options = parser.parse_args()
    device, dtype = torch.device("cuda", 0), getattr(torch, options.dtype)
    seed = int(time.time()) if options.seed is None else options.seed
    problems = draw(options.half, seed, options.count, options.kinds)
    # What is left out for want of time is a sample of every class.
    random.Random(seed).shuffle(problems)
    began = time.perf_counter()
    with torch.no_grad(), on_stream(device):
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        convolutions = Convolutions([dtype], device)
        print(f"{len(problems)} problems, seed {seed}, ready after {time.perf_counter() - began:.0f} s", flush=True)
        measured = list(rows(problems, dtype, device, convolutions, options.runs, options.seconds))
    table = summary(measured)
    for name, values in table.items():
        print(f"{name:45} {values}", flush=True)
    bad = [row for row in measured if not row.get("right")]
    print(f"{len(measured)} results, {len(bad)} wrong or failed, {time.perf_counter() - began:.0f} s", flush=True)
    if options.output:
        document = {
            **records.provenance(device),
            "ratio": "our median over the better one of cuDNN's in channels_last and in the default layout, in turns",
            "draw": {"half": options.half, "seed": seed, "count": options.count, "kinds": options.kinds},
            "dtype": options.dtype,
            "summary": table,
            "rows": measured,
        }
        records.write(options.output, document)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
