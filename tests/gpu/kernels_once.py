"""Calls the kernels of every family once, on small tensors; compares nothing. Made for compute-sanitizer:

    python -m tests.gpu.kernels_once                                                      # builds the libraries
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.kernels_once
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.gpu.kernels_once test_pooling

A family is a file of tests of lowerings; all its cases are one graph, which runs once. The last lines name the entries
of kernel libraries that no case called. Detection, sampling, windows and padding have tests instead of cases:

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -n 0 -m gpu \\
        tests/lowering/test_detection.py tests/lowering/test_sampling.py tests/lowering/test_windows.py \\
        tests/lowering/test_padding.py

Hopper's convolutions have a program of their own, which tries every tile
(benchmarks/kernels/convolution/sm90_sanitize.py), and so has pooling (tests/gpu/check_pooling.py).
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from max.dtype import DType

from tests.gpu.families import FAMILIES, cases_of
from tests.harness import Batch
from torch_max_backend.mojo_ops import functions


def _entries(found: functions.Function) -> set[tuple[str, str]]:
    """Family and entry of a function that is no generated program."""
    return {(found.family, found.entry)} if isinstance(found, functions.LibraryFunction) else set()


def main() -> int:
    """Runs the families; 1 if one raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[], metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(FAMILIES)}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    failed = 0
    for family in args.families or FAMILIES:
        begun = time.perf_counter()
        try:
            batch = Batch(cases_of(family), args.device, family)
            if args.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failed = 1
            print(f"{family}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            continue
        ran = sum(outcome.results is not None for outcome in batch.outcomes.values())
        print(f"{family}: {ran} of {len(batch.outcomes)} cases, {time.perf_counter() - begun:.0f} s", flush=True)
    called = functions.with_rest(functions.required())
    target = "gpu" if args.device == "cuda" else "cpu"
    known = functions.all_functions(target, (DType.float32, DType.bfloat16, DType.float16))
    met = {entry for each in called for entry in _entries(each)}
    others = {entry for each in known for entry in _entries(each)} - met
    print(f"{len(met)} entries and {sum(not _entries(each) for each in called)} programs were called")
    print("not called:", ", ".join(f"{family}.{entry}" for family, entry in sorted(others)) or "none")
    return failed


if __name__ == "__main__":
    sys.exit(main())
