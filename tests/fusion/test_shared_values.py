"""Values that several programs compute and that are stored because fewer bytes move then."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step_graphs import step_graphs
from torch_max_backend.launch_list.traffic import Kernel, traffic

BLOCKS = 6
MEGABYTES_16 = (4, 64, 128, 128)
"""A tensor of 16 MB in float32, of 8 MB in bfloat16."""


class Residuals(nn.Module):
    """Blocks that add a normalized convolution: each gradient of a residual is part of all sums before it."""

    def __init__(self, channels: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, channels, 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.norm = nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution in self.convolutions:
            x = x + self.norm(convolution(x))
        return x.square().mean()


def kernels(model: nn.Module, shape: tuple[int, ...], target: str) -> list[Kernel]:
    """Those of the backward graph."""
    x = torch.empty(shape, device="meta" if target != "cpu" else None).contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    _, backward = step_graphs(model, x, target=target)
    (executable,) = backward.executables
    return traffic(executable.built.typed).kernels


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "cpu"])
def test_no_launch_reads_all_gradients(target: str) -> None:
    """As many large tensors however many blocks there are: a sum, a gradient, and what is normalized."""
    found = kernels(Residuals(64), MEGABYTES_16, target)
    large = [sum(size > 2**22 for size in kernel.inputs.values()) for kernel in found]
    assert max(large) <= 4


def test_convolutions_store_the_sums() -> None:
    """On Hopper without a launch more: there are as many as where nothing is added."""

    class Chain(Residuals):
        def forward(self, x: Tensor) -> Tensor:
            for convolution in self.convolutions:
                x = self.norm(convolution(x))
            return x.square().mean()

    found = kernels(Residuals(64), MEGABYTES_16, "sm_90a")
    assert sum(kernel.entry == "conv_pointwise" for kernel in found) >= BLOCKS - 2
    assert len(found) <= len(kernels(Chain(64), MEGABYTES_16, "sm_90a")) + 2


def test_small_ones_are_computed_again() -> None:
    """Of tensors of some kilobytes a launch costs more than what is read."""
    found = kernels(Residuals(8), (1, 8, 16, 16), "sm_90a")
    assert max(len(kernel.inputs) for kernel in found) > BLOCKS


def test_results_are_eager_s() -> None:
    torch.manual_seed(0)
    model = Residuals(16, 4).to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 192, 192).contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.compiler.reset()
    wanted = torch.autograd.grad(model(x), [x, *model.parameters()])
    found = torch.autograd.grad(torch.compile(model, backend="max")(x), [x, *model.parameters()])
    for gradient, reference in zip(found, wanted, strict=True):
        # A convolution's bias before a normalization has no gradient but rounding.
        if reference.abs().max() > 1e-7:
            assert F.mse_loss(gradient, reference) < 1e-8 * reference.square().mean()


@pytest.mark.gpu
def test_a_step_on_a_gpu() -> None:
    """As far from float64 as eager's, and the same bits twice."""
    torch.manual_seed(0)
    model = Residuals(64, 4).to("cuda", memory_format=torch.channels_last)
    x = torch.randn(MEGABYTES_16, device="cuda").contiguous(memory_format=torch.channels_last)
    parameters = [each for name, each in model.named_parameters() if not name.endswith("bias") or "norm" in name]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="max")
    seen = []
    for run in (compiled, compiled, model):
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(x)
        seen.append(torch.autograd.grad(loss, parameters))
    exact = torch.autograd.grad(model.double()(x.double()), list(parameters))
    for mine, again, eager, true in zip(*seen, exact, strict=True):
        assert torch.equal(mine, again)
        assert (mine - true).norm() <= 1.5 * (eager - true).norm() + 1e-3 * true.norm()
