"""Fits the constants of kernels/convolution/sm90/choice.mojo to a sweep of every tile shape.

    python benchmarks/convolution/sm90_check.py --sweep --no-check --output sweep.json
    python benchmarks/convolution/sm90_fit.py sweep.json

Prints the constants, and for each pass how much slower the chosen tile is than the best one of the sweep.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from sm90_check import WGRAD_TILES, Problem, read

PROCESSORS = 132
BYTE = 1 / 4.27e6
"""Microseconds to move one byte at the measured copy bandwidth."""
CACHE_BYTES = 45e6
TILES = ((128, 256), (256, 128), (128, 128), (256, 64))
SPLIT_STEPS = {1}
"""Wgrad shapes whose consumers each have a slot."""


@dataclass(frozen=True)
class Sample:
    problem: Problem
    shape: int
    splits: int
    us: float
    best: float


def tensor_bytes(p: Problem) -> float:
    return 2.0 * p.n * (p.h * p.w * p.c + p.p * p.q * p.k)


def products(passing: str, p: Problem) -> list[tuple[int, int]]:
    """(rows, pipeline stages) of each phase."""
    if passing == "fprop":
        return [(p.n * p.p * p.q, p.r * p.s * math.ceil(p.c / 64))]
    result = []
    for a in range(p.stride):
        for b in range(p.stride):
            h, w = math.ceil((p.h - a) / p.stride), math.ceil((p.w - b) / p.stride)
            taps_h = sum((a + p.padding - t * p.dilation) % p.stride == 0 for t in range(p.r))
            taps_w = sum((b + p.padding - t * p.dilation) % p.stride == 0 for t in range(p.s))
            result.append((p.n * h * w, taps_h * taps_w * math.ceil(p.k / 64)))
    return result


def tile_us(passing: str, p: Problem, shape: int, step: float, tile: float, traffic: float) -> float:
    rows, columns = TILES[shape]
    across = math.ceil((p.k if passing == "fprop" else p.c) / columns)
    counts = [math.ceil(count / rows) * across for count, _ in products(passing, p)]
    each = [steps * step + tile for _, steps in products(passing, p)]
    if len(counts) == 1:
        time = math.ceil(counts[0] / PROCESSORS) * each[0]
    else:
        time = sum(c * e for c, e in zip(counts, each, strict=True)) / PROCESSORS + max(each) / 2
    return max(time, tensor_bytes(p) * BYTE * traffic)


def wgrad_us(p: Problem, shape: int, splits: int, step: float, common: np.ndarray) -> float:
    traffic, combine_byte, combine_slot, unaligned, launch = common
    rows, columns = WGRAD_TILES[shape]
    tiles = math.ceil(p.k / rows) * math.ceil(p.r * p.s * math.ceil(p.c / 64) / (columns // 64))
    steps = math.ceil(p.n * p.p * p.q / 64)
    if splits == 0:
        slots = tiles + min(PROCESSORS, tiles * steps)
        time = tiles * steps / PROCESSORS * step
        if tensor_bytes(p) > CACHE_BYTES:
            time = max(time, tiles * steps * (rows + columns) * 128 * BYTE * unaligned)
    else:
        parts = min(splits, steps)
        slots = 0 if parts == 1 and shape not in SPLIT_STEPS else tiles * parts
        time = math.ceil(tiles * parts / PROCESSORS) * math.ceil(steps / parts) * step
    time = (time**3 + (tensor_bytes(p) * BYTE * traffic) ** 3) ** (1 / 3)
    slot_bytes = slots * rows * columns * 4 * (2 if shape in SPLIT_STEPS else 1)
    return time + slot_bytes * 2e-6 * combine_byte + slots / tiles * combine_slot + (launch if slots else 0.0)


def samples(document: dict, passing: str) -> list[Sample]:
    problems = {problem.name: problem for problem in read("sm90_problems.json", "")}
    result = []
    for row in document["rows"]:
        problem = problems[row["problem"]]
        if row["pass"] != passing or problem.c % 8:
            continue
        best = min(row["tunings_ms"].values()) * 1e3
        for key, ms in row["tunings_ms"].items():
            shape, splits = map(int, key.split(","))
            result.append(Sample(problem, shape, splits, ms * 1e3, best))
    return result


def loss(pairs: list[tuple[float, Sample]]) -> float:
    """Squared relative errors; samples far from the best of their problem count little."""
    return sum(math.log(guess / s.us) ** 2 * (s.best / s.us) ** 3 for guess, s in pairs) / len(pairs)


def regret(name: str, guessed: list[tuple[float, Sample]]) -> None:
    chosen: dict[str, tuple[float, Sample]] = {}
    for guess, s in guessed:
        if s.problem.name not in chosen or guess < chosen[s.problem.name][0]:
            chosen[s.problem.name] = (guess, s)
    costs = {problem: s.us / s.best for problem, (_, s) in chosen.items()}
    worst = sorted(costs.items(), key=lambda item: -item[1])[:5]
    print(f"{name}: {statistics.geometric_mean(costs.values()):.3f} of the best tile's time in the mean; worst:")
    for problem, cost in worst:
        print(f"  {problem} {cost:.3f} shape {chosen[problem][1].shape} splits {chosen[problem][1].splits}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", type=Path)
    document = json.loads(parser.parse_args().sweep.read_text())

    both = {passing: samples(document, passing) for passing in ("fprop", "dgrad")}
    constants = []
    for shape, (rows, columns) in enumerate(TILES):

        def cost(x: np.ndarray, shape: int = shape) -> float:
            return loss(
                [
                    (tile_us(passing, s.problem, shape, *np.exp(x)), s)
                    for passing, group in both.items()
                    for s in group
                    if s.shape == shape
                ]
            )

        start = np.log([rows * columns * 1.8e-5 * 1.25, 1.0, 1.1])
        found = minimize(cost, start, method="Nelder-Mead", options={"maxiter": 400})
        constants.append(np.exp(found.x))
        print(f"tile {rows}x{columns}: step, tile, traffic = {np.round(constants[-1], 3)}")
    for passing, group in both.items():
        regret(passing, [(tile_us(passing, s.problem, s.shape, *constants[s.shape]), s) for s in group])

    group = samples(document, "wgrad")
    shapes = len(WGRAD_TILES)

    def wgrad_cost(x: np.ndarray) -> float:
        values = np.exp(x)
        return loss(
            [
                (wgrad_us(s.problem, s.shape, s.splits, values[s.shape], values[shapes:]), s)
                for s in group
                if s.us < 2 * s.best
            ]
        )

    start = [rows * columns * 2.3e-5 for rows, columns in WGRAD_TILES] + [0.8, 0.23, 0.12, 0.56, 2.0]
    found = minimize(wgrad_cost, np.log(start), method="Powell", options={"maxiter": 16})
    values = np.exp(found.x)
    print(f"wgrad steps {np.round(values[:shapes], 3)}")
    print(f"traffic, combine byte, combine slot, unaligned traffic, launch = {np.round(values[shapes:], 3)}")
    regret(
        "wgrad",
        [(wgrad_us(s.problem, s.shape, s.splits, values[s.shape], values[shapes:]), s) for s in group],
    )


if __name__ == "__main__":
    main()
