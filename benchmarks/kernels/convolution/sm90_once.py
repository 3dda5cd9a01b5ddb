"""Runs passes of problems once, each by the kernel that the table chooses: something for a profiler to look at.

    ncu --clock-control none --kernel-name regex:conv_ --csv --metrics METRIC,... \\
        python -m benchmarks convolution.sm90_once --problems 'ck_default|vgg16.4.2.n64'
    compute-sanitizer --tool racecheck --kernel-regex kns=conv_ \\
        python -m benchmarks convolution.sm90_once --suite sm90_check --every
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.kernels.convolution.sm90_check import AUTOMATIC, PASSES, Calls, Problem, read, tunings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--suite", default="sm90", help="of problems.json")
    parser.add_argument("--problems", default="", help="regular expression that a problem's name must match")
    parser.add_argument(
        "--every", action="store_true", help="every tile shape, split and cluster, not the table's choice"
    )
    args = parser.parse_args()
    passes = args.passes.split(",")
    calls = Calls([args.dtype], passes)
    for problem in read(args.suite, args.problems):
        for passing in passes:
            if problem.is_taken(passing, args.dtype):
                run(calls, passing, problem, args.dtype, args.every)
    return 0


def run(calls: Calls, passing: str, problem: Problem, dtype: str, every: bool) -> None:
    tensors = problem.tensors(getattr(torch, dtype), integers=False)
    chosen = tunings(passing, problem, 12) if every else [AUTOMATIC]
    for tuning in chosen:
        calls.bind(passing, problem, tensors, tuning)()
    torch.cuda.synchronize()
    print(f"{passing} {problem.name}: {len(chosen)} launches", flush=True)


if __name__ == "__main__":
    sys.exit(main())
