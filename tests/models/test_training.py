"""Whole models, one training step and evaluation: loss, gradients and buffers against eager PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import zoo
from torch_max_backend import backend
from torch_max_backend.graph.compiler import CompiledGraph


@dataclass(frozen=True)
class Job:
    """A model, its input's shape, and what its output is compared with.

    ``layout_at_edges``: no computed tensor changes its memory order inside a graph.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pixelwise: bool = False
    channels_last: bool = False
    layout_at_edges: bool = False


JOBS = [
    Job("mlp", zoo.Mlp, (8, 1, 8, 8)),
    Job("lenet", zoo.LeNet, (4, 1, 32, 32)),
    Job("vgg11", lambda: zoo.vgg11(0.01, 10, head=16), (2, 3, 64, 64)),
    Job("resnet18", lambda: zoo.resnet18(0.01, 10), (4, 3, 64, 64), layout_at_edges=True),
    Job("resnet50", lambda: zoo.resnet50(0.01, 10), (2, 3, 64, 64), channels_last=True, layout_at_edges=True),
    Job("mobilenetv2", lambda: zoo.MobileNetV2(0.01, 10), (2, 3, 64, 64), layout_at_edges=True),
    Job("unet", lambda: zoo.UNet(8, 2), (2, 3, 32, 32), pixelwise=True),
    Job("unet_bilinear", lambda: zoo.UNet(8, 1, bilinear=True), (2, 3, 16, 16), pixelwise=True),
    Job("video", lambda: zoo.VideoNet(8), (2, 3, 8, 16, 16)),
]


def _loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), target)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: a unit dimension may carry any."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _assert_near(name: str, got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    """No further from float64 than eager is, with a margin for another order of summation."""
    assert got.shape == eager.shape and got.dtype == eager.dtype, name
    scale = truth.double().abs().max().clamp_min(1e-6)
    error = (got.double() - truth.double()).abs().max() / scale
    theirs = (eager.double() - truth.double()).abs().max() / scale
    assert error <= 8 * theirs + 1e-4, f"{name}: relative error {error:.2e}, eager's {theirs:.2e}"


def _assert_layout_changes_at_edges(graph: CompiledGraph) -> None:
    """Only the user's arguments and results are converted, each once at most: nothing in between, nothing that forward
    saves for backward."""
    (executable,) = graph.executables
    inside = [c for c in executable.layout_changes if c.argument is None and c.node != "output"]
    assert not inside, f"{graph.name}: {inside}"
    entering = Counter(change.argument for change in executable.layout_changes if change.argument is not None)
    assert all(count == 1 for count in entering.values()), f"{graph.name}: {entering}"
    saved = [name for name in entering if not name.startswith(("primals_", "tangents_", "arg"))]
    assert not saved, f"{graph.name}: {saved}"
    leaving = [change for change in executable.layout_changes if change.argument is None]
    # The models return logits and update vectors; only backward returns tensors that have another order outside.
    assert len(leaving) <= (len(executable.outputs) if graph.name == "backward" else 0), f"{graph.name}: {leaving}"


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_a_training_step_and_evaluation(job: Job) -> None:
    torch.manual_seed(7)
    graphs: list[CompiledGraph] = []
    eager = job.model()
    x = torch.randn(job.shape)
    if job.channels_last:
        eager = eager.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    target = (
        torch.randint(0, 2, (job.shape[0], *job.shape[2:])) if job.pixelwise else torch.randint(0, 10, job.shape[:1])
    )
    ours = copy.deepcopy(eager)
    truth = copy.deepcopy(eager).double()
    backend.observers.append(graphs.append)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(ours, backend="max", options={"fallback": "error"})
        losses = []
        for model, inputs in ((compiled, x), (eager, x), (truth, x.double())):
            torch.manual_seed(11)
            loss = _loss(model, inputs, target)
            loss.backward()
            losses.append(loss.detach())
        _assert_near("loss", *losses)
        reference, wide = _state(eager), _state(truth)
        for name, got in _state(ours).items():
            _assert_near(name, got, reference[name], wide[name])
            assert _strides(got) == _strides(reference[name]), name
        with torch.no_grad():
            for model in (ours, eager, truth):
                model.eval()
            _assert_near("evaluation", compiled(x), eager(x), truth(x.double()))
    finally:
        backend.observers.remove(graphs.append)
    assert [graph.name for graph in graphs] == ["forward", "backward", "inference"]
    assert all(len(graph.executables) == 1 for graph in graphs), "the graph was cut"
    if job.layout_at_edges:
        for graph in graphs:
            _assert_layout_changes_at_edges(graph)
