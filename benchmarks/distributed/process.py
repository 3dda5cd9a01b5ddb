"""One of the processes that `benchmarks distributed` measures together: it trains contenders and times their steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import EAGER, INDUCTOR, MAX, MAX_CAPTURED, MAX_SPLIT, compiled
from benchmarks.steps import MEMORY_FORMATS, drawn, queued, release, stepper, timed

CHOSEN = (EAGER, MAX, MAX_SPLIT, MAX_CAPTURED, INDUCTOR)
DDP, FSDP, NONE = "ddp", "fsdp", "none"
#: A captured backward graph is recorded in its fifth call; DDP makes its buckets anew in the second step.
WARM = 6
ROUNDS = 3
PROFILED = 3
Interval = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """What one row is measured of.

    Attributes:
        model: its name in the zoo.
        engine: "ddp" or "fsdp"; "none" for one process, which adds nothing up.
        contender: one of ``CHOSEN``.
        gpus: how many processes there are.
        batch: images of each process.
        sync: batch normalization over all processes.
    """

    model: str
    engine: str
    contender: str
    gpus: int
    batch: int
    sync: bool

    def __str__(self) -> str:
        engine = f"{self.engine}{', SyncBatchNorm' if self.sync else ''}"
        return f"{self.model}, {self.batch}, {engine}, {self.contender}, {self.gpus}"


@dataclass(frozen=True)
class How:
    """What all rows have in common.

    Attributes:
        device: "cpu" or "cuda".
        amp: bfloat16 autocast.
        size: height and width of an image; 0 for the model's own.
        steps: that are timed.
        bucket_mb: DDP's ``bucket_cap_mb``.
        search: cuDNN times its kernels first.
    """

    device: str
    amp: bool
    size: int
    steps: int
    bucket_mb: float
    search: bool


def contenders_of(engine: str, gpus: int, chosen: Iterable[str]) -> list[str]:
    """Those of ``chosen`` that differ: only DDP has buckets to cut a graph at, and FSDP moves its parameters."""
    if gpus == 1:
        return [name for name in chosen if name != MAX_SPLIT]
    return [name for name in chosen if engine == DDP or name not in (MAX_SPLIT, MAX_CAPTURED)]


def units(model: nn.Module) -> Iterator[nn.Module]:
    """The parts that FSDP2 gathers one after the other: the blocks of the model's lists, but for small ones."""
    lists = (nn.Sequential, nn.ModuleList)
    for child in model.children():
        if not isinstance(child, lists):
            yield from units(child)
            continue
        for member in child:
            within = (each for each in member.modules() if each is not member)
            if any(isinstance(each, lists) and len(each) > 2 for each in within):
                yield from units(member)
            elif sum(each.numel() for each in member.parameters()) > 2**18:
                yield member


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, sharded over all processes."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in list(units(model)):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrapped(model: nn.Module, case: Case, how: How, device: torch.device) -> Callable[..., torch.Tensor]:
    """The model as the contender runs it in several processes."""
    own = functools.partial(compiled, name=case.contender, dynamic=False)
    if case.engine == NONE:
        return own(model)
    if case.engine == FSDP:
        return own(sharded(model, device))
    ddp = functools.partial(
        DistributedDataParallel,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=how.bucket_mb,
        gradient_as_bucket_view=True,
    )
    # PyTorch recommends to compile what DDP has wrapped; with ours the model is compiled in one piece.
    return ddp(own(model)) if case.contender in (EAGER, MAX, MAX_CAPTURED) else own(ddp(model))


def measured(case: Case, how: How, device: torch.device) -> dict[str, Any]:
    """Times of one contender's steps on all processes: the row without the names."""
    torch._dynamo.reset()
    # Dynamo cuts graphs at the ends of DDP's buckets otherwise, wherever the model is compiled.
    torch._dynamo.config.optimize_ddp = case.contender in (MAX_SPLIT, INDUCTOR)
    base, x, y = drawn(case.model, case.batch, how.size, device)
    # Each process has images of its own.
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(1 + dist.get_rank())).to(device)
    if device.type == "cuda":
        layout = MEMORY_FORMATS[x.dim()]
        base, x = base.to(memory_format=layout), x.to(memory_format=layout)
    model = copy.deepcopy(base)
    del base
    if case.sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    release(device)
    runner = wrapped(model, case, how, device)
    step = stepper(model, runner, x, y, how.amp)
    # At once: a process that begins late would make the others wait.
    dist.barrier()
    row: dict[str, Any] = {"first_step_seconds": round(timed(step, device), 2)}
    for _ in range(WARM):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    row["median_seconds"] = statistics.median(timed(step, device) for _ in range(how.steps))
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        rounds.append(queued(step, how.steps, device))
    row["queued_seconds"] = statistics.median(rounds)
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if case.engine != NONE:
            row |= communication(step)
    release(device)
    return slowest(row, device)


def slowest(row: dict[str, float], device: torch.device) -> dict[str, Any]:
    """The most that any process has of each figure; of what overlaps, the least."""
    least = "overlapped_seconds"
    values = torch.tensor([-row[key] if key == least else row[key] for key in row], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    found = dict(zip(row, values.tolist(), strict=True))
    return {
        key: int(value) if key.endswith("bytes") else round(abs(value), 6)
        for key, value in found.items()
    }  # fmt: skip


def communication(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of a step in which NCCL's kernels run on this GPU, and those in which other kernels run beside them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    both, beside = overlap(events)
    return {"communication_seconds": both / PROFILED, "overlapped_seconds": beside / PROFILED}


def overlap(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Seconds in which kernels of NCCL run, and seconds of those in which other kernels run, too.

    Args:
        events: of a trace in Chrome's format, in which times are microseconds.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    for event in kernels:
        spans["nccl" in event["name"].lower()].append((event["ts"], event["ts"] + event["dur"]))
    ours, others = union(spans[True]), union(spans[False])
    shared = 0.0
    position = 0
    for begin, end in ours:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        for first, last in others[position:]:
            if first >= end:
                break
            shared += min(end, last) - max(begin, first)
    return sum(end - begin for begin, end in ours) * 1e-6, shared * 1e-6


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def run(how: How, cases: Iterable[Case], until: float, begin: Callable[[Case], None], add: Callable[..., None]) -> None:
    """Measures the cases as one of several processes.

    Args:
        how: to measure.
        cases: in this order.
        until: seconds since the epoch after which the first process begins none.
        begin: is told of each case, in the first process.
        add: takes each case with its row, in the first process.
    """
    device = torch.device("cpu")
    if how.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = how.search
    # The blocks of a model that FSDP shards are frames of one function.
    torch._dynamo.config.recompile_limit = 64
    on_gpu = how.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    first = dist.get_rank() == 0
    for case in cases:
        goes = torch.tensor(int(time.time() < until), device=device)
        dist.broadcast(goes, 0)
        if not goes.item():
            break
        if first:
            begin(case)
        row = measured(case, how, device)
        if first:
            add(case, row)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
