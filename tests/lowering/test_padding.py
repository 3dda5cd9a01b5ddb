"""Mirrored and repeated borders through the backend against PyTorch, and their gradients against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from tests.launched import launched_functions
from torch_max_backend import backend, explain_ahead

#: By device; on a GPU float64 stays in PyTorch.
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}


def drawn(chance: random.Random, mode: str, device: str) -> tuple[torch.Tensor, list[int]]:
    """A tensor for the device, contiguous or channels-last, and borders from the last dimension to the first."""
    rank = chance.randint(1, 3)
    shape = [chance.randint(1, 3), chance.choice((1, 3, 8, 16)), *(chance.randint(2, 9) for _ in range(rank))]
    if chance.random() < 0.3:
        del shape[0]
    borders: list[int] = []
    for size in reversed(shape[-rank:]):
        most = size - 1 if mode == "reflect" else size + 3
        borders += [chance.randint(0 if mode == "reflect" else -1, most) for _ in range(2)]
    x = torch.randn(shape).to(chance.choice(DTYPES[device]))
    if chance.random() < 0.5 and len(shape) - rank == 2 and len(shape) in (4, 5):
        x = x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)])
    return x, borders


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_random_problems(mode: str, device: str) -> None:
    chance = random.Random(mode)
    for number in range(4):
        torch.manual_seed(number)
        x, borders = drawn(chance, mode, device)
        x = x.to(device)
        dy = torch.randn_like(F.pad(x, borders, mode=mode))

        def gradient(x: torch.Tensor, dy: torch.Tensor, borders: list[int] = borders) -> torch.Tensor:
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(F.pad(leaf, borders, mode=mode), leaf, dy)[0]

        torch._dynamo.reset()
        leaf = x.clone().requires_grad_()
        with backend.recorded_graphs() as graphs:
            compiled = torch.compile(
                lambda x, borders=borders: F.pad(x, borders, mode=mode), backend="max", options={"fallback": "error"}
            )
            y = compiled(leaf)
            y.backward(dy)
        launched = [getattr(function, "entry", "") for function in launched_functions(graphs)]
        assert "border_fprop" in launched and "border_dgrad" in launched, (x.shape, borders)
        assert torch.equal(y, F.pad(x, borders, mode=mode)), (x.shape, borders)
        wanted = gradient(x.double(), dy.double())
        eps = torch.finfo(x.dtype).eps
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), wanted, rtol=2 * eps, atol=30 * torch.finfo(torch.float32).eps)


class Pads(torch.nn.Module):
    """Pads each of its arguments."""

    def __init__(self, borders: list[list[int]], mode: str) -> None:
        super().__init__()
        self.borders, self.mode = borders, mode

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [F.pad(x, borders, mode=self.mode) for x, borders in zip(inputs, self.borders, strict=True)]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_random_problems_are_lowered_for_a_gpu(mode: str) -> None:
    chance = random.Random(mode)
    problems = [drawn(chance, mode, "cuda") for _ in range(12)]
    inputs = [x.requires_grad_() for x, _ in problems]
    account = explain_ahead(Pads([borders for _, borders in problems], mode), *inputs, target="sm_90a", quiet=True)
    forward, backward = account.graphs
    assert not account.fallback_count
    assert forward.launches["border_fprop"] == backward.launches["border_dgrad"] == len(problems)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_whole_numbers(mode: str) -> None:
    """As PyTorch's decomposition has it."""
    torch._dynamo.reset()
    x = torch.randint(0, 9, (1, 2, 4, 5))
    compiled = torch.compile(lambda x: F.pad(x, (1, 2, 3, 0), mode=mode), backend="max")
    assert torch.equal(compiled(x), F.pad(x, (1, 2, 3, 0), mode=mode))
