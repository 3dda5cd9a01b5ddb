"""The graphs of a training step, lowered and not compiled: for a CPU, or for a GPU that need not be there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torch_max_backend.ahead import TARGETS, trace_ahead
from torch_max_backend.backend import list_only, recorded_graphs
from torch_max_backend.graph.compiled import CompiledGraph

CPU = "cpu"
PLACES = (CPU, *TARGETS)
"""The targets that graphs can be made for."""


class WithLoss(nn.Module):
    """A model with its loss, cross entropy: its graphs are those of a training step, but for the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of images and labels."""
        return F.cross_entropy(self.model(x), y)


def step_graphs(model: nn.Module, *inputs: torch.Tensor, target: str) -> list[CompiledGraph]:
    """The forward and the backward graph: in float32 on a CPU, under bfloat16 autocast on a GPU.

    Args:
        model: it is not modified, and on a CPU it computes once.
        inputs: for a GPU only their shapes, strides and dtypes matter.
        target: one of ``PLACES``.
    """
    with recorded_graphs() as graphs:
        if target == CPU:
            torch.compiler.reset()
            torch.compile(model, backend=list_only)(*inputs)
        else:
            trace_ahead(list_only, model, inputs, {}, target=target, autocast=torch.bfloat16)
    return graphs
