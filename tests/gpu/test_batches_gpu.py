"""Programs over many tensors on a GPU: optimizers' steps and clipping beside eager PyTorch, in place, in few launches.

pytest -m gpu tests/gpu/test_batches_gpu.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torch_max_backend import backend

pytestmark = pytest.mark.gpu
SIZES = [1, 7, 1000, 1_000_003, 4096, *range(60, 130)]
"""More tensors than a launch holds, beside vectors, and of more elements than a block takes."""


def _drawn(dtype: torch.dtype) -> list[Tensor]:
    """Every third one begins at a vector."""
    rooms = [torch.randint(-3, 4, (size + 2,), device="cuda").to(dtype) for size in SIZES]
    return [room[number % 3 :][:size] for number, (room, size) in enumerate(zip(rooms, SIZES, strict=True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_of_all_sizes(dtype: torch.dtype) -> None:
    """Whole numbers, so that results are exact."""

    def steps(states: list[Tensor], gradients: list[Tensor], scale: Tensor) -> list[Tensor]:
        found = []
        for state, gradient in zip(states, gradients, strict=True):
            state.mul_(0.5).add_(gradient * scale)
            found.append((state - gradient).float())
        return [*found, *((gradient.float() ** 2).sum() for gradient in gradients)]

    ours, gradients, scale = _drawn(dtype), _drawn(dtype), torch.tensor(2.0, dtype=dtype, device="cuda")
    theirs = copy.deepcopy(ours)
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        compiled = torch.compile(steps, backend="max", options={"fallback": "error"})
        for _ in range(2):
            found, wanted = compiled(ours, gradients, scale), steps(theirs, gradients, scale)
    for own, expected in zip([*found, *ours], [*wanted, *theirs], strict=True):
        assert torch.equal(own, expected)
    listing = graphs[-1].executables[0].listing
    assert listing is not None
    assert len(listing.launches) <= 4
    assert len(listing.updates) == len(SIZES)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 1e-2, foreach=True, capturable=True),
        lambda p: torch.optim.AdamW(p, torch.tensor(1e-2, device="cuda"), capturable=True),
        lambda p: torch.optim.AdamW(p, 1e-2),
    ],
)
@pytest.mark.parametrize("clipped", [False, True])
def test_optimizers(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clipped: bool) -> None:
    """Three times, the same bits in two runs, and eager's numbers."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(size, device="cuda")) for size in SIZES]
    sides = [copy.deepcopy(first) for _ in range(3)]
    gradients = [[torch.randn_like(parameter) for parameter in first] for _ in range(3)]
    torch.compiler.reset()
    for number, parameters in enumerate(sides):
        optimizer = make(parameters)

        def step(parameters: list[nn.Parameter] = parameters, own: torch.optim.Optimizer = optimizer) -> None:
            if clipped:
                nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            own.step()

        run = step if number == 2 else torch.compile(step, backend="max")
        for drawn in gradients:
            for parameter, gradient in zip(parameters, drawn, strict=True):
                parameter.grad = gradient.clone()
            run()
    for one, other, wanted in zip(*sides, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
