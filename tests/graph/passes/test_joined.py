"""Sums of the gradients of parts become one tensor, where every part has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.graph.passes.joined import stack_parts

aten = torch.ops.aten


def parts(*indices: int, dim: int = 0) -> Callable[[Tensor], Tensor]:
    """Multiplies each of these parts by a number of its own and adds up the gradients."""

    def gradient(x: Tensor) -> Tensor:
        shape = [3 if axis == dim else 4 for axis in range(3)]
        total = None
        for place, index in enumerate(indices):
            part = aten.select_backward(x * (place + 1), shape, dim, index)
            total = part if total is None else total + part
        assert total is not None
        return total

    return gradient


@pytest.mark.parametrize(
    ("function", "joined"),
    [
        (parts(0, 1, 2), True),
        (parts(2, 0, 1, dim=1), True),
        (parts(0, 1, -1, dim=2), True),
        # A part that is missing is zero.
        (parts(0, 2), False),
        (parts(0, 0), False),
        (lambda x: parts(0, 1)(x) + parts(0, 1)(x), False),
        (lambda x: parts(0, 1, 2)(x) + 1, True),
    ],
)
def test_parts_are_put_together(function: Callable[[Tensor], Tensor], joined: bool) -> None:
    x = torch.randn(4, 4)
    graph = stack_parts(make_fx(function, tracing_mode="fake")(x))
    targets = [node.target for node in graph.graph.nodes]
    assert (aten.cat.default in targets) == joined
    assert (aten.select_backward.default in targets) == (not joined)
    torch.testing.assert_close(graph(x), function(x), rtol=0, atol=0)


def test_a_part_that_is_read_elsewhere_stays() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = aten.select_backward(x, [2, 4, 4], 0, 0)
        return first + aten.select_backward(x * 2, [2, 4, 4], 0, 1), first

    x = torch.randn(4, 4)
    graph = stack_parts(make_fx(function, tracing_mode="fake")(x))
    assert not graph.graph.find_nodes(op="call_function", target=aten.cat.default)
    torch.testing.assert_close(graph(x), function(x), rtol=0, atol=0)
