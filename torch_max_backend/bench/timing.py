"""Timing several contenders side by side: warmed up, interleaved, each run on inputs that the cache does not hold."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_max_backend.checked import beartype
from torch_max_backend.torch_compat import occupy_gpu

_WARM_RUNS = 3
_WARM_SECONDS = 0.1
#: On a CPU a contender runs for so long, untimed, before each timed run. Worker threads of the runtime that ran before
#: need that to stop spinning and give the cores back: OpenMP's were seen to burn 5 ms of a core after every operator
#: of PyTorch. Sleeping instead leaves cores to be woken: a virtual machine's took 1.5 times as long for the next 20 ms.
_SETTLE_SECONDS = 15e-3
#: Keeps the GPU busy while the host queues the call: the events then bracket device time alone.
_HEAD_START_CYCLES = 1_000_000
#: In Hz: no GPU counts its cycles faster.
_FASTEST_CLOCK = 2.2e9
_ATTEMPTS = 4
#: Input sets together take this many times the cache; the contenders run half the rotation apart.
_CACHES = 4
_MAX_SETS = 256


@dataclass(frozen=True)
class Times:
    """Seconds of every timed run of one contender."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 for fewer than four runs."""
        if len(self.seconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median


@beartype
def set_count(bytes_of_a_set: int, cache_bytes: int, memory_bytes: int) -> int:
    """How many input sets to rotate over: more than the cache holds, at most half of the memory, at least one."""
    wanted = -(-_CACHES * cache_bytes // max(bytes_of_a_set, 1))
    return max(1, min(max(wanted, 2), _MAX_SETS, memory_bytes // (2 * max(bytes_of_a_set, 1))))


@beartype
def interleaved(
    contenders: Mapping[str, Sequence[Callable[[], object]]], runs: int, device: torch.device, queued: int = 1
) -> dict[str, Times]:
    """Times each contender `runs` times, in turns. A contender is one call for each input set.

    A call of a contender may make `queued` calls of an operation: a GPU is then kept busy so much longer beforehand,
    that the host has queued them all before the first begins.
    """
    for calls in contenders.values():
        _warm_up(calls, device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in range(runs):
        for place, (name, calls) in enumerate(contenders.items()):
            offset = place * len(calls) // len(contenders)
            turn = run + offset
            if device.type == "cuda":
                seconds[name].append(_cuda_clock(calls[turn % len(calls)], device, queued))
            else:
                _settle(calls, turn)
                seconds[name].append(_cpu_clock(calls[turn % len(calls)]))
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def _warm_up(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    start = time.perf_counter()
    done = 0
    while done < _WARM_RUNS or (time.perf_counter() - start < _WARM_SECONDS and done < len(calls)):
        calls[done % len(calls)]()
        done += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _settle(calls: Sequence[Callable[[], object]], turn: int) -> None:
    """Runs calls other than that of `turn`, whose inputs would lie in the cache then, if there are others."""
    others = [calls[(turn + after) % len(calls)] for after in range(1, len(calls))]
    start = time.perf_counter()
    for call in itertools.cycle(others or calls):
        call()
        if time.perf_counter() - start >= _SETTLE_SECONDS:
            return


def _cpu_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _cuda_clock(call: Callable[[], object], device: torch.device, queued: int) -> float:
    """Device time on the current stream, which every contender uses.

    Taken again after a longer head start where the host was too slow: the GPU may have waited for it.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = queued * _HEAD_START_CYCLES
    for attempt in range(_ATTEMPTS):
        torch.cuda.synchronize(device)
        occupy_gpu(cycles << attempt)
        begun = time.perf_counter()
        start.record()
        result = call()
        end.record()
        seconds = time.perf_counter() - begun
        end.synchronize()
        del result
        if seconds < (cycles << attempt) / _FASTEST_CLOCK:
            break
    return start.elapsed_time(end) * 1e-3
