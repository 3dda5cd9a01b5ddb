"""grid_sample through the backend against PyTorch in float64, with both gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.launched import launched_functions
from torch_max_backend import backend

aten = torch.ops.aten
KINDS = [
    (axes, mode, padding, corners)
    for axes, mode, padding, corners in itertools.product((2, 3), range(3), range(3), (False, True))
    if (axes, mode) != (3, 2)
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_all_modes_and_paddings(last: bool, device: str) -> None:
    """All in one graph; nothing is indexed."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def image(axes: int) -> torch.Tensor:
        x = torch.randn(2, 3, *(5, 4, 6)[:axes], device=device)
        return (x.contiguous(memory_format=formats[x.dim()]) if last else x).requires_grad_()

    images = [image(axes) for axes, *_ in KINDS]
    grids = [(torch.rand(2, *(3, 7, 2)[:axes], axes, device=device) * 4 - 2).requires_grad_() for axes, *_ in KINDS]

    def everything(images: list[torch.Tensor], grids: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.grid_sampler(x, grid, *options) for x, grid, (_, *options) in zip(images, grids, KINDS, strict=True)
        ]

    wide = [[each.detach().cpu().double().requires_grad_() for each in group] for group in (images, grids)]
    wanted = everything(*wide)
    weights = [torch.randn_like(y) for y in wanted]
    gradients = torch.autograd.grad(wanted, [*wide[0], *wide[1]], weights)
    torch._dynamo.reset()
    compiled = torch.compile(everything, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        results = compiled(images, grids)
        found = torch.autograd.grad(results, [*images, *grids], [each.to(device).float() for each in weights])
    for kind, y, result in zip(KINDS, wanted, results, strict=True):
        torch.testing.assert_close(result.cpu().double(), y, rtol=1e-4, atol=1e-4, msg=str(kind))
    for kind, gradient, result in zip(KINDS * 2, gradients, found, strict=True):
        torch.testing.assert_close(result.cpu().double(), gradient, rtol=1e-3, atol=1e-3, msg=str(kind))
    launched = {getattr(function, "entry", "") for function in launched_functions(graphs)}
    assert {"sample_fprop", "sample_dgrad_grid", "sample_dgrad_input"} <= launched
    assert not any("gather" in name or "scatter" in name for name in launched)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_grid_that_points_nowhere(device: str) -> None:
    """NaN and infinite numbers, and pixels that are infinite beside points outside."""
    x = torch.full((1, 2, 3, 4), float("inf"), device=device)
    grid = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.5], [0.0, -float("inf")], [9.0, 9.0]], device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, grid: torch.grid_sampler(x, grid, 0, 0, False), backend="max")
    leaves = x.requires_grad_(), grid.reshape(1, 2, 2, 2).requires_grad_()
    y = compiled(*leaves)
    assert torch.equal(y.detach().cpu(), torch.zeros(1, 2, 2, 2))
    for gradient in torch.autograd.grad(y, leaves, torch.full_like(y, float("inf"))):
        assert torch.equal(gradient.cpu(), torch.zeros(gradient.shape))


@pytest.mark.gpu
def test_the_same_bits_where_that_is_asked_for() -> None:
    x, grid = torch.randn(2, 8, 9, 9, device="cuda"), torch.rand(2, 64, 64, 2, device="cuda") * 2 - 1
    leaf = x.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: torch.grid_sampler(x, grid, 0, 0, False), backend="max")
        found = [torch.autograd.grad(compiled(leaf).square().sum(), leaf)[0] for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0], other) for other in found[1:])
