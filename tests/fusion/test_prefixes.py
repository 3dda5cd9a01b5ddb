"""Concatenations that continue an earlier one read its copy, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.launched import launched_functions
from torch_max_backend import backend


def copies(function: Any, *inputs: Tensor) -> int:
    """The concatenations that are copies; the result is eager's."""
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        found = torch.compile(function, backend="max", options={"fallback": "error"})(*inputs)
    torch.testing.assert_close(found, function(*inputs))
    return sum("concatenate" in each.symbol for each in launched_functions(graphs))


def dense(x: Tensor, layers: int, dim: int) -> tuple[list[Tensor], list[Tensor]]:
    """The parts and the concatenations of a dense block."""
    parts, joined = [x], []
    for layer in range(layers):
        joined.append(torch.cat(parts, dim))
        parts.append(torch.sin(joined[-1] + layer).mean(dim, keepdim=True))
    return parts, joined


def test_of_every_eight_or_so_one_is_a_copy() -> None:
    x = torch.randn(4, 3, 50)
    assert copies(lambda x: dense(x, 26, 1)[0][-1], x) == 3
    assert copies(lambda x: dense(x, 26, 2)[0][-1], torch.randn(4, 3, 5)) == 3
    assert copies(lambda x: dense(x, 8, 1)[0][-1], x) == 0


def test_what_is_returned_is_whole() -> None:
    """Each is a copy of all parts: they share no memory."""
    x = torch.randn(4, 3, 50)
    assert copies(lambda x: dense(x, 14, 1)[1], x) == 6


def test_parts_in_another_order_are_no_prefix() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = [x * number for number in range(12)]
        return torch.cos(torch.cat(parts, 1)).sum(0), torch.exp(torch.cat([parts[1], parts[0], *parts[2:]], 1)).sum(0)

    assert copies(function, torch.randn(4, 3, 50)) == 2
