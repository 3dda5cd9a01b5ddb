"""Optimizers' steps, compiled: parameters and state after some steps equal eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

#: Each optimizer once for all tensors together and once for each alone. All of them step in one compiled function; it
#: is compiled twice, since the first step with momenta makes them.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd_single": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2, "foreach": True}),
    "adamw_single": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
}

Contender = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def stepped() -> dict[str, tuple[Contender, Contender]]:
    """By kind: our model and its optimizer, and eager's, after three steps."""
    torch.manual_seed(4)
    torch._dynamo.reset()
    pairs: dict[str, tuple[Contender, Contender]] = {}
    for kind, (make, settings) in KINDS.items():
        # Equal shapes share their kernels.
        models: list[nn.Module] = [nn.ModuleList(nn.Conv2d(2, 3, 3, bias=False) for _ in range(2))]
        models.append(copy.deepcopy(models[0]))
        pairs[kind] = tuple((model, make(model.parameters(), **settings)) for model in models)
    optimizers = [ours[1] for ours, _ in pairs.values()]

    def steps() -> None:
        for optimizer in optimizers:
            optimizer.step()

    compiled = torch.compile(steps, backend="max", options={"fallback": "error"})
    for _ in range(3):
        for ours, theirs in pairs.values():
            for parameter, twin in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
                parameter.grad = torch.randn_like(parameter)
                twin.grad = parameter.grad.clone()
            theirs[1].step()
        compiled()
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_equal_eager_ones(kind: str, stepped: dict[str, tuple[Contender, Contender]]) -> None:
    ours, theirs = stepped[kind]
    for mine, reference in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-6)
        states = [optimizer.state[p] for optimizer, p in ((ours[1], mine), (theirs[1], reference))]
        assert states[0].keys() == states[1].keys()
        for name, expected in states[1].items():
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(states[0][name], expected, rtol=2e-5, atol=2e-6)
