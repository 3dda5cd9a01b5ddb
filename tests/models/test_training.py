"""Whole models, one training step and evaluation: loss, gradients and buffers against eager PyTorch.

Models are compiled side by side, a group in one graph: MAX charges each compilation a third of a minute before it has
seen a kernel, and models share kernels. Selecting one (``-k resnet18``) compiles that one alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import zoo
from tests.harness import ALL_CASES
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph


@dataclass(frozen=True)
class Job:
    """A model, its input's shape, and what its output is compared with.

    ``layout_at_edges``: no computed tensor changes its memory order inside a graph. ``evaluated``: it is compiled in
    evaluation too, which is left out by default where all layers compute as in training or another model has them.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pixelwise: bool = False
    channels_last: bool = False
    layout_at_edges: bool = False
    evaluated: bool = True

    @property
    def memory_format(self) -> torch.memory_format:
        if not self.channels_last:
            return torch.contiguous_format
        return torch.channels_last_3d if len(self.shape) == 5 else torch.channels_last

    @property
    def group(self) -> str:
        return "layout_at_edges" if self.layout_at_edges else "others"


#: A stage's first block changes the shape, and those behind it have a residual that does not: one of these is enough
#: where each costs seconds of compiling.
RESNET50, MOBILENETV2 = ({}, {}) if ALL_CASES else ({"blocks": (2, 1, 1, 1)}, {"blocks": (1, 2, 1, 1, 1, 1, 1)})
#: Sizes are small and alike, so that models share kernels; batches are large enough for the statistics of 1x1 planes,
#: which half of ResNet-50's stages have for the smallest images.
SIDE = 16 if ALL_CASES else 8
JOBS = [
    Job("mlp", zoo.Mlp, (8, 1, 8, 8), evaluated=ALL_CASES),
    Job("lenet", zoo.LeNet, (4, 1, 32, 32), channels_last=True, evaluated=ALL_CASES),
    Job("vgg11", lambda: zoo.vgg11(0.01, 10, head=16), (4, 3, 32, 32)),
    Job("unet", lambda: zoo.UNet(8, 2 if ALL_CASES else 1), (4, 3, 16, 16), pixelwise=True, channels_last=True),
    Job("video", lambda: zoo.VideoNet(8), (2, 3, 8, 16, 16), channels_last=True),
    Job("resnet18", lambda: zoo.resnet18(0.01, 10), (16, 3, 16, 16), layout_at_edges=True),
    Job(
        "resnet50",
        lambda: zoo.resnet50(0.01, 10, **RESNET50),
        (16, 3, SIDE, SIDE),
        channels_last=True,
        layout_at_edges=True,
        evaluated=ALL_CASES,
    ),
    Job("mobilenetv2", lambda: zoo.MobileNetV2(0.01, 10, **MOBILENETV2), (16, 3, 16, 16), layout_at_edges=True),
]
if ALL_CASES:
    # New in it is the upsampling alone, of which test_indexing.py has the gradient.
    JOBS.append(Job("unet_bilinear", lambda: zoo.UNet(8, 1, bilinear=True), (2, 3, 16, 16), pixelwise=True))


class SideBySide(nn.Module):
    """Models by name, each with its own input and output: all in training, and copies of some in evaluation."""

    def __init__(self, models: dict[str, nn.Module], evaluated: Sequence[str]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models).train()
        self.settled = nn.ModuleDict({name: copy.deepcopy(models[name]) for name in evaluated}).eval()
        for name, buffer in self.settled.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        outputs = {name: model(inputs[name]) for name, model in self.models.items()}
        with torch.no_grad():
            evaluated = {name: model(inputs[name]) for name, model in self.settled.items()}
        return outputs, evaluated


@dataclass
class Side:
    """The models of one contender after a step: our own, eager's, or float64's."""

    models: nn.ModuleDict
    losses: dict[str, torch.Tensor]
    evaluated: dict[str, torch.Tensor]


@dataclass
class Trained:
    """A group after its step, by three contenders, and the graphs that were compiled."""

    ours: Side
    eager: Side
    truth: Side
    graphs: list[CompiledGraph]


def _step(
    model: SideBySide,
    run: Callable[[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]],
    inputs: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
) -> Side:
    """A training step and an evaluation by one contender."""
    torch.manual_seed(11)
    outputs, evaluated = run(inputs)
    losses = {name: F.cross_entropy(output, targets[name]) for name, output in outputs.items()}
    torch.stack(list(losses.values())).sum().backward()
    assert not any(output.requires_grad for output in evaluated.values())
    return Side(model.models, {name: loss.detach() for name, loss in losses.items()}, evaluated)


def _train(jobs: list[Job]) -> Trained:
    torch.manual_seed(7)
    models: dict[str, nn.Module] = {}
    inputs: dict[str, torch.Tensor] = {}
    targets: dict[str, torch.Tensor] = {}
    for job in jobs:
        order = job.memory_format
        models[job.name] = job.model().to(memory_format=order)
        inputs[job.name] = torch.randn(job.shape).contiguous(memory_format=order)
        shape = (job.shape[0], *job.shape[2:]) if job.pixelwise else job.shape[:1]
        targets[job.name] = torch.randint(0, 2 if job.pixelwise else 10, shape)
    eager = SideBySide(models, [job.name for job in jobs if job.evaluated])
    ours, truth = copy.deepcopy(eager), copy.deepcopy(eager).double()
    wide = {name: x.double() for name, x in inputs.items()}
    torch._dynamo.reset()
    with backend.recorded_graphs() as graphs:
        compiled = torch.compile(ours, backend="max", options={"fallback": "error"})
        sides = [
            _step(model, run, x, targets)
            for model, run, x in ((ours, compiled, inputs), (eager, eager, inputs), (truth, truth, wide))
        ]
    return Trained(*sides, graphs)


_groups: dict[str, Trained] = {}


@pytest.fixture
def trained(request: pytest.FixtureRequest, job: Job) -> Trained:
    """The job's group, of which only selected models are compiled."""
    if job.group not in _groups:
        selected = {item.callspec.params.get("job") for item in request.session.items if hasattr(item, "callspec")}
        _groups[job.group] = _train([other for other in JOBS if other.group == job.group and other in selected])
    return _groups[job.group]


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def _least(state: dict[str, torch.Tensor], entry: str) -> float:
    """A thousandth of the model's largest gradient, or buffer. Some are nothing but rounding: the mean of what a
    convolution makes of normalized channels, the gradient of a factor that the next normalization takes out again."""
    kind = entry.partition(" ")[0]
    return 1e-3 * max(float(t.double().abs().max()) for name, t in state.items() if name.startswith(kind))


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: a unit dimension may carry any."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _assert_near(name: str, got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, least: float = 1e-6) -> None:
    """No further from float64 than eager is, with a margin for another order of summation; relative to ``least`` where
    all is smaller."""
    assert got.shape == eager.shape and got.dtype == eager.dtype, name
    scale = truth.double().abs().max().clamp_min(least)
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
    assert len(leaving) <= (len(executable.built.outputs) if graph.name == "backward" else 0), (
        f"{graph.name}: {leaving}"
    )


@pytest.mark.parametrize("job", JOBS, ids=[f"{job.group}-{job.name}" for job in JOBS])
def test_a_training_step_and_evaluation(job: Job, trained: Trained) -> None:
    ours, eager, truth = trained.ours, trained.eager, trained.truth
    name = job.name
    _assert_near("loss", ours.losses[name], eager.losses[name], truth.losses[name])
    states = [_state(side.models[name]) for side in (ours, eager, truth)]
    assert states[0].keys() == states[1].keys() and any(entry.startswith("grad ") for entry in states[0])
    for entry, got in states[0].items():
        _assert_near(entry, got, states[1][entry], states[2][entry], _least(states[2], entry))
        assert _strides(got) == _strides(states[1][entry]), entry
    if job.evaluated:
        _assert_near("evaluation", ours.evaluated[name], eager.evaluated[name], truth.evaluated[name])
    assert [graph.name for graph in trained.graphs] == ["forward", "backward"]
    assert all(len(graph.executables) == 1 for graph in trained.graphs), "the graph was cut"
    if job.layout_at_edges:
        for graph in trained.graphs:
            _assert_layout_changes_at_edges(graph)
