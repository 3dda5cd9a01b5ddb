"""Interleaving, rotation and the arithmetic of figures, with clocks that cost nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_max_backend.bench import timing
from torch_max_backend.bench.case import summation_tolerance
from torch_max_backend.bench.ceilings import Ceilings

CPU = torch.device("cpu")


def test_contenders_take_turns_on_different_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def clock(call: object) -> float:
        calls.clear() if call is None else call()  # type: ignore[operator]
        return 1.0

    monkeypatch.setattr(timing, "_cpu_clock", clock)
    monkeypatch.setattr(timing, "_settle", lambda calls, turn: None)
    monkeypatch.setattr(timing, "_warm_up", lambda calls, device: None)
    contenders = {
        name: [lambda name=name, number=number: calls.append(f"{name}{number}") for number in range(4)] for name in "ab"
    }
    times = timing.interleaved(contenders, 5, CPU)
    assert calls == ["a0", "b2", "a1", "b3", "a2", "b0", "a3", "b1", "a0", "b2"]
    assert {name: len(value.seconds) for name, value in times.items()} == {"a": 5, "b": 5}


def test_settling_leaves_the_next_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) * timing._SETTLE_SECONDS / 6.5)
    calls: list[int] = []
    contender = [lambda number=number: calls.append(number) for number in range(3)]
    timing._settle(contender, 4)
    assert calls == [2, 0, 2, 0, 2, 0, 2]
    calls.clear()
    timing._settle(contender[:1], 4)
    assert calls == [0] * 7


def test_every_contender_is_warmed_up() -> None:
    counts = {"a": 0, "b": 0}

    def count(name: str) -> None:
        counts[name] += 1

    timing.interleaved({name: [lambda name=name: count(name)] for name in counts}, 2, CPU)
    assert all(value >= 2 + 3 for value in counts.values())


def test_sets_exceed_the_cache_and_fit_the_memory() -> None:
    assert timing.set_count(10, 100, 10**9) == 40
    assert timing.set_count(1000, 100, 10**9) == 2
    assert timing.set_count(1000, 100, 3000) == 1
    assert timing.set_count(1, 10**9, 10**12) == 256


def test_median_and_spread() -> None:
    times = timing.Times((1.0, 3.0, 2.0, 4.0, 100.0))
    assert times.median == 3.0
    assert times.spread > 0
    assert timing.Times((1.0, 2.0)).spread == 0


def test_floor_is_the_larger_bound() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    assert ceilings.floor(5000, 100).seconds == 5.0
    assert ceilings.floor(5000, 100).bound == "flops"
    assert ceilings.floor(500, 100).seconds == 1.0
    assert ceilings.floor(5000, 100, arithmetic=False).seconds == 1.0


def test_tolerance_follows_the_reduction_length() -> None:
    short = summation_tolerance(torch.float32, CPU, 2, 9, matmul=True)
    long = summation_tolerance(torch.float32, CPU, 2, 9000, matmul=True)
    assert long.absolute == pytest.approx(1000 * short.absolute)
    assert long.relative == short.relative
    assert summation_tolerance(torch.float64, CPU, 2, 9, matmul=True).absolute < 1e-14
    assert summation_tolerance(torch.bfloat16, CPU, 2, 9, matmul=True).relative > 1e-2


def test_integers_are_exact_as_long_as_the_accumulator_is() -> None:
    assert summation_tolerance(torch.float16, CPU, 1, 2**20, matmul=True).exact
    assert not summation_tolerance(torch.float16, CPU, 1, 2**23, matmul=True).exact
    assert summation_tolerance(torch.float64, CPU, 1, 2**23, matmul=True).exact
