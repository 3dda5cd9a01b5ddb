"""The tables of whole training steps on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import EAGER, INDUCTOR, INDUCTOR_CAPTURED, MAX, MAX_CAPTURED, PAIRS, label
from benchmarks.pages.parts import grid, mean, mean_and_worst, origin, read
from benchmarks.training import step_memory
from benchmarks.training.step_bytes import BYTES_PER_MS

STEPS = "training_steps_h200_bf16"
_MEMORY = "step_memory_h200_bf16"
_KINDS = "step_times_h200"
_LAUNCHES = "step_launches_h200_bf16"
_MIN_MS = 0.25
"""Milliseconds from which a kind of kernels has a row of its own."""


def step_of(model: str) -> dict[str, Any]:
    """What was measured of a model's step."""
    return next(row for row in read(STEPS)["rows"] if row["model"] == model)


def over_inductor() -> list[tuple[float, ...]]:
    """Our time over Inductor's of each step: plain, and both as device graphs."""
    steps = [row["median_seconds"] for row in read(STEPS)["rows"]]
    captured, plain = PAIRS
    return [tuple(step[ours] / step[theirs] for ours, theirs in (plain, captured)) for step in steps]


def training_steps_gpu() -> str:
    """One row for each model, and the means of our time over the other's."""
    contenders = (EAGER, INDUCTOR, MAX, INDUCTOR_CAPTURED, MAX_CAPTURED)
    ratios = over_inductor()
    rows = []
    for row, both in zip(read(STEPS)["rows"], ratios, strict=True):
        times = ((row["median_seconds"][who] * 1e3, row["queued_seconds"][who] * 1e3) for who in contenders)
        cells = [f"{step:.1f} ({queued:.1f})" for step, queued in times]
        rows.append([f"{row['model']}, {row['batch']}", *cells, *(f"{ratio:.2f}" for ratio in both)])
    rows.append(["geometric mean", *[""] * len(contenders), *map(mean, zip(*ratios, strict=True))])
    header = ["ms a step (queued)", *map(label, contenders)]
    return grid([*header, "ours over Inductor", "captured over CUDA graphs"], rows) + origin(STEPS)


def step_memory_gpu() -> str:
    """Peaks of steps, reserved and in parentheses allocated, and ours over Inductor's."""
    who = step_memory.ON_GPU
    rows, ratios = [], []
    for row in read(_MEMORY)["rows"]:
        peaks = (row["peak_bytes"][name] for name in who)
        cells = [f"{each['reserved'] / 2**30:.2f} ({each['allocated'] / 2**30:.2f})" if each else "" for each in peaks]
        ratios.append([step_memory.over_inductor(row, name, "reserved") for name in step_memory.RIVALS])
        shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios[-1])
        rows.append([f"{row['model']}, {row['batch']}", *cells, *shown])
    means = (mean(ratio for ratio in some if ratio is not None) for some in zip(*ratios, strict=True))
    rows.append(["geometric mean", *[""] * len(who), *means])
    header = ["GiB reserved (allocated)", *who, "ours over Inductor", "captured over CUDA graphs"]
    return grid(header, rows) + origin(_MEMORY)


def step_kinds() -> str:
    """Milliseconds of each kind of kernels, and of its bytes; a column for each model."""
    models = read(_KINDS)["rows"]
    kinds: dict[str, float] = {}
    for row in models:
        for kind, each in row["kinds"].items():
            kinds[kind] = max(kinds.get(kind, 0.0), each["seconds"] * 1e3)
    rows = [["whole step, queued", *(f"{row['queued_seconds'] * 1e3:.1f}" for row in models)]]
    for kind in (kind for kind, most in kinds.items() if most >= _MIN_MS):
        mine = [row["kinds"].get(kind) for row in models]
        cells = [f"{e['seconds'] * 1e3:.2f} ({e['bytes'] / BYTES_PER_MS:.2f})" if e else "" for e in mine]
        rows.append([kind, *cells])
    header = [f"{row['model']}, {row['batch']}" for row in models]
    return grid(["ms (bytes)", *header], rows) + origin(_KINDS)


def step_launches() -> str:
    """Launches of a model and a kind in each line: their time in one step before and now."""
    found = read(_LAUNCHES)["rows"]
    rows = []
    for model, batch, kernels in dict.fromkeys((row["model"], row["batch"], row["kernels"]) for row in found):
        mine = [row for row in found if (row["model"], row["kernels"]) == (model, kernels)]
        times = [sum(row["launches"] * row[key] for row in mine) / 1e3 for key in ("before_us", "now_us")]
        ratios = [row["now_us"] / row["before_us"] for row in mine]
        launches = sum(row["launches"] for row in mine)
        cells = [f"{time:.2f}" for time in times]
        rows.append([f"{model}, {batch}", kernels, str(launches), *cells, mean_and_worst(ratios)])
    return grid(["", "kernels", "launches", "ms before", "ms now", "now over before"], rows) + origin(_LAUNCHES)
