"""Batch norms whose result and gradient sums are computed on the way: numbers on the CPU, and who computes what."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import SEED
from torch_max_backend import backend, explain
from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.graph.compiled import CompiledGraph

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu6": F.relu6, "hardswish": F.hardswish}


class Blocks(nn.Module):
    """Depthwise convolutions, each with a batch norm and an activation behind it, and a last one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False) for _ in range(4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False), nn.BatchNorm2d(16)])

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm, activation in zip(self.convolutions, self.norms, ACTIVATIONS.values(), strict=False):
            x = activation(norm(convolution(x)))
        return self.convolutions[-1](x)


class Gate(nn.Module):
    """A batch norm, and its activation scaled by what its means give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        return self.last(y * y.mean((2, 3), keepdim=True).sigmoid())


def drawn(channels: int = 16, size: int = 9) -> Tensor:
    return torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(SEED))


def trained(model: nn.Module, runner: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """The result, all gradients and the running statistics of one step."""
    x = x.clone().requires_grad_()
    y = runner(x)
    y.square().mean().backward()
    gradients = [each.grad for each in (x, *model.parameters()) if each.grad is not None]
    return [y.detach(), *gradients, *(each for each in model.buffers() if each.is_floating_point())]


@pytest.mark.parametrize(("make", "channels"), [(Blocks, 16), (Gate, 8)])
def test_a_step_is_as_near_to_float64_as_eager(make: Callable[[], nn.Module], channels: int) -> None:
    torch.manual_seed(SEED)
    torch.compiler.reset()
    model, x = make(), drawn(channels)
    exact, eager, own = copy.deepcopy(model).double(), copy.deepcopy(model), copy.deepcopy(model)
    wanted = trained(exact, exact, x.double())
    near = trained(eager, eager, x)
    got = trained(own, torch.compile(own, backend="max"), x)
    for mine, theirs, right in zip(got, near, wanted, strict=True):
        scale = right.abs().max().clamp_min(1e-6)
        allowed = 4 * (theirs - right).abs().max() / scale + 2e-6
        assert (mine - right).abs().max() / scale <= allowed


def built(model: nn.Module, x: Tensor) -> list[CompiledGraph]:
    torch.compiler.reset()
    with recorded_graphs() as graphs:
        torch.compile(copy.deepcopy(model), backend=build_only)(x).sum().backward()
    return graphs


def kept(graphs: list[CompiledGraph], size: int) -> int:
    """How many tensors of ``size`` elements the forward graph hands over, arguments and the model's result apart."""
    outputs = graphs[0].executables[0].built.outputs
    return sum(each.passthrough is None and each.bytes == 4 * size for each in outputs) - 1


def test_nothing_is_kept_between_a_convolution_and_the_next() -> None:
    """Of each block the convolution's result and the next one's operand, not what the batch norm made."""
    x = drawn()
    assert kept(built(Blocks(), x), x.numel()) == 6


def test_an_activation_that_is_no_operand_is_not_kept() -> None:
    """The first convolution's result, and the last one's operand; the activation before the gate is computed again."""
    x = drawn(8)
    graphs = built(Gate(), x)
    assert kept(graphs, 4 * 8 * 7 * 7) + 1 == 2


def test_gradient_sums_compute_the_gradient() -> None:
    report = explain(Blocks(), drawn(), quiet=True, compile=False)
    launches = report.graphs[-1].launches
    assert "batch_norm_gradient_sums" not in launches
    assert launches["reduction"] == 3


def test_a_gradient_that_is_a_convolutions_result_is_read_by_the_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    launches = explain(model, drawn(8), quiet=True, compile=False).graphs[-1].launches
    assert launches["batch_norm_gradient_sums"] == 1


def test_coarse_statistics_do_not_make_the_result() -> None:
    """On the CPU a bfloat16 batch norm hands out statistics in bfloat16: the result comes from finer ones."""
    model = nn.BatchNorm2d(8).bfloat16()
    x = drawn(8).bfloat16() * 0.01 + 10
    wanted = copy.deepcopy(model).float()(x.float())
    torch.compiler.reset()
    got = torch.compile(model, backend=backend.max_backend)(x.requires_grad_())
    assert (got.float() - wanted).abs().max() <= 0.05 * wanted.abs().max()
