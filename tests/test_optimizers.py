"""Optimizers' steps, compiled: parameters and state after some steps equal eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

#: Each optimizer once for all tensors together and once for each alone; a kind takes a compilation of its own, the one
#: with momenta two, since its first step makes them.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd_single": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2, "foreach": True}),
    "adamw_single": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_equal_eager_ones(kind: str) -> None:
    torch.manual_seed(4)
    torch._dynamo.reset()
    ours = nn.Conv2d(2, 3, 3)
    theirs = copy.deepcopy(ours)
    make, settings = KINDS[kind]
    optimizers = [make(model.parameters(), **settings) for model in (ours, theirs)]
    step = torch.compile(optimizers[0].step, backend="max", options={"fallback": "error"})
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in ours.parameters()]
        for model in (ours, theirs):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
        step()
        optimizers[1].step()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-6)
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (mine, reference), strict=True)]
        assert states[0].keys() == states[1].keys()
        for name, expected in states[1].items():
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(states[0][name], expected, rtol=2e-5, atol=2e-6)
