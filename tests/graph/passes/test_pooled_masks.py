"""A ReLU's gradient behind max pooling is masked before the pooling's gradient spreads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.decompositions.table import decompositions
from torch_max_backend.graph.passes.pool_offsets import keep_small_offsets
from torch_max_backend.graph.passes.pooled_masks import mask_before_pooling

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]

POOLINGS: dict[str, tuple[tuple[int, ...], Function]] = {
    "2x2": ((2, 3, 8, 8), lambda x: F.max_pool2d(x, 2)),
    "overlapping, padded": ((2, 3, 11, 13), lambda x: F.max_pool2d(x, 3, 2, 1)),
    "dilated, ceil": ((1, 2, 12, 9), lambda x: F.max_pool2d(x, (2, 3), (2, 1), (1, 1), (3, 2), ceil_mode=True)),
    "three axes": ((1, 2, 6, 7, 8), lambda x: F.max_pool3d(x, (2, 3, 3), 2, (1, 1, 0))),
}


def gradient(function: Function) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The function's result, and the gradient of a weighted sum of it."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = function(x)
        weights = (torch.arange(y.numel()) % 7 - 3).to(y.dtype).reshape(y.shape)
        return y.detach(), torch.autograd.grad(y, x, weights)[0]

    return step


def masks(graph: GraphModule) -> list[tuple[int, ...]]:
    """The shapes of all comparisons with 0."""
    return [tuple(n.meta["val"].shape) for n in graph.graph.find_nodes(op="call_function", target=aten.le.Scalar)]


def rewritten(function: Function, x: Tensor) -> GraphModule:
    traced = make_fx(gradient(function), decomposition_table=decompositions(), tracing_mode="fake")(x)
    graph = mask_before_pooling(keep_small_offsets(traced))
    graph.graph.lint()
    return graph


def checked(function: Function, x: Tensor) -> list[tuple[int, ...]]:
    """The masks behind the pass, which changes no bit of the results."""
    graph = rewritten(function, x)
    for got, expected in zip(graph(x), gradient(function)(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return masks(graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", POOLINGS)
def test_the_mask_is_as_small_as_the_result(kind: str, dtype: torch.dtype) -> None:
    shape, pool = POOLINGS[kind]
    # Whole numbers: many are equal, and some zeros negative.
    x = torch.randint(-3, 4, shape).to(dtype) * -1
    assert checked(lambda x: pool(x.relu()), x) == [tuple(pool(x).shape)]


def test_what_is_not_finite_stays() -> None:
    x = torch.randn(2, 3, 8, 8)
    x.view(-1)[torch.randperm(x.numel())[:40]] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]).repeat(10)
    assert checked(lambda x: F.max_pool2d(x.relu(), 2), x) == [(2, 3, 4, 4)]


def test_channels_last_stay() -> None:
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    pool: Function = lambda x: F.max_pool2d(x.relu(), 2)  # noqa: E731
    assert rewritten(pool, x)(x)[1].stride() == gradient(pool)(x)[1].stride()


def test_two_poolings_of_one_result_stay() -> None:
    """Each mask would have to be in front of the sum's own part."""
    x = torch.randn(2, 3, 8, 8)
    assert checked(lambda x: F.max_pool2d(x.relu(), 2) + F.max_pool2d(x.relu(), 2), x) == [(2, 3, 4, 4)] * 2

    def shared(x: Tensor) -> Tensor:
        y = x.relu()
        return F.max_pool2d(y, 2) + F.max_pool2d(y, 2) * 2

    assert checked(shared, x) == [(2, 3, 8, 8)]


def test_a_result_that_is_read_beside_the_pooling_stays() -> None:
    def beside(x: Tensor) -> Tensor:
        y = x.relu()
        return F.max_pool2d(y, 2) + F.avg_pool2d(y, 2)

    assert checked(beside, torch.randn(2, 3, 8, 8)) == [(2, 3, 8, 8)]


def test_a_mask_of_something_else_stays() -> None:
    """Of the pooling's argument before it was scaled."""
    assert checked(lambda x: F.max_pool2d(x.relu() * 2, 2), torch.randn(2, 3, 8, 8)) == [(2, 3, 8, 8)]


def test_a_pooling_that_keeps_its_indices_stays() -> None:
    """A window lies in padding alone: PyTorch's gradient of it is at a place that it does not have."""
    x = torch.randn(1, 2, 1, 6)
    assert masks(rewritten(lambda x: F.max_pool2d(x.relu(), 2, 1, 1, (2, 1)), x)) == [(1, 2, 1, 6)]


def test_nothing_of_the_activation_is_kept() -> None:
    """A convolution, a ReLU and a pooling keep the image, what comes out, and offsets."""
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(value: Tensor) -> Tensor:
        kept.append((value.dtype, tuple(value.shape)))
        return value

    def network(x: Tensor) -> Tensor:
        return F.max_pool2d(convolution(x).relu(), 2).square()

    compiled = torch.compile(network, backend="max")
    x = torch.randn(2, 3, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        compiled(x)
    assert all(shape[-1] <= 8 or shape == (2, 3, 16, 16) for _, shape in kept), kept
