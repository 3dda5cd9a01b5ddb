"""Which weight gradients are computed together with the bias gradient, for Hopper; nothing is compiled."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.ahead import compile_ahead
from torch_max_backend.mojo_ops.convolution import WGRAD_BIAS
from torch_max_backend.runtime.building import libraries

Counts = tuple[int, int, int]


def counts(model: nn.Module, *shape: int, autocast: torch.dtype | None = torch.bfloat16) -> Counts:
    """The numbers of weight gradients with a bias gradient, of others, and of reductions in a training step."""
    torch.compiler.reset()
    x = torch.empty(shape, device="meta", requires_grad=True)
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(model, x, target="sm_90a", autocast=autocast)
    entries = [each.entry for each in launched_functions(graphs)]
    return entries.count(WGRAD_BIAS), entries.count("conv_wgrad"), entries.count("reduction")


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(64, 96), (8, 49, 64)),
        (nn.Conv2d(16, 32, 3, stride=2, padding=1), (4, 16, 12, 12)),
        (nn.Conv1d(16, 24, 5), (4, 16, 40)),
        (nn.Conv2d(16, 20, 3), (4, 16, 12, 12)),
        (nn.Conv2d(3, 32, 3), (4, 3, 12, 12)),
    ],
    ids=["linear", "convolution", "one axis", "20 filters, filled up", "3 channels"],
)
def test_one_launch_computes_both(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert counts(model, *shape) == (1, 0, 0)


class Standardized(nn.Conv2d):
    """A convolution whose filters are standardized first."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


def test_sums_of_the_filters_gradient_do_not_count() -> None:
    """They read what the launch makes."""
    together, alone, _ = counts(Standardized(16, 32, 3), 4, 16, 12, 12)
    assert (together, alone) == (1, 0)


def test_each_layer_of_a_network() -> None:
    layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    assert counts(layers, 8, 49, 64) == (2, 0, 0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(64, 64, 3, groups=2), (4, 64, 12, 12)),
        (nn.Conv3d(64, 64, 3), (2, 64, 6, 6, 6)),
        (nn.ConvTranspose2d(16, 32, 2, stride=2), (4, 16, 12, 12)),
    ],
    ids=["groups", "three axes", "transposed"],
)
def test_others_stay_apart(model: nn.Module, shape: tuple[int, ...]) -> None:
    """What the kernel does not read as it lies, and a transposed convolution, whose bias adds up the larger tensor."""
    both, alone, sums = counts(model, *shape)
    assert (both, alone) == (0, 1) and sums >= 1


def test_float32_stays_apart() -> None:
    assert counts(nn.Linear(64, 96), 8, 49, 64, autocast=None)[0] == 0
