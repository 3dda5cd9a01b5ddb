"""A command over problems that are drawn at random: library functions checked against float64, or timed beside eager.

A family of kernels implements ``Family``; its module's ``main`` calls ``command``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks import records
from benchmarks.kernels.library import LAYOUTS
from torch_max_backend.bench.timing import interleaved

P = TypeVar("P")
QUEUED = 8
_MIN_SECONDS = 0.01
#: By the name of a pass: a call of ours and one of PyTorch's.
Contenders = Mapping[str, tuple[Callable[[], object], Callable[[], object]]]


class Family(Protocol[P]):
    """Library functions of one device, built and loaded; ``P`` is one problem, whose ``str`` names it."""

    device: torch.device

    def wrong(self, problem: P, dtype: torch.dtype, layout: str) -> list[str]:
        """What is wrong with the results of all passes, in words."""
        ...

    def contenders(self, problem: P, dtype: torch.dtype, layout: str) -> Contenders:
        """What to time."""
        ...


Draw = Callable[[random.Random, int, int], Iterator[P]]
"""Problems without an end, whose largest tensor has as many elements as the second number to the third."""


def check(
    family: Family[P], problems: Sequence[P], dtypes: Sequence[torch.dtype], layouts: Sequence[str] = LAYOUTS
) -> list[str]:
    """A line for each wrong result; dtypes and layouts take turns."""
    found = []
    for number, problem in enumerate(problems):
        torch.manual_seed(number)
        dtype, layout = dtypes[number % len(dtypes)], layouts[number // len(dtypes) % len(layouts)]
        found += [f"{problem} {dtype} {layout}: {line}" for line in family.wrong(problem, dtype, layout)]
    return found


def drawn(draw: Draw[P], seed: int, count: int, most: int, least: int = 1) -> list[P]:
    """The first ``count`` problems."""
    return list(itertools.islice(draw(random.Random(seed), least, most), count))


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _times(family: Family[P], problems: Sequence[P], args: argparse.Namespace, dtypes: Sequence[torch.dtype]) -> Any:
    """Rows and a summary; times are of calls whose operands the caches hold, as far as these are large enough."""
    rows: list[dict[str, Any]] = []
    queued = QUEUED if family.device.type == "cuda" else 1
    for number, problem in enumerate(problems):
        dtype = dtypes[number % len(dtypes)]
        layout = args.layouts.split(",")[number // len(dtypes) % len(args.layouts.split(","))]
        for name, pair in family.contenders(problem, dtype, layout).items():
            named = dict(zip(("ours", "eager"), pair, strict=True))
            if args.one_thread:
                best = cpu_times(named, args.runs)
            else:
                calls = {who: [_repeated(call, queued)] for who, call in named.items()}
                timed = interleaved(calls, args.runs, family.device, queued)
                best = {who: each.best * 1e6 / queued for who, each in timed.items()}
            row = {"problem": str(problem), "layout": layout, "dtype": str(dtype).removeprefix("torch."), "pass": name}
            rows.append({**row, **{f"{who}_us": round(time, 2) for who, time in best.items()}})
            ratio = best["ours"] / best["eager"]
            print(f"{problem!s:60} {layout:13} {row['dtype']:8} {name:10} {best['ours']:9.1f} {ratio:6.2f}", flush=True)
    summary = {}
    for name in dict.fromkeys(row["pass"] for row in rows):
        ratios = [row["ours_us"] / row["eager_us"] for row in rows if row["pass"] == name]
        summary[name] = {"over_eager": round(mean(ratios), 3), "worst_over_eager": round(max(ratios), 3)}
        print(name, summary[name])
    return {"summary": summary, "rows": rows}


def cpu_times(named: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Microseconds of this process's CPU time, which other work on the machine's cores hardly changes."""

    def clocked(call: Callable[[], object], times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - start) / times

    for call in named.values():
        call()
    times = {who: max(1, int(_MIN_SECONDS / max(clocked(call, 1), 1e-6))) for who, call in named.items()}
    taken = [{who: clocked(call, times[who]) for who, call in named.items()} for _ in range(runs)]
    return {who: min(each[who] for each in taken) * 1e6 for who in named}


def _repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def command(
    description: str | None,
    make: Callable[[torch.device, Sequence[torch.dtype]], Family[P]],
    draw: Draw[P],
    timed_on_gpu: str = "bfloat16,float32",
) -> int:
    """Reads the command's options, and checks or times; its exit status.

    Args:
        timed_on_gpu: dtypes that are timed on a GPU, in turns.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check", type=int, metavar="N", help="compare N problems with float64, instead of timing")
    parser.add_argument("--count", type=int, default=50, help="problems to time")
    parser.add_argument("--dtypes", help=f"default: {timed_on_gpu} to time on a GPU")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--least", type=int, help="elements of the largest tensor, at least")
    parser.add_argument("--most", type=int, help="and at most")
    parser.add_argument("--one-thread", action="store_true", help="on a CPU: CPU time of one thread, for busy machines")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write times as JSON here")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.one_thread:
        torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    timed = timed_on_gpu if on_gpu else "float32"
    dtypes = [
        getattr(torch, name)
        for name in (args.dtypes or ("float32,bfloat16,float16" if args.check else timed)).split(",")
    ]
    family = make(device, dtypes)
    if args.check:
        found = check(
            family, drawn(draw, args.seed, args.check, args.most or 1 << 16), dtypes, args.layouts.split(",")
        )  # fmt: skip
        print("\n".join(found))
        print(f"{args.check} problems, {len(found)} wrong results")
        return 1 if found else 0
    least, most = (1 << 20, 1 << 26) if on_gpu else (1 << 15, 1 << 21)
    problems = drawn(draw, args.seed, args.count, args.most or most, args.least or least)
    measured = _times(family, problems, args, dtypes)
    if args.output:
        records.write(args.output, {**records.provenance(device), "one_thread": args.one_thread, **measured})
    return 0
