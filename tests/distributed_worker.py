"""One of several processes that train together; ``tests/test_distributed.py`` starts them with torchrun.

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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.test_habits import STRICT, Net
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph

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


@contextlib.contextmanager
def _graphs() -> Iterator[list[CompiledGraph]]:
    torch._dynamo.reset()
    with backend.recorded_graphs() as seen:
        yield seen


def _same(net: nn.Module, reference: nn.Module) -> str:
    """ "" where gradients agree, else what differs."""
    for (name, parameter), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        gradient = parameter.grad
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
    reference = _net()
    _loss(reference, whole=True).backward()
    found: dict[str, dict[str, object]] = {}
    for name, habit in HABITS.items():
        with _graphs() as seen:
            differs = [_same(habit(), reference)]
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, differs)
        found[name] = {"differs": [each for (each,) in everywhere], "graphs": [graph.name for graph in seen]}
    found["sync_batch_norm"] = {"refusal": sync_batch_norm()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
