"""Models of many kinds train for fifty steps, each curve beside eager PyTorch's.

They stand side by side in one graph, so that one library holds what they need. Selecting one (``-k swin``) compiles
that one alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.harness import ALL_CASES
from tests.models.kinds import KINDS, Batch
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph

STEPS = 50
#: Every kind has programs of its own to compile. The others train with ``TORCH_MAX_BACKEND_CASES=all``.
BY_DEFAULT = ("efficientnet", "volumes", "swin", "gpt", "bert", "detection", "diffusion", "gan")
#: Where a rounding error grows within fifty steps as the loss itself does. Each of their steps begins where ours began.
CHAOTIC = frozenset({"spatial_transformer"})

#: Two players whose loss need not fall.
ADVERSARIAL = frozenset({"gan"})


class SideBySide(nn.Module):
    """Models by name; the losses of a batch for each."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.models = nn.ModuleDict({name: KINDS[name]() for name in names})

    def forward(self, batches: dict[str, Batch]) -> dict[str, Tensor]:
        return {name: task(batches[name]) for name, task in self.models.items()}


@dataclass
class Curves:
    """Losses by name and step, and the graphs that were compiled."""

    ours: dict[str, list[float]]
    eager: dict[str, list[float]]
    models: tuple[SideBySide, SideBySide]
    graphs: list[CompiledGraph]


@pytest.fixture(scope="module")
def curves(request: pytest.FixtureRequest) -> Curves:
    """The selected kinds' curves."""
    selected = {item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in KINDS if name in selected]
    torch.manual_seed(5)
    ours = SideBySide(names).train()
    theirs = copy.deepcopy(ours)
    torch._dynamo.reset()
    # Eager's operators are too small to be worth two threads, which turn while they wait.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with backend.recorded_graphs() as graphs:
            return _train(ours, theirs, names, graphs)
    finally:
        torch.set_num_threads(threads)


def _train(ours: SideBySide, theirs: SideBySide, names: list[str], graphs: list[CompiledGraph]) -> Curves:
    call = torch.compile(ours, backend="max", options={"fallback": "error"})
    found = Curves({name: [] for name in names}, {name: [] for name in names}, (ours, theirs), graphs)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.5) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(3)
    kept = [{name: theirs.models[name].example(generator) for name in names} for _ in range(5)]
    for step in range(STEPS):
        batches = kept[step % len(kept)]
        for name in CHAOTIC.intersection(names):
            theirs.models[name].load_state_dict(ours.models[name].state_dict())
        for run, optimizer, curve in zip((call, theirs), optimizers, (found.ours, found.eager), strict=True):
            torch.manual_seed(step)
            losses = run(batches)
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            optimizer.step()
            for name, value in losses.items():
                curve[name].append(float(value.detach()))
    return found


@pytest.mark.parametrize("kind", KINDS if ALL_CASES else BY_DEFAULT)
def test_fifty_steps(kind: str, curves: Curves) -> None:
    ours, eager = torch.tensor(curves.ours[kind]), torch.tensor(curves.eager[kind])
    assert len(ours) == STEPS and torch.isfinite(ours).all()
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
    assert kind in ADVERSARIAL or ours[-10:].mean() < ours[:10].mean(), "nothing was learned"
    states = [model.models[kind].state_dict() for model in curves.models]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert [graph.name for graph in curves.graphs] == ["forward", "backward"]
    assert all(len(graph.executables) == 1 for graph in curves.graphs), "the graph was cut"
    assert all(each.runner is not None for graph in curves.graphs for each in graph.executables)
