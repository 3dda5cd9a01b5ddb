"""Tensors are added before they are cut up, where their slices would be added one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.graph.passes.slice_sums import add_before_slicing

aten = torch.ops.aten

Function = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def dense(layers: int, dim: int, first: int = 0) -> Function:
    """Gradients of a dense block's parts, of two elements each: what each of so many layers asks for, the last one
    first, and every part's sum times a number of its own. A layer's parts begin at element ``first``."""

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        sums: list[Tensor] = []
        results: list[Tensor] = []
        for layer in range(layers, 0, -1):
            whole = aten.slice.Tensor(torch.sin(x * layer), dim, 0, first + 2 * layer)
            own = [aten.slice.Tensor(whole, dim, first + 2 * n, first + 2 * n + 2) for n in range(layer)]
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
            results.append(sums.pop() * layer)
        return tuple(results)

    return gradients


def added(graph: GraphModule) -> list[tuple[int, ...]]:
    """The shapes of all sums, in their order."""
    nodes = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return [tuple(node.meta["val"].shape) for node in nodes]


def traced(function: Function, x: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(x)


def checked(function: Function, x: Tensor) -> list[tuple[int, ...]]:
    """The sums of a function's graph behind the pass, which changes no bit of the results."""
    graph = add_before_slicing(traced(function, x))
    graph.graph.lint()
    torch.testing.assert_close(graph(x), function(x), rtol=0, atol=0)
    return added(graph)


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_dense_block_has_one_sum_for_each_layer(dim: int, first: int) -> None:
    x = torch.randn(3, 12) if dim == 1 else torch.randn(2, 3, 12)
    function = dense(5, dim, first)
    # Five parts: four sums behind the fifth layer, three behind the fourth, ...
    assert len(added(traced(function, x))) == 4 + 3 + 2 + 1
    # The last three sums are two that are not added again, and one.
    assert [shape[-1] for shape in checked(function, x)] == [8, 6, 2, 2, 2]


def test_channels_last_stay() -> None:
    x = torch.randn(2, 12, 3, 3).to(memory_format=torch.channels_last)
    assert checked(dense(4, 1), x)[0] == (2, 6, 3, 3)
    graph = add_before_slicing(traced(dense(4, 1), x))
    total = next(iter(graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)))
    assert total.meta["val"].is_contiguous(memory_format=torch.channels_last)


def pieces(first: Tensor, second: Tensor, starts: tuple[int, ...], distance: int = 0) -> list[Tensor]:
    """Sums of two elements of one tensor and two of another, so many further."""
    pairs = [(aten.slice.Tensor(first, 1, n, n + 2), n + distance) for n in starts]
    return [part + aten.slice.Tensor(second, 1, m, m + 2) for part, m in pairs]


def again(sums: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple((each + n) * 2 for n, each in enumerate(sums))


@pytest.mark.parametrize(
    ("function", "sums"),
    [
        pytest.param(lambda x: again(pieces(x, x * 2, (0, 2, 4))), 1 + 3, id="neighbours"),
        pytest.param(lambda x: again(pieces(x, x * 2, (4, 0, 2))), 1 + 3, id="in any order"),
        pytest.param(lambda x: again(pieces(x, x * 2, (0, 2, 4), distance=3)), 1 + 3, id="at a distance"),
        pytest.param(lambda x: again(pieces(x, x * 2, (0, 2, 6, 8))), 2 + 4, id="two runs"),
        pytest.param(lambda x: again(pieces(x, x * 2, (0, 4, 8))), 3 + 3, id="gaps"),
        pytest.param(lambda x: again(pieces(x, x * 2, (0, 1, 2))), 2 + 3, id="overlaps"),
        pytest.param(
            lambda x: again([x[:, n:n] + aten.slice.Tensor(x * 2, 1, n, n) for n in (2, 2, 3)]), 3 + 3, id="nothing"
        ),
        pytest.param(lambda x: again(pieces(x, (x * 2).double(), (0, 2))), 2 + 2, id="dtypes"),
        pytest.param(lambda x: again(pieces(x, (x * 2)[:1], (0, 2))), 2 + 2, id="broadcast"),
        pytest.param(lambda x: tuple(part * 2 for part in pieces(x, x * 2, (0, 2))), 2, id="added once"),
        pytest.param(lambda x: tuple(pieces(x, x * 2, (0, 2, 4))), 3, id="results"),
        pytest.param(
            lambda x: again([p + q[:, 0:2:1] for p, q in zip(pieces(x, x, (0, 2)), [x * 2, x * 3], strict=True)]),
            1 + 2 + 2,
            id="different tensors",
        ),
    ],
)
def test_only_neighbours_of_the_same_tensors_are_joined(function: Function, sums: int) -> None:
    assert len(checked(function, torch.randn(3, 12))) == sums


def test_a_result_is_no_part_of_a_larger_tensor() -> None:
    """A sum that is returned, or looked at, stays; those beside it are joined without it."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        sums = pieces(x, x * 2, (0, 2, 4, 6))
        return (*again(sums), sums[0], sums[1].t())

    assert len(checked(function, torch.randn(3, 12))) == 3 + 4


class DenseBlock(nn.Module):
    """Every layer reads all results before it."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels * (n + 1), channels, 3, padding=1) for n in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1).relu()))
        return torch.cat(parts, 1)


def test_a_dense_block_trains_as_in_eager_pytorch() -> None:
    torch.manual_seed(0)
    model = DenseBlock(4, 3)
    x = torch.randn(2, 3, 6, 5, requires_grad=True)
    gradients = []
    for run in (model, torch.compile(model, backend="max", options={"fallback": "error"})):
        loss = (run(x) * torch.linspace(-1, 1, 15).view(1, 15, 1, 1)).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
