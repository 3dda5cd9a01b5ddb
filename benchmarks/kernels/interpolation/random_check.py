"""Checks interpolation's kernels against float64 on problems drawn at random, forward and backward, in both layouts.

    python -m benchmarks interpolation.random_check --device cuda --count 5000
    python -m benchmarks interpolation.random_check --device cpu --dtypes float32,float64 --seed 7

A result may be as far from float64 as rounding its products and sums in the accumulator and the result once in its own
dtype explains. Results lie between guards that nothing may overwrite.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.kernels.interpolation.calls import Calls
from benchmarks.kernels.interpolation.drawn import Drawn, draw
from benchmarks.kernels.library import LAYOUTS, Guarded, excess, shown
from torch_max_backend.problems.interpolation import Axes, AxisTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix_of(table: AxisTable) -> torch.Tensor:
    """[results, extent]: the table's weights."""
    matrix = np.zeros((table.results, table.extent))
    for tap in range(table.most):
        there = np.flatnonzero(tap < table.count)
        matrix[there, table.first[there] + tap] = table.weights[there, tap]
    return torch.from_numpy(matrix)


def reference(x: torch.Tensor, axes: Axes, *, gradient: bool, magnitude: bool = False) -> torch.Tensor:
    """What the kernels shall make of x [N, D, H, W, C], in float64; with ``magnitude`` of the absolute values."""
    y = x.double()
    if magnitude:
        y = y.abs()
    for axis, matrix in enumerate(matrix_of(each.table()).to(x.device) for each in axes):
        if matrix.shape != (1, 1) or matrix.item() != 1:
            along = matrix.t() if gradient else matrix
            y = torch.tensordot(y, along.abs() if magnitude else along, ([axis + 1], [1]))
            y = y.movedim(-1, axis + 1)
    return y.cpu()


def wrong(
    calls: Calls,
    drawn: Drawn,
    dtype: torch.dtype,
    layout: str,
    *,
    gradient: bool,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> str | None:
    """What is wrong with one result; None if nothing is. ``place`` may put what is read elsewhere."""
    axes = drawn.axes(is_gpu=calls.device.type == "cuda")
    given, made = (drawn.result_shape, drawn.shape) if gradient else (drawn.shape, drawn.result_shape)
    x = place(shown(torch.randn(given).to(dtype), layout).to(calls.device))
    shape = shown(torch.empty(made, device="meta"), layout).shape
    y = Guarded(shape, dtype, calls.device)
    calls.bind(x, y.tensor, axes, gradient=gradient)()
    if not y.is_intact():
        return "wrote outside its result"
    wanted = reference(x, axes, gradient=gradient)
    bound = reference(x, axes, gradient=gradient, magnitude=True)
    eps = 2.0**-50 if dtype == torch.float64 else 2.0**-20
    allowed = eps * bound + torch.finfo(dtype).eps * wanted.abs() + torch.finfo(dtype).tiny
    return excess(y.tensor, wanted, allowed)


def check(
    calls: Calls,
    problems: Sequence[Drawn],
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[str] = LAYOUTS,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> list[str]:
    """A line for each wrong result; dtypes and layouts take turns."""
    found = []
    for number, drawn in enumerate(problems):
        torch.manual_seed(number)
        dtype, layout = dtypes[number % len(dtypes)], layouts[number // len(dtypes) % len(layouts)]
        for gradient in (False, True):
            problem = wrong(calls, drawn, dtype, layout, gradient=gradient, place=place)
            if problem is not None:
                found.append(f"{drawn} {dtype} {layout} {'backward' if gradient else 'forward'}: {problem}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--count", type=int, default=2000, help="problems")
    parser.add_argument("--most", type=int, default=1 << 20, help="elements of the larger tensor")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    problems = [
        each for each, _ in zip(draw(random.Random(args.seed), most=args.most), range(args.count), strict=False)
    ]
    found = check(Calls(torch.device(args.device), dtypes), problems, dtypes)
    print("\n".join(found))
    print(f"{len(problems)} problems, {len(found)} wrong results")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
