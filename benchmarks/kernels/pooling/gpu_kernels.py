"""Builds the program of gpu_kernels.mojo, runs it on the cases and keeps what it prints.

    python -m benchmarks pooling.gpu_kernels --build gpu_kernels --target sm_90a       # where there is no GPU, or on it
    python -m benchmarks pooling.gpu_kernels --run gpu_kernels --cases 'inception' --output FILE
    python -m benchmarks pooling.gpu_kernels --run old --beside gpu_kernels --output FILE

`--beside` runs a second build, of other kernels say, and alternates the two, case by case, in one process each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ROOT, records
from benchmarks.kernels import problems
from benchmarks.kernels.pooling.run import Case
from torch_max_backend.problems.pooling import PoolingProblem

SOURCE = Path(__file__).with_suffix(".mojo")
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Launch:
    """One line of the program: a launch's time beside that of a copy of as many bytes, in microseconds."""

    case: str
    layout: str
    dtype: str
    argmaxes: str
    direction: str
    floor_us: float
    ours_us: float
    right: bool

    @property
    def over_floor(self) -> float:
        return self.ours_us / self.floor_us


def numbers(case: Case, problem: PoolingProblem, layout: str) -> list[int]:
    """What gpu_kernels.mojo reads of a problem; NCHW tensors are planes of one channel."""
    n, c = (case.n, case.c) if layout == "channels_last" else (case.n * case.c, 1)
    axes = (problem.input, problem.output, problem.window, problem.stride, problem.padding, problem.dilation)
    return [n, c, *(int(v) for axis in axes for v in axis), int(case.count_include_pad), 0]


def arguments(case: Case) -> list[str]:
    problem = case.problem()
    return [
        f"{case.op}:{case.name}/{layout}:{','.join(map(str, numbers(case, problem, layout)))}" for layout in LAYOUTS
    ]


def run(binary: Path, case: Case) -> tuple[float, list[Launch]]:
    """The copy rate in GB/s and the launches of one case."""
    command = [str(binary.resolve()), *arguments(case)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rate, launches = 0.0, []
    for line in lines:
        words = line.split()
        if words[0] == "copy":
            rate = float(words[1])
            continue
        label, dtype, argmaxes, direction, floor, ours, verdict = words
        name, layout = label.split("/")
        launches.append(Launch(name, layout, dtype, argmaxes, direction, float(floor), float(ours), verdict == "right"))
    return rate, launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", type=Path, help="compile the program to this file and end")
    parser.add_argument("--target", help="with --build: for this GPU architecture, though there is none here")
    parser.add_argument("--kernels", type=Path, default=ROOT, help="with --build: the folder that holds kernels/")
    parser.add_argument("--run", type=Path, help="the compiled program")
    parser.add_argument("--beside", type=Path, help="another one, run in turns with the first")
    parser.add_argument("--cases", default="", help="regular expression that a case's name must match")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()
    if args.build:
        target = [f"--target-accelerator={args.target}"] if args.target else []
        command = ["mojo", "build", "-I", str(args.kernels), *target, str(SOURCE), "-o", str(args.build)]
        return subprocess.run(command).returncode
    if not args.run:
        parser.error("--run: expected the program that --build makes")

    cases = [Case(**line) for line in problems.poolings(args.cases)]
    binaries = [args.run, *([args.beside] if args.beside else [])]
    rates: list[float] = []
    launched: list[list[Launch]] = [[] for _ in binaries]
    for case in cases:
        for binary, launches in zip(binaries, launched, strict=True):
            rate, found = run(binary, case)
            rates.append(rate)
            launches.extend(found)
        for together in zip(*(launches[-len(found) :] for launches in launched), strict=True):
            first = together[0]
            ratios = "  ".join(f"{x.over_floor:6.2f}{'' if x.right else ' WRONG'}" for x in together)
            row = f"{first.case:20} {first.layout:13} {first.dtype:8} {first.argmaxes:7} {first.direction}"
            print(f"{row} {first.floor_us:8.1f}  {ratios}", flush=True)
    wrong = sum(not launch.right for launches in launched for launch in launches)
    print(f"{sum(map(len, launched))} launches, {wrong} wrong")
    if args.output:
        import torch

        document = {
            **records.provenance(torch.device("cuda")),
            "copy_gb_per_s": round(max(rates), 1),
            "programs": [binary.name for binary in binaries],
            "launches": [[asdict(launch) for launch in launches] for launches in launched],
        }
        records.write(args.output, document)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
