"""Checks the Hopper convolution kernels by calls of library functions and times them beside cuDNN, in one process.

    python -m benchmarks convolution.sm90_check                         # checks, then times the suite sm90
    python -m benchmarks convolution.sm90_check --sweep --output sweep.json   # every tile shape, for sm90_fit
    python -m benchmarks convolution.sm90_check --compile-only          # fills the cache where there is no GPU

Integer problems must be exact, random ones as close to float64 as bfloat16 allows, and the same
input must give the same bits twice. Times are the device's own; calls rotate over inputs that together exceed the
cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from max import driver
from max.dtype import DType

from benchmarks import records
from benchmarks.kernels import problems
from benchmarks.kernels.launcher import Callee, Launcher, Word
from benchmarks.kernels.written import WrittenFunction
from torch_max_backend.bench import memory
from torch_max_backend.bench.ceilings import ceilings
from torch_max_backend.bench.timing import interleaved, set_count
from torch_max_backend.mojo_ops.convolution import FAMILY, Geometry, Grouping, convolution_function
from torch_max_backend.problems.convolution import Pass
from torch_max_backend.runtime.building import libraries

BIAS = "wgrad_bias"
"""The weight gradient, and behind it in one tensor the bias gradient."""
PASSES = ("fprop", "dgrad", "wgrad", BIAS)
DTYPES = {"bfloat16": DType.bfloat16, "float16": DType.float16, "float32": DType.float32}
"""float32 is TF32, and has no wgrad here."""
ERRORS = {"bfloat16": 4e-3, "float16": 4e-3, "float32": 4.5e-4}
"""Largest ||result - float64's|| / ||float64's||; factors cut to TF32 and not rounded would make 7e-4."""
TILE_SHAPES = {"bfloat16": range(7), "float16": range(7), "float32": (0, 2, 3, 6)}
"""The tile shapes of fprop and dgrad; kernels/convolution/sm90/choice.mojo lists them."""
WGRAD_TILES = ((128, 256), (64, 192), (128, 192), (128, 128), (128, 64))
SPLIT_STEPS = {1}
"""Wgrad shapes whose consumers sum the same tile."""
Tuning = tuple[int, int, int, int, int, int, int, int]
"""Tile shape, splits, blocks that join, rows and columns of tiles whose blocks share copies: `WgradChoice`'s fields.
Then those of `Recast` (kernels/convolution/sm90/aligned.mojo)."""
AUTOMATIC: Tuning = (-1, -1, 0, 1, 1, 0, 0, 0)
BLOCKS = range(1, 9)
"""Result pixels that are taken as one."""
ROW_BYTES = 128
"""Of a pipeline stage, and so of a folded row of taps."""
SHARES = ((1, 2), (2, 1), (2, 2))
WORKSPACE_LIMIT = 2**30


@dataclass(frozen=True)
class Problem:
    name: str
    n: int
    c: int
    k: int
    h: int
    w: int
    r: int
    s: int
    stride: int
    padding: int
    dilation: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Problem:
        """A line of problems.json."""
        (h, w), (r, s) = line["size"], line["filter"]
        sizes = line["n"], line["c"], line["k"], h, w, r, s
        return cls(line["name"], *sizes, line["stride"], line["padding"], line["dilation"])

    @property
    def p(self) -> int:
        return (self.h + 2 * self.padding - self.dilation * (self.r - 1) - 1) // self.stride + 1

    @property
    def q(self) -> int:
        return (self.w + 2 * self.padding - self.dilation * (self.s - 1) - 1) // self.stride + 1

    @property
    def flops(self) -> int:
        return 2 * self.n * self.p * self.q * self.k * self.r * self.s * self.c

    def geometry(self) -> Geometry:
        """As the kernels take it; float32 may be rounded."""
        stride, padding, dilation = ((depth, each, each) for depth, each in (
            (1, self.stride), (0, self.padding), (1, self.dilation)
        ))  # fmt: skip
        return Geometry(stride, padding, dilation, 1, WORKSPACE_LIMIT, allow_tf32=True)

    def is_taken(self, passing: str, dtype: str) -> bool:
        """Whether the kernels take the pass."""
        return dtype != "float32" or passing in ("fprop", "dgrad")

    def tensors(self, dtype: torch.dtype, integers: bool) -> dict[str, torch.Tensor]:
        """x, w and y in the kernels' layouts, the middle extents of depth 1 included."""
        shapes = {
            "x": (self.n, 1, self.h, self.w, self.c),
            "w": (self.k, 1, self.r, self.s, self.c),
            "y": (self.n, 1, self.p, self.q, self.k),
        }
        if integers:
            return {name: torch.randint(-2, 3, shape, device="cuda").to(dtype) for name, shape in shapes.items()}
        return {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}


def logical(t: torch.Tensor) -> torch.Tensor:
    """[N, 1, H, W, C] as a channels_last N, C, H, W tensor."""
    return t[:, 0].permute(0, 3, 1, 2)


def reference(passing: str, problem: Problem, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The pass through PyTorch in the dtype of the tensors, in the kernels' layout."""
    x, w, y = (logical(t[name]) for name in "xwy")
    s, p, d = [problem.stride] * 2, [problem.padding] * 2, [problem.dilation] * 2
    if passing == "fprop":
        result = torch.nn.functional.conv2d(x, w, None, s, p, d)
    else:
        mask = [passing == "dgrad", passing != "dgrad", False]
        backward = torch.ops.aten.convolution_backward(y, x, w, None, s, p, d, False, [0, 0], 1, mask)
        result = backward[0] if passing == "dgrad" else backward[1]
        if passing == BIAS:
            return torch.cat([result.permute(0, 2, 3, 1).flatten(), y.sum((0, 2, 3))])
    return result.permute(0, 2, 3, 1)[:, None]


OPERANDS = {"fprop": "xw", "dgrad": "yw", "wgrad": "xy", BIAS: "xy"}
RESULT = {"fprop": "y", "dgrad": "x", "wgrad": "w", BIAS: "w"}


def use_virtual_hopper() -> None:
    """Lets graphs for an sm_90a device compile where there is none; must come before any device is touched."""
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch("sm_90a")
    driver.set_virtual_device_count(1)


def functions_of(
    dtypes: Sequence[str], passes: Sequence[str], dispatched: bool = False
) -> dict[tuple[str, str], Callee]:
    """The library function of each pass and dtype; `dispatched` ones leave the choice of the kernel to the tables, and
    there is none for a bias."""
    source = "benchmarks/kernels/convolution/sm90_tuned.mojo"
    found: dict[tuple[str, str], Callee] = {}
    for dtype, passing in itertools.product(dtypes, passes):
        kind = DTYPES[dtype]
        if dispatched and passing != BIAS:
            found[passing, dtype] = convolution_function(Pass[passing.upper()].value, "gpu", kind, Grouping.ONE)
        elif passing == BIAS and dtype != "float32" and not dispatched:
            found[passing, dtype] = WrittenFunction(source, "conv_tuned_bias", "gpu", (kind,))
        elif passing != BIAS and (passing, dtype) != ("wgrad", "float32"):
            found[passing, dtype] = WrittenFunction(source, "conv_tuned", "gpu", (kind, passing.upper()))
    return found


class Calls:
    """Library functions that are built and loaded."""

    def __init__(self, dtypes: Sequence[str], passes: Sequence[str], dispatched: bool = False) -> None:
        self._functions, self._dispatched = functions_of(dtypes, passes, dispatched), dispatched
        self._launcher = Launcher(self._functions.values(), torch.device("cuda", 0))

    def bind(
        self, passing: str, problem: Problem, tensors: dict[str, torch.Tensor], tuning: Tuning = AUTOMATIC
    ) -> Callable[[], torch.Tensor]:
        """A call that gives the pass's result."""
        like = tensors[RESULT[passing]]
        signature = FAMILY["conv_wgrad" if passing == BIAS else f"conv_{passing}"]
        read = [(tensors[name], tensors[name].shape) for name in OPERANDS[passing]]
        given: list[tuple[Word, Sequence[int]]] = [(0, like.shape), *read]
        words = [*signature.words(problem.geometry().numbers(), given), *([] if self._dispatched else tuning)]
        function = self._functions[passing, str(like.dtype).removeprefix("torch.")]
        shape = (like.numel() + problem.k,) if passing == BIAS else like.shape
        return self._launcher.bind_result(function, len(signature.numbers), shape, like.dtype, words)


def poison() -> None:
    """Leaves NaN in the memory that the next result is likely to get."""
    for size in (2**12, 2**16, 2**20, 2**24):
        buffer = torch.full((size,), float("nan"), device="cuda")
        del buffer


def capacity(cluster: int, processors: int) -> int:
    """Blocks of such clusters that run at a time; choice.mojo has the same rule."""
    usable = processors if cluster <= 2 else processors * 10 // 11
    return max(usable // max(cluster, 1), 1) * max(cluster, 1)


def tunings(passing: str, problem: Problem, processors: int, dtype: str = "bfloat16") -> list[Tuning]:
    """Every tile shape; for wgrad with the even spread, whole rounds of splits, clusters that join and that share. Then
    each of `recasts`."""
    ways = recasts(passing, problem, dtype)
    if not passing.startswith("wgrad"):
        return [*((shape, 0, 0, 1, 1, 0, 0, 0) for shape in TILE_SHAPES[dtype]), *ways]
    return [*((*each, 0, 0, 0) for each in _wgrad_tunings(passing, problem, processors)), *ways]


def recasts(passing: str, problem: Problem, dtype: str) -> list[Tuning]:
    """Every way in which few channels are taken as more, in the tile shape that is chosen."""
    found: list[Tuning] = []
    exchanges = passing in ("dgrad", "wgrad") and problem.stride == 1
    exchanges &= problem.padding <= problem.dilation * (min(problem.r, problem.s) - 1)
    vector = ROW_BYTES // 8 // (4 if dtype == "float32" else 2)
    for exchanged in (0, 1) if exchanges else (0,):
        c, q = (problem.k, problem.w) if exchanged else (problem.c, problem.q)
        if problem.dilation > 1 or (passing == "dgrad" and not exchanged):
            continue
        for block, folds in itertools.product(BLOCKS, (0, 1)):
            row = (block - 1) * problem.stride + problem.s
            folded = 4 if c <= 4 and 4 * block * problem.stride % vector == 0 else vector * math.ceil(c / vector)
            fits = row * folded <= 16 * vector if folds else block * problem.stride <= 8
            if (q % block == 0 and fits) or (folds and _lies(problem, c, block, vector)):
                found.append((-2, 0, 0, 1, 1, block, folds, exchanged))
    return found


def _lies(problem: Problem, channels: int, block: int, vector: int) -> bool:
    """Whether a block of pixels is read where it lies; aligned.mojo has the same rule."""
    row = block * channels
    is_product = problem.r == problem.s == problem.stride == 1 and problem.padding == 0
    whole = row % vector == 0 and problem.p * problem.q % block == 0
    return is_product and whole and 4 * vector <= row <= 1024


def _wgrad_tunings(passing: str, problem: Problem, processors: int) -> list[tuple[int, int, int, int, int]]:
    result: set[tuple[int, int, int, int, int]] = set()
    for shape, (rows, columns) in enumerate(WGRAD_TILES):
        panels = problem.r * problem.s * math.ceil(problem.c / 64)
        across, along = math.ceil(problem.k / rows), math.ceil(panels / (columns // 64))
        tiles = across * along
        if shape not in SPLIT_STEPS:
            result.add((shape, 0, 0, 1, 1))
            result |= {(shape, max(rounds * processors // tiles, 1), 0, 1, 1) for rounds in (1, 2, 3)}
            for share in SHARES:
                if share[0] > across or share[1] > along:
                    continue
                shared = math.ceil(across / share[0]) * math.ceil(along / share[1]) * math.prod(share)
                width = capacity(math.prod(share), processors)
                result.add((shape, 0, 0, *share))
                result |= {(shape, max(rounds * width // shared, 1), 0, *share) for rounds in (1, 2)}
        for cluster in (1, 2, 4, 8):
            if cluster > 1 or shape in SPLIT_STEPS:
                width = capacity(cluster, processors)
                many = (1, 2) if cluster <= 2 else (1,)
                parts = {max(rounds * width // tiles // cluster, 1) * cluster for rounds in many}
                result |= {(shape, part, cluster, 1, 1) for part in parts}
    return sorted(result)


def check(calls: Calls, passing: str, dtype: str, problem: Problem, chosen: list[Tuning]) -> list[str]:
    """What is wrong, in words."""
    wrong = []
    for integers in (True, False):
        tensors = problem.tensors(getattr(torch, dtype), integers)
        expected = reference(passing, problem, {name: t.double() for name, t in tensors.items()})
        rounded = expected.to(getattr(torch, dtype))
        for tuning in chosen:
            run = calls.bind(passing, problem, tensors, tuning)
            poison()
            got, again = run(), run()
            found = []
            if not torch.equal(got.view(torch.int16), again.view(torch.int16)):
                found.append("two runs differ")
            if integers and not torch.equal(got, rounded):
                found.append(f"integers: {int((got != rounded).sum())} of {got.numel()} differ")
            error = ((got.double() - expected).norm() / expected.norm()).item()
            if not error <= ERRORS[dtype]:  # NaN must not pass
                found.append(f"relative error {error:.3g}")
            wrong += [f"{passing} {dtype} {problem.name} tuning {tuning}: {text}" for text in found]
    return wrong


def measure(ours: Calls, passing: str, dtype: str, problem: Problem, swept: list[Tuning]) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    first = problem.tensors(getattr(torch, dtype), integers=False)
    size = sum(first[name].nbytes for name in OPERANDS[passing])
    count = set_count(size, memory.cache_bytes(device), memory.available_bytes(device))
    sets = [first, *(problem.tensors(getattr(torch, dtype), integers=False) for _ in range(count - 1))]
    calls: dict[str, list[Callable[[], Any]]] = {
        "cudnn": [partial(reference, passing, problem, tensors) for tensors in sets]
    }
    for tuning in (AUTOMATIC, *swept):
        name = ",".join(map(str, tuning))
        calls[name] = [ours.bind(passing, problem, tensors, tuning) for tensors in sets]
    times = {name: each.median * 1e3 for name, each in interleaved(calls, 12 if swept else 20, device).items()}
    cudnn, own = times.pop("cudnn"), times.pop(",".join(map(str, AUTOMATIC)))
    row = {"pass": passing, "dtype": dtype, "problem": problem.name, "cudnn_ms": cudnn, "ours_ms": own}
    if swept:
        row["tunings_ms"] = times
    rate = problem.flops / 1e9
    print(
        f"{passing} {dtype} {problem.name:24} cudnn {cudnn:.4f} ms {rate / cudnn:4.0f} TFLOP/s  "
        f"ours {own:.4f} ms {rate / own:4.0f} TFLOP/s  ratio {own / cudnn:.3f}"
        + (f"  best {min(times, key=times.__getitem__)} {min(times.values()):.4f}" if swept else ""),
        flush=True,
    )
    return row


def read(suite: str, pattern: str) -> list[Problem]:
    return [Problem.of(line) for line in problems.convolutions(suite, pattern)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtypes", default="bfloat16", help="of " + ", ".join(DTYPES))
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--checks", default="", help="regular expression that a checked problem's name must match")
    parser.add_argument("--problems", default="", help="regular expression that a timed problem's name must match")
    parser.add_argument("--compile-only", action="store_true", help="for a Hopper GPU that need not be there")
    parser.add_argument("--sweep", action="store_true", help="time every tile shape and split count")
    parser.add_argument("--recasts", action="store_true", help="time every way to take few channels as more")
    parser.add_argument("--suite", default="sm90", help="of problems.json, what is timed")
    parser.add_argument("--dispatched", action="store_true", help="the product's ops, not the forced Hopper ones")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    dtypes = args.dtypes.split(",")
    passes = [each for each in args.passes.split(",") if not (args.dispatched and each == BIAS)]
    if args.compile_only:
        use_virtual_hopper()
        libraries.build(functions_of(dtypes, passes, args.dispatched).values(), torch.device("cuda"))
        return 0
    calls = Calls(dtypes, passes, args.dispatched)
    print(f"libraries ready after {time.perf_counter() - began:.1f} s", flush=True)

    wrong: list[str] = []
    checked = 0
    if not args.no_check:
        for dtype in dtypes:
            for passing in passes:
                for problem in read("sm90_check", args.checks):
                    if not problem.is_taken(passing, dtype) and not args.dispatched:
                        continue
                    chosen = [AUTOMATIC] if args.dispatched else [AUTOMATIC, *tunings(passing, problem, 12, dtype)]
                    found = check(calls, passing, dtype, problem, chosen)
                    wrong += found
                    checked += len(chosen)
                    for line in found:
                        print("WRONG", line, flush=True)
        print(f"{checked} checks, {len(wrong)} wrong, {time.perf_counter() - began:.1f} s", flush=True)

    rows = []
    if not args.no_time:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for dtype in dtypes:
            for passing in passes:
                for problem in read(args.suite, args.problems):
                    if not problem.is_taken(passing, dtype) and not args.dispatched:
                        continue
                    swept = []
                    if args.recasts:
                        swept = recasts(passing, problem, dtype)
                    elif args.sweep:
                        swept = tunings(passing, problem, processors, dtype)
                    rows.append(measure(calls, passing, dtype, problem, swept))
                mine = [
                    row["ours_ms"] / row["cudnn_ms"] for row in rows if (row["pass"], row["dtype"]) == (passing, dtype)
                ]
                if mine:
                    mean = statistics.geometric_mean(mine)
                    print(
                        f"{passing} {dtype}: {mean:.3f} of cuDNN's time in the mean, {max(mine):.3f} at most",
                        flush=True,
                    )
    if args.output:
        device = torch.device("cuda", 0)
        rates = ceilings(device, getattr(torch, dtypes[0]))
        document = {
            **records.provenance(device),
            "ceilings": {
                "gb_per_s": rates.bytes_per_second / 1e9,
                "tflops": rates.flops_per_second / 1e12,
            },
            "checks": checked,
            "wrong": wrong,
            "rows": rows,
        }
        records.write(args.output, document)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
