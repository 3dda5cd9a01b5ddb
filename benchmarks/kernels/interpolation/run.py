"""Times interpolation's kernels beside eager PyTorch on problems drawn at random, forward and backward.

    python -m benchmarks interpolation.run --device cuda --output FILE      # two minutes
    python -m benchmarks interpolation.run --device cpu --count 60 --layouts channels_last

Our library function is called as a launch list calls it; the tables of the axes are there already, as in a launch
list. PyTorch's gradient is that of its op alone. `floor` is the time in which this device copies as many bytes as both
tensors have. On a GPU problems of DeepLabV3 and of pyramid pooling come first, then drawn ones, and times are those of
queued calls. All take turns over inputs that the cache does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.drawn import cpu_times, mean
from benchmarks.kernels.interpolation.calls import Calls
from benchmarks.kernels.interpolation.drawn import Drawn, draw
from benchmarks.kernels.library import LAYOUTS, memory_format, shown
from torch_max_backend.bench import memory
from torch_max_backend.bench.ceilings import copy_rate
from torch_max_backend.bench.timing import interleaved, set_count
from torch_max_backend.problems.interpolation import Mode
from torch_max_backend.runtime.engine.streams import stream_sync

QUEUED = 8
CHOSEN = (
    Drawn(Mode.LINEAR, 8, 256, (65, 65), (129, 129)),
    Drawn(Mode.LINEAR, 8, 21, (64, 64), (512, 512)),
    Drawn(Mode.LINEAR, 8, 5, (64, 64), (512, 512)),
    Drawn(Mode.LINEAR, 8, 512, (2, 2), (60, 60)),
    Drawn(Mode.LINEAR, 8, 512, (6, 6), (60, 60)),
    Drawn(Mode.LINEAR, 8, 19, (128, 128), (512, 512)),
    Drawn(Mode.NEAREST, 16, 256, (32, 32), (64, 64), False, (2.0, 2.0)),
    Drawn(Mode.NEAREST, 8, 128, (80, 80), (160, 160), False, (2.0, 2.0)),
    Drawn(Mode.LINEAR, 4, 64, (24, 24, 24), (48, 48, 48), False, (2.0, 2.0, 2.0)),
    Drawn(Mode.CUBIC_ANTIALIASED, 16, 3, (512, 512), (224, 224)),
)


@dataclass(frozen=True)
class Row:
    """Microseconds of one pass of one problem."""

    problem: str
    layout: str
    dtype: str
    gradient: bool
    floor_us: float
    ours_us: float
    eager_us: float

    @property
    def over_eager(self) -> float:
        return self.ours_us / self.eager_us

    @property
    def over_floor(self) -> float:
        return self.ours_us / self.floor_us


def contenders(
    calls: Calls, drawn: Drawn, dtype: torch.dtype, layout: str, *, gradient: bool
) -> Iterator[dict[str, Callable[[], object]]]:
    """For each set of inputs a call of ours and one of PyTorch's."""
    axes, device = drawn.axes(is_gpu=calls.device.type == "cuda"), calls.device
    while True:
        x = torch.randn(drawn.shape, device=device).to(dtype)
        dy = torch.randn(drawn.result_shape, device=device).to(dtype)
        given, made = (dy, x) if gradient else (x, dy)
        ours = calls.bind(shown(given, layout), torch.empty_like(shown(made, layout)), axes, gradient=gradient)
        leaf, theirs = memory_format(x, layout), memory_format(dy, layout)
        if not gradient:
            yield {"ours": ours, "eager": lambda leaf=leaf: drawn.interpolate(leaf)}
            continue
        leaf.requires_grad_()
        y = drawn.interpolate(leaf)
        yield {
            "ours": ours,
            "eager": lambda y=y, leaf=leaf, theirs=theirs: torch.autograd.grad(y, leaf, theirs, retain_graph=True),
        }


def measure(
    calls: Calls, drawn: Drawn, dtype: torch.dtype, layout: str, rate: float, runs: int, *, one_thread: bool = False
) -> Iterator[Row]:
    """Both passes. Of one thread the CPU time, of operands that the caches hold as far as they are large enough."""
    moved = (math.prod(drawn.shape) + math.prod(drawn.result_shape)) * dtype.itemsize
    count = (
        1
        if one_thread
        else set_count(2 * moved, memory.cache_bytes(calls.device), memory.available_bytes(calls.device) // 4)
    )
    queued = QUEUED if calls.device.type == "cuda" else 1
    for gradient in (False, True):
        sets = [
            each
            for each, _ in zip(contenders(calls, drawn, dtype, layout, gradient=gradient), range(count), strict=False)
        ]
        if one_thread:
            best = cpu_times(sets[0], runs)
        else:
            named = {
                name: [_repeated([each[name] for each in _from(sets, start)], queued) for start in range(len(sets))]
                for name in ("ours", "eager")
            }
            times = interleaved(named, runs, calls.device, queued)
            best = {name: each.best * 1e6 / queued for name, each in times.items()}
        yield Row(
            str(drawn),
            layout,
            str(dtype).removeprefix("torch."),
            gradient,
            moved / rate * 1e6,
            best["ours"],
            best["eager"],
        )


def _from(sets: Sequence[Any], start: int) -> list[Any]:
    return [*sets[start:], *sets[:start]]


def _repeated(each: Sequence[Callable[[], object]], times: int) -> Callable[[], object]:
    """Several calls one behind the other, each on other inputs."""
    chosen = [each[number % len(each)] for number in range(times)]

    def run() -> None:
        for call in chosen:
            call()

    return run if times > 1 else chosen[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtypes", default="", help="on a GPU bfloat16,float32, on a CPU float32")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--count", type=int, default=50, help="drawn problems")
    parser.add_argument("--one-thread", action="store_true", help="on a CPU: CPU time of one thread, for busy machines")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.one_thread:
        torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    dtypes = [
        getattr(torch, name) for name in (args.dtypes or ("bfloat16,float32" if on_gpu else "float32")).split(",")
    ]
    least, most = (1 << 20, 1 << 26) if on_gpu else (1 << 16, 1 << 21)
    drawn = [
        each for each, _ in zip(draw(random.Random(args.seed), least=least, most=most), range(args.count), strict=False)
    ]
    calls, rows = Calls(device, dtypes), []
    rate = copy_rate(device)
    # PyTorch's work and ours then follow one another.
    queue: AbstractContextManager[Any] = contextlib.nullcontext()
    if on_gpu:
        queue = torch.cuda.stream(stream_sync(device).queue)
    with queue:
        for number, problem in enumerate([*(CHOSEN if on_gpu else ()), *drawn]):
            # Dtypes and layouts take turns over the drawn problems.
            pairs = [(dtype, layout) for layout in args.layouts.split(",") for dtype in dtypes]
            for dtype, layout in pairs if problem in CHOSEN else [pairs[number % len(pairs)]]:
                for row in measure(calls, problem, dtype, layout, rate, args.runs, one_thread=args.one_thread):
                    rows.append(row)
                    print(
                        f"{row.problem:58} {row.layout:13} {row.dtype:8} {'bwd' if row.gradient else 'fwd'} "
                        f"{row.floor_us:9.1f} {row.ours_us:9.1f} {row.over_floor:6.2f} {row.over_eager:6.2f}",
                        flush=True,
                    )
    summary = {}
    for name, gradient in (("forward", False), ("backward", True)):
        chosen = [row for row in rows if row.gradient == gradient]
        summary[name] = {
            "over_eager": round(mean([row.over_eager for row in chosen]), 3),
            "worst_over_eager": round(max(row.over_eager for row in chosen), 3),
            "over_floor": round(mean([row.over_floor for row in chosen]), 3),
        }
        print(name, summary[name])
    if args.output:
        measured = {"one_thread": args.one_thread, "copy_gb_per_s": round(rate / 1e9, 1), "summary": summary}
        document = {**records.provenance(device), **measured}
        records.write(args.output, {**document, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
