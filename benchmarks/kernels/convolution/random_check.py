"""Random convolutions against float64: every pass, any rank, groups, strides, dilations, paddings, addresses.

    python -m benchmarks convolution.random_check --count 10000 --processes 8 --output FILE
    python -m benchmarks convolution.random_check --device cpu --count 500

Operands are whole numbers from -2 to 2: sums are exact, and a result must be the float64 result's own rounding (in TF32
too). A quarter of the tensors begins one element behind an aligned address.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.convolution.calls import Convolutions, logical
from benchmarks.kernels.launcher import on_stream
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 96, 128, 136, 160, 192, 232, 256)
MAX_ELEMENTS = 1 << 20
MAX_FLOPS = 1 << 28


def random_problem(chance: random.Random) -> ConvolutionProblem:
    """A problem of any rank, small enough to be checked at once."""
    while True:
        rank = chance.choice((1, 2, 2, 2, 2, 3))
        groups = chance.choice((1, 1, 1, 2, 3, 4, 8, 16, 32))
        c, k = chance.choice(CHANNELS), chance.choice(CHANNELS)
        kind = chance.random()
        if kind < 0.25:
            # Depthwise.
            groups = k = c
        elif groups > 1:
            c, k = groups * chance.choice((1, 2, 4, 8, 12, 16, 32)), groups * chance.choice((1, 2, 4, 8, 12, 16, 32))
        taps = [chance.choice((1, 2, 3, 3, 3, 4, 5, 7, 9)) for _ in range(rank)]
        stride = [chance.choice((1, 1, 2, 2, 3, 4)) for _ in range(rank)]
        dilation = [chance.choice((1, 1, 1, 2, 3)) for _ in range(rank)]
        padding = [
            chance.randrange(0, t * d + 1) if chance.random() < 0.7 else 0 for t, d in zip(taps, dilation, strict=True)
        ]
        size = [chance.randrange(1, 41 if rank < 3 else 15) for _ in range(rank)]
        if chance.random() < 0.1:
            # Windows that do not overlap.
            stride, dilation, padding = list(taps), [1] * rank, [0] * rank
            size = [t * chance.randrange(1, 9) + (chance.randrange(t) if chance.random() < 0.2 else 0) for t in taps]
        if chance.random() < 0.3:
            # Alike on all axes, as most are.
            stride, dilation = stride[:1] * rank, dilation[:1] * rank
        n = chance.choice((1, 1, 2, 3, 5, 8))
        try:
            if chance.random() < 0.15:
                extra = [chance.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
                shape = (k, c // groups, *taps)
                problem = ConvolutionProblem.from_aten(
                    (n, k, *size), shape, stride, padding, dilation, True, extra, groups
                )
            else:
                shape = (k, c // groups, *taps)
                problem = ConvolutionProblem.from_aten(
                    (n, c, *size), shape, stride, padding, dilation, False, [0] * rank, groups
                )
        except ValueError:
            continue
        sizes = problem.elements().values()
        # A transposed convolution's output may be empty: PyTorch refuses that.
        if min(sizes) > 0 and max(sizes) <= MAX_ELEMENTS and problem.flops <= MAX_FLOPS:
            return problem


def displaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, shape and strides, one element behind an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    copy = memory[1:].as_strided(tensor.shape, tensor.stride(), storage_offset=1)
    return copy.copy_(tensor)


def check(
    problem: ConvolutionProblem,
    role: Pass,
    dtype: torch.dtype,
    device: torch.device,
    convolutions: Convolutions,
    chance: random.Random,
) -> str:
    """What is wrong, "" where nothing is."""
    torch.backends.cudnn.allow_tf32 = chance.random() < 0.5
    case = ConvolutionCase("random", problem, role, dtype, device)
    generator = torch.Generator(device).manual_seed(chance.randrange(1 << 30))
    inputs = case.inputs(1, generator)
    expected = case.reference(inputs)
    original = inputs
    inputs = tuple(displaced(tensor) if chance.random() < 0.25 else tensor for tensor in inputs)
    try:
        call = convolutions.bind(case, inputs)
        first, second = logical(case, call()), logical(case, call())
    except Exception as error:
        return f"raised {error}"
    if not torch.equal(first, expected.to(dtype)):
        # The reference runs on the device as well: cuDNN's float64 kernels read beside their tensors for some paddings.
        expected = case.reference(tuple(tensor.cpu() for tensor in original)).to(device)
    if not torch.equal(first, expected.to(dtype)):
        return f"{int((first != expected.to(dtype)).sum())} of {first.numel()} differ"
    return "" if torch.equal(first, second) else "two runs differ"


def run(options: argparse.Namespace, seed: int, device: torch.device) -> dict[str, Any]:
    """Checks the problems of a seed: how many results of each dtype and pass, and which were wrong."""
    chance = random.Random(seed)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    began = time.perf_counter()
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    problems = 0
    with torch.no_grad(), on_stream(device):
        convolutions = Convolutions(dtypes, device)
        print(f"ready after {time.perf_counter() - began:.0f} s, seed {seed}", flush=True)
        began = time.perf_counter()
        while problems < options.count and time.perf_counter() - began < options.seconds:
            problem, dtype = random_problem(chance), chance.choice(dtypes)
            problems += 1
            for role in Pass:
                fault = check(problem, role, dtype, device, convolutions, chance)
                kinds[f"{str(dtype).removeprefix('torch.')} {role.value}"] += 1
                if fault:
                    wrong.append(f"{role.value} {dtype} tf32={torch.backends.cudnn.allow_tf32} {problem}: {fault}")
                    print("WRONG", wrong[-1], flush=True)
    print(f"{kinds.total()} results, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s", flush=True)
    return {"seeds": [seed], "problems": problems, "checked": dict(sorted(kinds.items())), "wrong": wrong}


def run_in_processes(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The same by several processes, each with a seed and a share of the problems."""
    count = options.processes
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(count)]
        command = [sys.executable, "-m", "benchmarks", "convolution.random_check", "--device", options.device]
        command += ["--dtypes", options.dtypes, "--seconds", str(options.seconds)]
        shares = [options.count * (i + 1) // count - options.count * i // count for i in range(count)]
        processes = [
            subprocess.Popen([*command, "--seed", str(seed + i), "--count", str(share), "--output", str(file)])
            for i, (share, file) in enumerate(zip(shares, files, strict=True))
        ]
        for process in processes:
            process.wait()
        parts = [json.loads(file.read_text()) for file in files]
    checked: Counter[str] = Counter()
    for part in parts:
        checked.update(part["checked"])
    return {
        "seeds": [seed for part in parts for seed in part["seeds"]],
        "problems": sum(part["problems"] for part in parts),
        "checked": dict(checked),
        "wrong": [fault for part in parts for fault in part["wrong"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10000, help="problems, each in one dtype and all three passes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="that share the problems, each with a seed of its own")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem after so long")
    parser.add_argument("--output", type=Path, help="the result file")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    seed = int(time.time()) if options.seed is None else options.seed
    found = run(options, seed, device) if options.processes == 1 else run_in_processes(options, seed)
    if options.output:
        records.write(options.output, {**records.provenance(device), **found, "wrong": found["wrong"][:100]})
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
