"""Fits the constants of kernels/convolution/sm90/measured.mojo to a sweep of every tile shape, and writes that file.

    python -m benchmarks convolution.sm90_check --sweep --no-check --output sweep.json
    python -m benchmarks convolution.sm90_fit sweep.json

Prints for each pass how much slower the chosen tile is than the best one of the sweep.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.kernels.convolution.sm90_check import SPLIT_STEPS, WGRAD_TILES, Problem, capacity, read

PROCESSORS = 132
BYTE = 1 / 4.27e6
"""Microseconds to move one byte at the measured copy bandwidth."""
CACHE_BYTES = 45e6
TILES = ((128, 256), (256, 128), (128, 128), (256, 64), (128, 192), (128, 256), (256, 64))
OF_TAPS = 6
"""The shape whose stages serve three taps."""
MEASURED = ROOT / "kernels" / "convolution" / "sm90" / "measured.mojo"
TILE_COSTS = ("step", "tile", "traffic")
WGRAD_COSTS = {
    "start": 3.0,
    "traffic": 0.95,
    "unaligned": 0.5,
    "load_byte": 10.0,
    "share": 3.0,
    "join": 2.5,
    "join_byte": 10.0,
    "swap": 1.5,
    "swap_byte": 10.0,
    "combine": 1.0,
    "combine_byte": 0.25,
    "combine_slot": 0.12,
}
"""WgradCosts in costs.mojo, and where the fit begins."""


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


def with_shared_taps(passing: str, p: Problem) -> list[tuple[int, int]]:
    """``products`` for stages that serve three taps along W; as they are where those do not exist."""
    width = p.q if passing == "fprop" else p.w
    found = products(passing, p)
    if not 1 < p.s <= 3 or p.stride != 1 or p.dilation != 1 or width < 2 * (p.s - 1):
        return found
    return [(rows // width * (width + p.s - 1), stages // p.s) for rows, stages in found]


def tile_us(passing: str, p: Problem, shape: int, step: float, tile: float, traffic: float) -> float:
    rows, columns = TILES[shape]
    across = math.ceil((p.k if passing == "fprop" else p.c) / columns)
    walked = (with_shared_taps if shape == OF_TAPS else products)(passing, p)
    counts = [math.ceil(count / rows) * across for count, _ in walked]
    each = [steps * step + tile for _, steps in walked]
    if len(counts) == 1:
        time = math.ceil(counts[0] / PROCESSORS) * each[0]
    else:
        time = sum(c * e for c, e in zip(counts, each, strict=True)) / PROCESSORS + max(each) / 2
    return max(time, tensor_bytes(p) * BYTE * traffic)


@dataclass(frozen=True)
class WgradConstants:
    steps: list[float]
    costs: dict[str, float]

    @staticmethod
    def of(logarithms: np.ndarray, digits: int | None = None) -> WgradConstants:
        values = [float(value) for value in np.exp(logarithms)]
        if digits is not None:
            values = [round(value, digits) for value in values]
        shapes = len(WGRAD_TILES)
        return WgradConstants(values[:shapes], dict(zip(WGRAD_COSTS, values[shapes:], strict=True)))


@dataclass(frozen=True)
class WgradFeatures:
    """What the prediction of wgrad's time needs of every sample, as arrays."""

    problem: np.ndarray
    shape: np.ndarray
    us: np.ndarray
    best: np.ndarray
    steps: np.ndarray
    """Pipeline stages of the busiest multiprocessor."""
    joins: np.ndarray
    """Rounds of clusters that join through shared memory."""
    swaps: np.ndarray
    """Rounds of pairs of blocks that send each other half."""
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

    def predicted(self, constants: WgradConstants) -> np.ndarray:
        """choice.mojo's wgrad_time."""
        cost = constants.costs
        step = np.array(constants.steps)[self.shape.astype(int)]
        step = (step**4 + (self.step_bytes * cost["load_byte"]) ** 4) ** 0.25
        time = np.maximum(self.steps * step, self.loaded_us * cost["unaligned"])
        time = (time**3 + (self.memory_us * cost["traffic"]) ** 3) ** (1 / 3) + cost["start"]
        time = time + self.joins * (cost["join"] + self.tile_bytes * cost["join_byte"])
        time = time + self.swaps * (cost["swap"] + self.tile_bytes * cost["swap_byte"]) + self.shares * cost["share"]
        time = time + self.slot_bytes * 2 * cost["combine_byte"] + self.slots * cost["combine_slot"]
        return time + (self.slots > 0) * cost["combine"]


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
    swaps = s.cluster == 2 and copies == 1
    return [
        s.shape,
        s.us,
        s.best,
        busiest,
        rounds * (s.cluster > 0 and not swaps),
        rounds * swaps,
        share_rows * share_columns > 1,
        step_bytes * 1e-6,
        loaded,
        tensor_bytes(p) * BYTE,
        slots / tiles,
        slots * rows * columns * 4e-6,
        rows * columns * copies * 4e-6,
    ]


def samples(document: dict, passing: str) -> list[Sample]:
    problems = {problem.name: problem for problem in read("sm90", "")}
    result = []
    for row in document["rows"]:
        problem = problems[row["problem"]]
        if row["pass"] != passing or problem.c % 8:
            continue
        best = min(row["tunings_ms"].values()) * 1e3
        for key, ms in row["tunings_ms"].items():
            shape, splits, cluster, rows, columns, *recast = map(int, key.split(","))
            if not any(recast):
                result.append(Sample(problem, shape, splits, cluster, (rows, columns), ms * 1e3, best))
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


def fit_tiles(both: dict[str, list[Sample]], known: list[list[float]]) -> list[list[float]]:
    """Each shape's constants; the `known` ones of a shape that was not in the sweep."""
    from scipy.optimize import minimize

    constants = []
    for shape, (rows, columns) in enumerate(TILES):
        if all(s.shape != shape for group in both.values() for s in group):
            constants.append(known[shape])
            continue

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
        constants.append([round(float(value), 3) for value in np.exp(found.x)])
    return constants


def fit_wgrad(group: list[Sample]) -> WgradConstants:
    from scipy.optimize import minimize

    f = WgradFeatures.of(group)

    def cost(x: np.ndarray, sharpness: int) -> float:
        """Squared relative errors; samples far from the best of their problem count little."""
        error = np.log(f.predicted(WgradConstants.of(x)) / f.us) ** 2 * (f.best / f.us) ** sharpness
        return float(error[f.us < 2 * f.best].mean())

    def loss_of_choice(x: np.ndarray) -> float:
        """The mean over the problems, geometric, of the chosen sample's time over the best one's."""
        order = np.lexsort((f.predicted(WgradConstants.of(x, 3)), f.problem))
        first = order[np.unique(f.problem[order], return_index=True)[1]]
        return float(np.log(f.us[first] / f.best[first]).mean())

    x = np.log([rows * columns * 1.7e-5 for rows, columns in WGRAD_TILES] + list(WGRAD_COSTS.values()))
    for sharpness in (3, 6):
        x = minimize(cost, x, args=(sharpness,), method="Powell", options={"maxiter": 40}).x
    # The times fit; what is left is to choose well where two are close.
    draws = np.random.default_rng(0)
    least = loss_of_choice(x)
    for _ in range(4000):
        candidate = x + draws.normal(0, 0.05, len(x)) * (draws.random(len(x)) < 0.3)
        found = loss_of_choice(candidate)
        if found < least:
            x, least = candidate, found
    return WgradConstants.of(x, 3)


def mojo(tiles: list[list[float]], wgrad: WgradConstants) -> str:
    """The text of measured.mojo."""

    def array(name: str, kind: str, lines: list[str]) -> str:
        return f"comptime {name}: Array[{kind}, {len(lines)}] = [\n" + "".join(f"    {x},\n" for x in lines) + "]\n"

    named = [", ".join(f"{n}={v:.3f}" for n, v in zip(TILE_COSTS, values, strict=True)) for values in tiles]
    return (
        '"""Written by benchmarks/kernels/convolution/sm90_fit.py from the sweep in benchmarks/results."""\n\n'
        "from .costs import TileCost, WgradCosts\n\n"
        + array("TILE_COSTS", "TileCost", [f"TileCost({text})" for text in named])
        + array("WGRAD_STEP", "Float64", [f"{value:.3f}" for value in wgrad.steps])
        + "comptime WGRAD_COSTS = WgradCosts(\n"
        + "".join(f"    {name}={value:.3f},\n" for name, value in wgrad.costs.items())
        + ")\n"
    )


def constants_of(text: str) -> tuple[list[list[float]], WgradConstants]:
    """The constants in the text of a measured.mojo."""
    number = r"(\d+\.\d+)"
    tiles = re.findall(rf"TileCost\(step={number}, tile={number}, traffic={number}\)", text)
    steps = re.findall(rf"^    {number},$", text, re.MULTILINE)
    costs = dict(re.findall(rf"^    (\w+)={number},$", text, re.MULTILINE))
    return (
        [[float(value) for value in values] for values in tiles],
        WgradConstants([float(value) for value in steps], {name: float(costs[name]) for name in WGRAD_COSTS}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--output", type=Path, default=MEASURED, help="the file, measured.mojo")
    args = parser.parse_args()
    document = json.loads(args.sweep.read_text())
    both = {passing: samples(document, passing) for passing in ("fprop", "dgrad")}
    group = samples(document, "wgrad")
    tiles, wgrad = fit_tiles(both, constants_of(MEASURED.read_text())[0]), fit_wgrad(group)
    args.output.write_text(mojo(tiles, wgrad))
    for passing, each in both.items():
        regret(passing, [(tile_us(passing, s.problem, s.shape, *tiles[s.shape]), s) for s in each])
    regret("wgrad", list(zip(WgradFeatures.of(group).predicted(wgrad), group, strict=True)))


if __name__ == "__main__":
    main()
