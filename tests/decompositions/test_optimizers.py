"""Optimizers' steps, compiled: parameters and state after some steps equal eager's."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """Chen et al. (2023), Symbolic discovery of optimization algorithms: written as users write theirs, in a loop."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter by the sign of an average of gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average, gradient = state["average"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_((average * 0.9 + gradient * 0.1).sign_(), alpha=-group["lr"])
                average.mul_(0.99).add_(gradient, alpha=0.01)


#: Each optimizer once for all tensors together and once for each alone. All of them step in one compiled function; it
#: is compiled twice, since the first step with momenta makes them.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd_single": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2, "foreach": True}),
    # A rate that is a tensor is read in each step; a schedule that changes a number compiles anew.
    "adamw_single": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
    "adamw_clipped": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "lion": (Lion, {"lr": 1e-2}),
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
    clipped = [side[0] for side in pairs["adamw_clipped"]]

    def steps() -> None:
        nn.utils.clip_grad_norm_(clipped[0].parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()

    compiled = torch.compile(steps, backend="max", options={"fallback": "error"})
    for _ in range(3):
        for ours, theirs in pairs.values():
            for parameter, twin in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
                parameter.grad = torch.randn_like(parameter)
                twin.grad = parameter.grad.clone()
            if theirs[0] is clipped[1]:
                nn.utils.clip_grad_norm_(clipped[1].parameters(), 0.5)
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
