"""Every window of the kernel tests through the pooling kernels on a GPU, small enough for compute-sanitizer.

    python -m benchmarks pooling.run --export pooling.mef --target sm_90a      # where there is no GPU, or on it
    compute-sanitizer --tool memcheck python -m tests.gpu.check_pooling --compiled pooling.mef
    compute-sanitizer --tool racecheck python -m tests.gpu.check_pooling --compiled pooling.mef --cases '3_2|3_1'

and, for the kernels that only planes beyond 32-bit numbers choose (tests/gpu/direct_pooling), with a graph of them:

    mojo precompile tests/gpu/direct_pooling -I . -o direct_pooling.mojoc
    python -m benchmarks pooling.run --kernels direct_pooling.mojoc --export direct.mef --target sm_90a

A third of the indices is replaced by ones far outside the plane, which must change nothing but their own gradients.
Results of whole numbers must equal PyTorch's float64 on the CPU, and two runs must agree to the bit.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks import ROOT
from benchmarks.kernels.pooling.run import PASSES, bound, load_models, to_logical, to_physical
from tests.kernels import test_pooling as kernel_tests


def compare(name: str, got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> bool:
    """Prints and counts a difference."""
    # Averages round each addend, and the narrow types the result: 2^-8 of it in bfloat16.
    rtol, atol = (1e-5, 1e-4) if got.dtype == torch.float32 else (1e-2, 1e-2)
    got = got.cpu().double()
    close = torch.equal(got, wanted.double()) if exact else torch.allclose(got, wanted.double(), rtol, atol)
    if not close:
        print(f"WRONG {name}: {int((got != wanted.double()).sum())} of {got.numel()} elements differ")
    return close


def check(case: kernel_tests.Window, layout: str, dtype: str, models: dict, device: str) -> int:
    """The number of wrong results of one window; forward passes that were not exported are left out."""
    generator = kernel_tests.seeded(case.id)
    torch_dtype = getattr(torch, dtype)
    x = kernel_tests.whole_numbers((case.n, case.c, *case.size), torch_dtype, generator)
    y, indices = kernel_tests.max_reference(x, case)
    dy = kernel_tests.whole_numbers(tuple(y.shape), torch_dtype, generator)
    foreign = kernel_tests.spoil(indices, math.prod(case.size))
    label = f"{case.id} {layout} {dtype}"
    right = []

    def run(kind: str, tensors: list[torch.Tensor], problem: object, made: str) -> list[torch.Tensor]:
        call = bound(models[f"{kind}_{dtype}"], [to_physical(t, layout).to(device) for t in tensors], problem, made)
        first, second = ([t.clone() for t in call()] for _ in range(2))
        right.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
        return first

    problem = case.problem("max")
    if f"max_fprop_{dtype}" in models:
        made = run("max_fprop", [x], problem, "output")
        for name, got, wanted in zip(("y", "indices"), made, (y, indices), strict=True):
            right.append(compare(f"{label} {name}", to_logical(got, wanted, layout), wanted, True))
    for name, given in (("dx", indices), ("dx of foreign indices", foreign)):
        got = to_logical(run("max_dgrad", [dy, given], problem, "input")[0], x, layout)
        right.append(compare(f"{label} {name}", got, kernel_tests.scatter_reference(dy, given, x.shape), True))
    if problem.has_byte_offsets:
        offsets = to_logical(run("max_fprop_offsets", [x], problem, "output")[1], y, layout)
        got = to_logical(run("max_dgrad_offsets", [dy, offsets], problem, "input")[0], x, layout)
        right.append(compare(f"{label} dx by offset", got, kernel_tests.scatter_reference(dy, indices, x.shape), True))
        # 255 names no tap of any window that is stored in bytes.
        none = to_logical(run("max_dgrad_offsets", [dy, torch.full_like(offsets, 255)], problem, "input")[0], x, layout)
        right.append(compare(f"{label} dx of no offset", none, torch.zeros(x.shape), True))
    averages = case.problem("avg")
    if averages.output != problem.output:
        # Dilated windows are maxima's alone.
        return right.count(False)
    rank = len(case.size)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    override = (case.divisor_override,) if rank > 1 else ()
    leaf = x.double().requires_grad_()
    mean = pool(leaf, case.kernel, case.stride, case.padding, case.ceil_mode, case.count_include_pad, *override)
    (mean_dx,) = torch.autograd.grad(mean, leaf, dy.double())
    if f"avg_fprop_{dtype}" in models:
        got = to_logical(run("avg_fprop", [x], averages, "output")[0], y, layout)
        right.append(compare(f"{label} mean", got, mean.detach(), False))
    got = to_logical(run("avg_dgrad", [dy], averages, "input")[0], x, layout)
    right.append(compare(f"{label} dx of mean", got, mean_dx, False))
    return right.count(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compiled", type=Path, required=True, help="graphs that pooling.run exported")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--cases", default="", help="regular expression that a window's name must match")
    args = parser.parse_args()
    kinds = {f"{op}_{passing}" for op, passes in PASSES.items() for passing in passes}
    chosen = argparse.Namespace(**vars(args), export=None, target=None, kernels=ROOT / "kernels")
    models = load_models(chosen, kinds, args.dtypes.split(","))
    cases = [case for case in kernel_tests.WINDOWS if case.n and re.search(args.cases, case.id)]
    wrong = 0
    for case in cases:
        for dtype in args.dtypes.split(","):
            for layout in kernel_tests.LAYOUTS:
                wrong += check(case, layout, dtype, models, args.device)
    print(f"{len(cases)} windows, {wrong} wrong results", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
