"""One of several processes that train together; ``tests/training/test_distributed.py`` starts them with torchrun.

Each process takes its part of one batch. What it prints as JSON is, by habit, whether the gradients are those of one
process with the whole batch, and the graphs that were made.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.training.test_habits import STRICT, Net
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.launching.segments import SegmentedRunner

DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
EACH = 4


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    count = EACH * dist.get_world_size()
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return images.to(DEVICE), (torch.arange(count) % 5).to(DEVICE)


def _loss(model: Callable[[torch.Tensor], torch.Tensor], *, whole: bool = False) -> torch.Tensor:
    images, labels = _batch()
    mine = slice(None) if whole else slice(EACH * dist.get_rank(), EACH * (dist.get_rank() + 1))
    return F.cross_entropy(model(images[mine]), labels[mine])


def _net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if norm:
        net.conv = nn.Sequential(net.conv, nn.BatchNorm2d(4))
    return net.to(DEVICE)


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="max", options=STRICT)


def ddp_outside() -> nn.Module:
    """The wrapped model is compiled: Dynamo cuts the graph where DDP's buckets end, so that they are reduced early."""
    net = _net()
    # In a variable here and below: what adds the gradients up lives as long as the wrapper.
    ddp = _compiled(DistributedDataParallel(net))
    _loss(ddp).backward()
    return net


def ddp_buckets() -> nn.Module:
    """The same with two buckets."""
    net = _net()
    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 64
    try:
        ddp = _compiled(DistributedDataParallel(net, bucket_cap_mb=1e-4))
        _loss(ddp).backward()
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
    return net


def ddp_inside() -> nn.Module:
    """The compiled model is wrapped."""
    net = _net()
    ddp = DistributedDataParallel(_compiled(net))
    _loss(ddp).backward()
    return net


def ddp_accumulated() -> nn.Module:
    """Two backward passes, of which only the second reduces."""
    net = _net()
    ddp = DistributedDataParallel(_compiled(net))
    with ddp.no_sync():
        (_loss(ddp) / 2).backward()
    (_loss(ddp) / 2).backward()
    return net


#: Bytes of a bucket that the head's weight fills.
SMALL = 52
EVENTS: list[str] = []
"""What happened in the last habit that says so: "segment 0" runs, "bucket 0" is added up."""


class Spare(Net):
    """Has a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def _whole(net: nn.Module, outside: bool = False, **settings: Any) -> nn.Module:
    """The net in small buckets whose graph Dynamo does not cut: its backward graph runs in segments."""
    settings["bucket_cap_mb"] = SMALL / 2**20
    if outside:
        return _compiled(DistributedDataParallel(net, **settings))
    return DistributedDataParallel(_compiled(net), **settings)


def _noted_segment(self: SegmentedRunner, segment: int, *args: Any) -> None:
    EVENTS.append(f"segment {segment}")
    RUN_SEGMENT(self, segment, *args)


RUN_SEGMENT = SegmentedRunner.run_segment


def segments_inside() -> nn.Module:
    """The compiled model is wrapped; buckets are those of the second step, which are in the order of gradients."""
    net = _net()
    ddp = _whole(net, gradient_as_bucket_view=True)
    assert isinstance(ddp, DistributedDataParallel)

    def note(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        EVENTS.append(f"bucket {bucket.index()}")
        return allreduce_hook(None, bucket)

    # DDP cannot read annotations that are text.
    ddp.register_comm_hook(None, lambda state, bucket: note(bucket))
    with mock.patch.object(SegmentedRunner, "run_segment", _noted_segment):
        for _ in range(2):
            EVENTS.clear()
            net.zero_grad()
            _loss(ddp).backward()
    return net


def _steps(net: nn.Module, ddp: Any, count: int) -> None:
    """Leaves the gradients of the last of so many backward passes in ``net``."""
    for _ in range(count):
        net.zero_grad()
        _loss(ddp).backward()


def segments_outside() -> nn.Module:
    """The wrapped model is compiled."""
    net = _net()
    ddp = _whole(net, outside=True)
    _steps(net, ddp, 2)
    return net


def segments_accumulated() -> nn.Module:
    """Two backward passes, of which only the second reduces."""
    net = _net()
    ddp = _whole(net, gradient_as_bucket_view=True)
    for _ in range(2):
        net.zero_grad()
        with ddp.no_sync():  # type: ignore[operator]
            (_loss(ddp) / 2).backward()
        (_loss(ddp) / 2).backward()
    return net


def segments_unused() -> nn.Module:
    """A layer is not used, and hooks double the gradients and halve them."""
    torch.manual_seed(0)
    net = Spare().to(DEVICE)
    for weight in net.parameters():
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_hook(lambda gradient: gradient / 2)
    ddp = _whole(net, find_unused_parameters=True)
    _steps(net, ddp, 2)
    return net


def segments_static() -> nn.Module:
    """DDP is told that its graph is the same in each step."""
    net = _net()
    ddp = _whole(net, static_graph=True)
    _steps(net, ddp, 3)
    return net


def fsdp_outside() -> nn.Module:
    """A sharded model is compiled."""
    net = _net()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    fully_shard(net.head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    _loss(_compiled(net)).backward()
    return net


def sync_batch_norm() -> str:
    """What DDP says to synchronized normalization on a CPU, where PyTorch has none."""
    try:
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(_net(norm=True)))
    except ValueError as error:
        return str(error)
    return ""


HABITS = {f.__name__: f for f in (ddp_outside, ddp_buckets, ddp_inside, ddp_accumulated, fsdp_outside)}
SEGMENTED = {
    f.__name__: f for f in (segments_inside, segments_outside, segments_accumulated, segments_unused, segments_static)
}


def one_fails() -> None:
    """The second process fails in the middle of a backward pass, when others may wait for it."""
    net = _net()
    ddp = _whole(net)
    if dist.get_rank() == 1:

        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("this process fails")

        net.get_parameter("conv.weight").register_hook(fail)
    with torch._dynamo.config.patch(optimize_ddp=False):
        _loss(ddp).backward()


@contextlib.contextmanager
def _graphs() -> Iterator[list[CompiledGraph]]:
    torch._dynamo.reset()
    EVENTS.clear()
    with backend.recorded_graphs() as seen:
        yield seen


def _segments(graph: CompiledGraph) -> int:
    """How many segments a graph runs in."""
    (executable,) = graph.executables
    return 1 if executable.segments is None else len(executable.segments[1]) + 1


def _same(net: nn.Module, reference: nn.Module) -> str:
    """ "" where gradients agree, else what differs."""
    named = dict(reference.named_parameters())
    for name, parameter in net.named_parameters():
        gradient = parameter.grad
        if name.startswith("spare"):
            assert gradient is None
            continue
        other = named[name]
        assert gradient is not None and other.grad is not None
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        if not torch.allclose(gradient, other.grad, rtol=1e-4, atol=1e-6):
            return f"{name}: {(gradient - other.grad).abs().max().item():.2e}"
    return ""


def main() -> None:
    """Runs every habit; the first process writes what became of them to the file that is named."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Rounded to TF32, the reference would be further from the truth than what is compared with it.
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    if sys.argv[1] == "one_fails":
        one_fails()
        return
    reference = _net()
    _loss(reference, whole=True).backward()
    found: dict[str, dict[str, object]] = {}
    for name, habit in (HABITS | SEGMENTED).items():
        with _graphs() as seen, torch._dynamo.config.patch(optimize_ddp=name in HABITS):
            differs = [_same(habit(), reference)]
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, differs)
        found[name] = {"differs": [each for (each,) in everywhere], "graphs": [graph.name for graph in seen]}
        found[name]["segments"] = [_segments(graph) for graph in seen if graph.name == "backward"]
        found[name]["events"] = [*EVENTS]
    found["sync_batch_norm"] = {"refusal": sync_batch_norm()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
