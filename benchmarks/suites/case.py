"""A model of a suite with its inputs and its loss; all weights and data are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000
Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""What the model is called with, and what only the loss reads."""


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: as its suite calls it.
        build: makes it, in training mode, with random weights.
        draw: makes a batch of so many samples for it, in float32.
        loss: a scalar of the model's outputs and the batch's second part.
        batch: how many samples a GPU's step takes; PyTorch's dashboard takes as many or about as many.
        reference: the dtype of the results that others are compared with.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[nn.Module, int], Batch]
    loss: Callable[..., Tensor]
    batch: int
    reference: torch.dtype = torch.float64


def wide(tensor: Tensor) -> Tensor:
    """In float32 where it was narrower: losses are sums."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def classify(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [N, C]; of several outputs, those of the first."""
    return F.cross_entropy(wide(outputs if isinstance(outputs, Tensor) else outputs[0]), labels)


def labeled_images(side: int, classes: int = CLASSES) -> Callable[[nn.Module, int], Batch]:
    """Images [N, 3, side, side] with a class for each."""

    def draw(model: nn.Module, batch: int) -> Batch:
        return (torch.randn(batch, 3, side, side),), (torch.randint(0, classes, (batch,)),)

    return draw


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, with nothing dropped at random: results of two contenders can be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model
