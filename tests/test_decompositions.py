"""Decompositions of our own against PyTorch's kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from torch_max_backend import explain
from torch_max_backend.decompositions import (
    addbmm,
    diagonal_scatter,
    round_decimals,
    shrink_backward,
    weight_norm_backward,
)
from torch_max_backend.sampling_decompositions import grid_sampler, grid_sampler_backward

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward(dim: int) -> None:
    v, g = torch.randn(4, 3, 5), torch.rand([5 if axis == dim == 2 else 4 if axis == dim else 1 for axis in range(3)])
    weight, norms = aten._weight_norm_interface(v, g, dim)
    grad = torch.randn_like(weight)
    expected = aten._weight_norm_interface_backward(grad, v, g, norms, dim)
    for got, wanted in zip(weight_norm_backward(grad, v, g, norms, dim), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dims", [2, 3])
def test_grid_sampler(dims: int) -> None:
    """Every mode and padding, at points inside and outside, and on the image's very edge."""
    x = torch.randn(2, 3, *(5, 4, 1)[:dims], dtype=torch.float64)
    grid = torch.empty(2, *(4, 3, 6)[:dims], dims, dtype=torch.float64).uniform_(-2.5, 2.5)
    grid[:, 0] = torch.randint(-1, 2, grid[:, 0].shape).double()
    two = dims == 2
    forward = aten.grid_sampler_2d if two else aten.grid_sampler_3d
    backward = aten.grid_sampler_2d_backward if two else aten.grid_sampler_3d_backward
    for options in itertools.product(range(3 if two else 2), range(3), (False, True)):
        expected = forward(x, grid, *options)
        grad = torch.randn_like(expected)
        wanted = (expected, *backward(grad, x, grid, *options, [True, True]))
        got = (grid_sampler(x, grid, *options), *grid_sampler_backward(grad, x, grid, *options))
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, o=options: f"{o}: {text}")
            assert mine.stride() == theirs.stride()
        assert grid_sampler_backward(grad, x, grid, *options, [False, False]) == (None, None)


def test_grid_sampler_nowhere() -> None:
    """Points that are no numbers read nothing, and nobody's infinity but their own pixels'."""
    x = torch.full((1, 1, 3, 3), math.inf)
    grid = torch.tensor([[math.nan, 0.0], [0.0, math.inf], [-math.inf, math.nan], [-5.0, 0.0]]).view(1, 4, 1, 2)
    torch.testing.assert_close(grid_sampler(x, grid, 0, 0, False), torch.zeros(1, 1, 4, 1))
    grad_x, grad_grid = grid_sampler_backward(torch.full((1, 1, 4, 1), math.inf), x, grid, 0, 0, False)
    torch.testing.assert_close(grad_x, torch.zeros_like(x))
    torch.testing.assert_close(grad_grid, torch.zeros_like(grid))


@pytest.mark.parametrize(
    ("shape", "offset", "dims"),
    [((4, 5), 0, (0, 1)), ((4, 5), -2, (0, 1)), ((5, 4), 3, (1, 0)), ((2, 4, 3, 5), 1, (-1, 1))],
)
def test_diagonal_scatter_is_pytorchs(shape: tuple[int, ...], offset: int, dims: tuple[int, int]) -> None:
    """PyTorch's own decomposition writes in place, which a functional graph may not."""
    x = torch.randn(shape)
    source = torch.randn_like(x.diagonal(offset, *dims))
    ours = diagonal_scatter(x, source, offset, *dims)
    torch.testing.assert_close(ours, torch.diagonal_scatter(x, source, offset, *dims), rtol=0, atol=0)


def test_the_gradient_of_a_diagonal_is_lowered() -> None:
    account = explain(
        lambda x: x.diagonal(1).square(), torch.randn(4, 5, requires_grad=True), quiet=True, compile=False
    )
    assert [graph.name for graph in account.graphs] == ["forward", "backward"] and not account.fallback_count


def test_small_ones_are_pytorchs() -> None:
    x, a, b = torch.randn(3, 5), torch.randn(4, 3, 2), torch.randn(4, 2, 5)
    torch.testing.assert_close(addbmm(x, a, b, beta=2, alpha=3), torch.addbmm(x, a, b, beta=2, alpha=3))
    for decimals in (-1, 0, 2):
        torch.testing.assert_close(round_decimals(50 * x, decimals=decimals), torch.round(50 * x, decimals=decimals))
    for op in (aten.hardshrink_backward, aten.softshrink_backward):
        torch.testing.assert_close(shrink_backward(x * 2, x, 0.5), op(x * 2, x, 0.5))
