"""Decompositions of our own against PyTorch's kernels."""

from __future__ import annotations

import math

import pytest
import torch

from torch_max_backend import explain
from torch_max_backend.decompositions.selection import (
    bucketize,
    masked_scatter,
    masked_scatter_backward,
    scatter_reduce,
    searchsorted,
)
from torch_max_backend.decompositions.table import (
    addbmm,
    cdist_backward,
    cdist_forward,
    diagonal_scatter,
    normal,
    round_decimals,
    shrink_backward,
    trilinear,
    weight_norm_backward,
)

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward(dim: int) -> None:
    v, g = torch.randn(4, 3, 5), torch.rand([5 if axis == dim == 2 else 4 if axis == dim else 1 for axis in range(3)])
    weight, norms = aten._weight_norm_interface(v, g, dim)
    grad = torch.randn_like(weight)
    expected = aten._weight_norm_interface_backward(grad, v, g, norms, dim)
    for got, wanted in zip(weight_norm_backward(grad, v, g, norms, dim), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("shape", "offset", "dims"),
    [((4, 5), 0, (0, 1)), ((4, 5), -2, (0, 1)), ((5, 4), 3, (1, 0)), ((2, 4, 3, 5), 1, (-1, 1))],
)
def test_diagonal_scatter_is_pytorchs(shape: tuple[int, ...], offset: int, dims: tuple[int, int]) -> None:
    """PyTorch's own decomposition writes in place, which a functional graph may not."""
    for x in torch.randn(shape), torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))):
        source = torch.randn_like(x.diagonal(offset, *dims))
        ours, expected = diagonal_scatter(x, source, offset, *dims), torch.diagonal_scatter(x, source, offset, *dims)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        assert ours.stride() == expected.stride()


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


@pytest.mark.parametrize("expanded", [False, True])
def test_masked_scatter(expanded: bool) -> None:
    """Elements, and whole rows where the mask of rows was expanded; the source has more than are taken."""
    x, source = torch.randn(2, 5, 4), torch.randn(9, 4)
    mask = torch.rand(2, 5, 1).lt(0.5).expand_as(x) if expanded else torch.rand(2, 5, 4) < 0.5
    torch.testing.assert_close(masked_scatter(x, mask, source), x.masked_scatter(mask, source), rtol=0, atol=0)
    grad = torch.randn_like(x)
    expected = aten.masked_scatter_backward(grad, mask, source.shape)
    torch.testing.assert_close(masked_scatter_backward(grad, mask, source.shape), expected, rtol=0, atol=0)


@pytest.mark.parametrize("right", [False, True])
def test_searches_in_sorted_numbers(right: bool) -> None:
    """Numbers between, equal to and beyond the boundaries, and NaN."""
    row = torch.tensor([-1.0, 0.0, 0.0, 2.0])
    x = torch.tensor([[-5.0, -1.0, 0.0], [1.0, 2.0, math.nan]])
    assert torch.equal(bucketize(x, row, right=right), torch.bucketize(x, row, right=right))
    rows = torch.stack([row, row + 1])
    assert torch.equal(searchsorted(rows, x, right=right), torch.searchsorted(rows, x, right=right))
    order = torch.tensor([3, 1, 0, 2])
    mixed = torch.empty(4).scatter(0, order, row)
    got = searchsorted(mixed, x, right=right, sorter=order, out_int32=True)
    assert torch.equal(got, torch.searchsorted(mixed, x, right=right, sorter=order, out_int32=True))
    assert bucketize(x, torch.zeros(5000)) is NotImplemented


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("include", [False, True])
def test_scatter_reduce(reduce: str, include: bool) -> None:
    x, src, index = torch.randn(4, 3), torch.randn(6, 3), torch.randint(0, 4, (5, 3))
    expected = aten.scatter_reduce(x, 0, index, src, reduce, include_self=include)
    torch.testing.assert_close(scatter_reduce(x, 0, index, src, reduce, include_self=include), expected)
    assert scatter_reduce(x, 0, index, src, "amax") is NotImplemented


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_cdist(p: float) -> None:
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    y[:, 1] = x[:, 2]
    expected = aten._cdist_forward(x, y, p, 2)
    torch.testing.assert_close(cdist_forward(x, y, p, 2), expected)
    grad = torch.randn_like(expected)
    wanted = aten._cdist_backward(grad, x, y, p, expected) if p else torch.zeros_like(x)
    torch.testing.assert_close(cdist_backward(grad, x, y, p, expected), wanted)


def test_trilinear() -> None:
    """As ``nn.Bilinear`` calls it."""
    x, weight, y = torch.randn(6, 4), torch.randn(2, 4, 5), torch.randn(6, 5)
    places = [1, 3], [0], [1, 2], [2, 3]
    torch.testing.assert_close(trilinear(x, weight, y, *places), aten._trilinear(x, weight, y, *places))


def test_masked_scatter_of_too_few_elements_raises() -> None:
    """As an index outside its dimension."""
    run = torch.compile(torch.masked_scatter, backend="max", options={"fallback": "error"})
    x, source = torch.zeros(8), torch.arange(3.0) + 1
    torch.testing.assert_close(run(x, torch.arange(8) > 4, source), torch.tensor([0.0, 0, 0, 0, 0, 1, 2, 3]))
    with pytest.raises(RuntimeError, match="index out of range: 3 in a dimension of 3"):
        run(x, torch.arange(8) > 3, source)


def test_normal_draws_what_eager_draws() -> None:
    mean, std = torch.randn(4, 1), torch.rand(5)
    for arguments in ((mean, std), (mean, 0.5), (2.0, std)):
        torch.manual_seed(3)
        expected = torch.normal(*arguments)
        torch.manual_seed(3)
        torch.testing.assert_close(normal(*arguments), expected)


def test_images_among_tokens_are_lowered() -> None:
    """How vision-language models put an image's features where the text has places for them, and a position table of
    another size."""

    def mixed(tokens: torch.Tensor, features: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = (tokens[..., :1] > 0).expand_as(tokens)
        sized = torch.nn.functional.interpolate(table, (2, 3), mode="bicubic", antialias=True)
        return tokens.masked_scatter(mask, features) * sized.mean()

    arguments = [torch.randn(shape, requires_grad=True) for shape in ((2, 5, 4), (10, 4), (1, 4, 6, 6))]
    account = explain(mixed, *arguments, quiet=True, compile=False)
    assert [graph.name for graph in account.graphs] == ["forward", "backward"] and not account.fallback_count
