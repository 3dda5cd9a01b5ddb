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
from sm90_check import SPLIT_STEPS, WGRAD_TILES, Problem, capacity, read

PROCESSORS = 132
BYTE = 1 / 4.27e6
"""Microseconds to move one byte at the measured copy bandwidth."""
CACHE_BYTES = 45e6
TILES = ((128, 256), (256, 128), (128, 128), (256, 64))


@dataclass(frozen=True)
class Sample:
    problem: Problem
    shape: int
    splits: int
    cluster: int
    share: tuple[int, int]
    us: float
    best: float

    @property
    def tuning(self) -> tuple[int, ...]:
        return (self.shape, self.splits, self.cluster, *self.share)


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


@dataclass(frozen=True)
class WgradFeatures:
    """What the prediction of wgrad's time needs of every sample, as arrays."""

    problem: np.ndarray
    shape: np.ndarray
    us: np.ndarray
    best: np.ndarray
    steps: np.ndarray
    """Pipeline stages of the busiest multiprocessor."""
    rounds: np.ndarray
    joins: np.ndarray
    shares: np.ndarray
    step_bytes: np.ndarray
    """What a block loads for one stage: of shared copies its part."""
    loaded_us: np.ndarray
    """Where blocks walk unrelated pixels: the time of all loads at the copy bandwidth."""
    memory_us: np.ndarray
    slots: np.ndarray
    """Of one tile."""
    slot_bytes: np.ndarray
    tile_bytes: np.ndarray

    @staticmethod
    def of(group: list[Sample]) -> WgradFeatures:
        names = sorted({s.problem.name for s in group})
        return WgradFeatures(*np.array([[names.index(s.problem.name), *_features(s)] for s in group], float).T)

    def predicted(self, x: np.ndarray) -> np.ndarray:
        """choice.mojo's wgrad_time."""
        values = np.exp(x)
        step = values[: len(WGRAD_TILES)][self.shape.astype(int)]
        rest = values[len(WGRAD_TILES) :]
        traffic, combine_byte, combine_slot, unaligned, launch, join_byte, join, start, load_byte, share = rest
        step = (step**4 + (self.step_bytes * load_byte) ** 4) ** 0.25
        time = np.maximum(self.steps * step, self.loaded_us * unaligned)
        time = (time**3 + (self.memory_us * traffic) ** 3) ** (1 / 3) + start
        time = time + self.joins * self.rounds * (join + self.tile_bytes * join_byte) + self.shares * share
        return time + self.slot_bytes * 2 * combine_byte + self.slots * combine_slot + (self.slots > 0) * launch


def _features(s: Sample) -> list[float]:
    p, (rows, columns) = s.problem, WGRAD_TILES[s.shape]
    across, along = math.ceil(p.k / rows), math.ceil(p.r * p.s * math.ceil(p.c / 64) / (columns // 64))
    share_rows, share_columns = s.share
    tiles = math.ceil(across / share_rows) * math.ceil(along / share_columns) * share_rows * share_columns
    step_bytes = (rows / share_columns + columns / share_rows) * 128
    steps = math.ceil(p.n * p.p * p.q / 64)
    loaded = 0.0
    if s.splits == 0:
        slots, rounds, busiest = tiles + min(PROCESSORS, tiles * steps), 1, tiles * steps / PROCESSORS
        if tensor_bytes(p) > CACHE_BYTES:
            loaded = tiles * steps * step_bytes * BYTE
    else:
        parts = min(s.splits, steps)
        slots = parts // max(s.cluster, 1)
        slots = 0 if slots == 1 else tiles * slots
        rounds = math.ceil(tiles * parts / capacity(max(s.cluster, share_rows * share_columns), PROCESSORS))
        busiest = rounds * math.ceil(steps / parts)
    copies = 2 if s.shape in SPLIT_STEPS else 1
    return [
        s.shape,
        s.us,
        s.best,
        busiest,
        rounds,
        s.cluster > 0,
        share_rows * share_columns > 1,
        step_bytes * 1e-6,
        loaded,
        tensor_bytes(p) * BYTE,
        slots / tiles,
        slots * rows * columns * 4e-6,
        rows * columns * copies * 4e-6,
    ]


def samples(document: dict, passing: str) -> list[Sample]:
    problems = {problem.name: problem for problem in read("sm90_problems.json", "")}
    result = []
    for row in document["rows"]:
        problem = problems[row["problem"]]
        if row["pass"] != passing or problem.c % 8:
            continue
        best = min(row["tunings_ms"].values()) * 1e3
        for key, ms in row["tunings_ms"].items():
            shape, splits, cluster, *share = map(int, key.split(","))
            result.append(Sample(problem, shape, splits, cluster, tuple(share), ms * 1e3, best))
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
        sample = chosen[problem][1]
        print(f"  {problem} {cost:.3f} {sample.tuning}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", type=Path)
    document = json.loads(parser.parse_args().sweep.read_text())

    both = {passing: samples(document, passing) for passing in ("fprop", "dgrad")}
    if any(both.values()):
        fit_tiles(both)
    if group := samples(document, "wgrad"):
        fit_wgrad(group)


def fit_tiles(both: dict[str, list[Sample]]) -> None:
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


def fit_wgrad(group: list[Sample]) -> None:
    f = WgradFeatures.of(group)

    def cost(x: np.ndarray, sharpness: int) -> float:
        """Squared relative errors; samples far from the best of their problem count little."""
        error = np.log(f.predicted(x) / f.us) ** 2 * (f.best / f.us) ** sharpness
        return float(error[f.us < 2 * f.best].mean())

    def loss_of_choice(x: np.ndarray) -> float:
        """The mean over the problems, geometric, of the chosen sample's time over the best one's."""
        order = np.lexsort((f.predicted(x), f.problem))
        first = order[np.unique(f.problem[order], return_index=True)[1]]
        return float(np.log(f.us[first] / f.best[first]).mean())

    fixed = [0.95, 0.25, 0.12, 0.5, 2.5, 20.0, 1.0, 1.5, 13.0, 0.5]
    x = np.log([rows * columns * 1.7e-5 for rows, columns in WGRAD_TILES] + fixed)
    for sharpness in (3, 6):
        x = minimize(cost, x, args=(sharpness,), method="Powell", options={"maxiter": 40}).x
    # The times fit; what is left is to choose well where two are close.
    draws = np.random.default_rng(0)
    least = loss_of_choice(x)
    for _ in range(4000):
        candidate = x + draws.normal(0, 0.05, len(x)) * (draws.random(len(x)) < 0.3)
        loss = loss_of_choice(candidate)
        if loss < least:
            x, least = candidate, loss
    shapes = len(WGRAD_TILES)
    print(f"wgrad steps {np.round(np.exp(x[:shapes]), 3)}")
    print("traffic, combine byte, combine slot, unaligned, launch, join byte, join, start, load byte, share (us, MB):")
    print(np.round(np.exp(x[shapes:]), 3))
    regret("wgrad", list(zip(f.predicted(x), group, strict=True)))
    print("measured choices (K, C, taps, steps): where the prediction loses more than 3 %")
    predicted = f.predicted(x)
    alike: dict[tuple[int, ...], list[np.ndarray]] = {}
    for number in np.unique(f.problem):
        mine = np.flatnonzero(f.problem == number)
        p = group[mine[0]].problem
        alike.setdefault((p.k, p.c, p.r * p.s, math.ceil(p.n * p.p * p.q / 64)), []).append(mine)
    for key, problems in alike.items():
        # Problems that the list can't tell apart have one choice.
        slower: dict[tuple[int, ...], list[float]] = {}
        for mine in problems:
            for at in mine:
                slower.setdefault(group[at].tuning, []).append(math.log(f.us[at] / f.best[at]))
        best = min((sum(costs), tuning) for tuning, costs in slower.items() if len(costs) == len(problems))
        lost = sum(math.log(f.us[at] / f.best[at]) for at in (mine[predicted[mine].argmin()] for mine in problems))
        if lost - best[0] > math.log(1.03) * len(problems):
            print(f"  {', '.join(map(str, key))}: {best[1]}")


if __name__ == "__main__":
    main()
