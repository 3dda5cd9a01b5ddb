"""Sums of bfloat16 are taken in float32 and rounded once, without a launch for the conversions; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from max.dtype import DType
from torch import Tensor

from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.fusion.program import Program


def run(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[Program]]:
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        found = torch.compile(function, backend="max", options={"fallback": "error"})(*inputs)
    return found, [each for each in launched_functions(graphs) if isinstance(each, Program)]


def results(programs: list[Program]) -> list[DType]:
    return [each.reduction.result for each in programs if each.reduction is not None]


def test_a_sum_leaves_as_it_came() -> None:
    x = torch.randn(3000, 24).bfloat16()
    found, programs = run(lambda x: x.sum(0), x)
    assert torch.allclose(found.double(), x.double().sum(0), rtol=2**-8, atol=1e-4)
    assert [each.entry for each in programs] == ["reduction"] and results(programs) == [DType.bfloat16]


def test_ones_that_bfloat16_cannot_count_are_counted() -> None:
    """The sum of bfloat16 in bfloat16 would end at 256."""
    found, _ = run(lambda x: x.sum(0), torch.ones(3000, 8).bfloat16())
    assert torch.equal(found, torch.full((8,), 3008.0).bfloat16())


def test_a_wide_sum_that_others_read_stays_wide() -> None:
    x = torch.randn(300, 24).bfloat16()
    found, programs = run(lambda x: (x.float().sum(0), x.float().sum(0).bfloat16()), x)
    assert DType.float32 in results(programs)
    assert torch.equal(found[0].bfloat16(), found[1])


def test_sums_that_share_a_launch_stay_together() -> None:
    x, y = torch.randn(300, 24).bfloat16(), torch.randn(300, 24).bfloat16()
    found, programs = run(lambda x, y: (x.sum(0), (x.float() * y.float()).sum(0)), x, y)
    assert [each.entry for each in programs].count("reduction") == 1
    wanted = x.double().sum(0), (x.double() * y.double()).sum(0)
    for result, expected in zip(found, wanted, strict=True):
        assert torch.allclose(result.double(), expected, rtol=2**-7, atol=1e-2)


def test_the_gradient_of_a_bias_is_one_launch() -> None:
    """Of a convolution in bfloat16: no conversion stands before or behind the sum."""
    x, w, b = torch.randn(2, 3, 9, 9), torch.randn(8, 3, 3, 3), torch.randn(8)
    operands = [each.bfloat16().requires_grad_() for each in (x, w, b)]
    dy = torch.randn(2, 8, 7, 7).bfloat16()
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        y = torch.compile(torch.conv2d, backend="max", options={"fallback": "error"})(*operands)
        gradient = torch.autograd.grad(y, operands[2], dy)[0]
    programs = [each for each in launched_functions(graphs) if isinstance(each, Program)]
    assert results(programs) == [DType.bfloat16]
    assert torch.allclose(gradient.double(), dy.double().sum((0, 2, 3)), rtol=2**-7, atol=1e-2)
