"""grid_sample through the backend against PyTorch in float64, with both gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("extents", [(5, 7), (3, 4, 2)])
@pytest.mark.parametrize("corners", [False, True])
def test_affine_grids_of_a_batch_that_grows(corners: bool, extents: tuple[int, ...]) -> None:
    """PyTorch's own gradient is not traced with symbolic sizes, whatever the backend."""

    def locate(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.affine_grid(theta, list(x.shape), align_corners=corners)

    torch._dynamo.reset()
    compiled = torch.compile(locate, backend="max", options={"fallback": "error"})
    for batch in (2, 3, 5):
        theta = torch.randn(batch, len(extents), len(extents) + 1, requires_grad=True)
        x = torch.empty(batch, 3, *extents)
        grid, wanted = compiled(theta, x), locate(theta, x)
        torch.testing.assert_close(grid, wanted)
        assert grid.stride() == wanted.stride()
        weights = torch.randn_like(grid)
        found, true = (torch.autograd.grad(each, theta, weights) for each in (grid, wanted))
        torch.testing.assert_close(found, true)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")
@pytest.mark.parametrize("autocast", [False, True])
def test_affine_grids_of_one_pixel(autocast: bool) -> None:
    """PyTorch's own decomposition and gradient raise for an axis of extent 1."""

    def locate(theta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = ((2, 8, 4, 1), (2, 8, 1, 1), (2, 8, 1, 3))
        return tuple(F.affine_grid(theta, size, align_corners=corners) for size in sizes for corners in (False, True))

    theta = torch.randn(2, 2, 3, requires_grad=True)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        grids, wanted = torch.compile(locate, backend="max")(theta), locate(theta)
    torch.testing.assert_close(grids, wanted)
    if autocast:
        # Eager PyTorch has no gradient here.
        return
    weights = [torch.randn_like(grid) for grid in grids]
    found, true = (torch.autograd.grad(each, theta, weights) for each in (grids, wanted))
    torch.testing.assert_close(found, true)
