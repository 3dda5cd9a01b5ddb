"""Reductions by generated programs: values against float64, on the CPU, and the programs that a graph gets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fusion.test_groups import calls, functions, fused, remaining
from tests.harness import SEED
from tests.launched import launched_functions
from torch_max_backend import backend

aten = torch.ops.aten
Case = tuple[Callable[..., object], list[Tensor]]


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def digits(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in shapes]


def layer_norm_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    wide, centered = dy.float(), x.float() - mean
    return wide.sum(0), (wide * centered).sum(0), wide.sum(1), (wide * centered).sum(1)


def extrema(x: Tensor) -> tuple[Tensor, ...]:
    return x.amax(1), x.amin(1), x.amax(0), x.amin(0), x.amax(), x.argmax(1), x.argmin(0)


def products(x: Tensor) -> tuple[Tensor, ...]:
    return x.prod(0), x.prod(1), x.prod()


def axes(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.sum((0, 2)), x.sum((1, 2)), x.sum((0, 1)), x.sum((0, 1, 2)), (x > 0).any(1)


#: Reductions of whole numbers: exactly PyTorch's results.
EXACT: dict[str, Case] = {
    "middle axes": (axes, digits((3, 37, 50))),
    "middle axes, rows of vectors": (axes, digits((3, 64, 128))),
    "narrow rows": (axes, digits((65, 9, 3))),
    "int64": (axes, digits((3, 37, 50), dtype=torch.int64)),
    "int32": (axes, digits((3, 37, 50), dtype=torch.int32)),
    "more columns than are summed at a time": (lambda x: (x.sum(0), x.sum(1)), digits((40, 1300))),
    "many rows, few columns": (lambda x: (x.sum(0), x.sum(1)), digits((30_000, 5))),
    "few rows, much in each": (lambda x: (x.sum(0), x.sum(1), x.sum()), digits((3, 40_001))),
    "one row": (lambda x: (x.sum(0), x.sum(1)), digits((1, 300))),
    "one column": (lambda x: (x.sum(0), x.sum(1)), digits((300, 1))),
    "one element": (lambda x: (x.sum(), x.amax(), x.prod()), digits((1,))),
    "bfloat16, several sums": (layer_norm_sums, [*digits(*[(200, 96)] * 2, dtype=torch.bfloat16), *digits((200, 1))]),
    "a row's number": (layer_norm_sums, digits((70, 33), (70, 33), (70, 1))),
    "transposed": (lambda x, y: (x.transpose(0, 2) * y).sum((0, 2)), digits((4, 3, 5), (5, 3, 4))),
    "broadcast alone": (lambda x: (x.expand(40, 7) + 1).sum(0), digits((7,))),
    "extrema": (extrema, digits((50, 70))),
    "extrema of int64": (extrema, digits((50, 70), dtype=torch.int64)),
    "extrema of bfloat16": (extrema, digits((50, 70), dtype=torch.bfloat16)),
    "float64": (axes, digits((3, 37, 50), dtype=torch.float64)),
}  # fmt: skip
#: Results near PyTorch's.
NEAR: dict[str, Case] = {
    "products": (products, [1 + each / 100 for each in normal((40, 70))]),
    "means": (lambda x: (x.mean(1), x.mean(0), x.var(1), x.std((0, 1))), normal((40, 70))),
    "a loss": (lambda x, y: ((x - y) ** 2).mean(), normal((400, 70), (400, 70))),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(0)), normal((40, 70))),
    "halves": (lambda x: (x.sum(1), x.mean(0), x.softmax(1)), normal((40, 70), dtype=torch.float16)),
}
LARGE = torch.rand(3_000_000, generator=torch.Generator().manual_seed(SEED))
SPECIAL = torch.tensor([[1.0, math.nan, 2.0], [math.inf, 1.0, -math.inf], [-math.inf] * 3, [math.nan] * 3])


def compiled(inputs: list[list[Tensor]]) -> list[object]:
    """All cases in one graph."""

    def every(inputs: list[list[Tensor]]) -> list[object]:
        cases = [*EXACT.values(), *NEAR.values()]
        found = [function(*each) for (function, _), each in zip(cases, inputs, strict=False)]
        return [*found, (inputs[-2][0].sum(), inputs[-2][0].view(3, -1).mean(1)), extrema(inputs[-1][0])]

    torch.compiler.reset()
    return torch.compile(every, backend="max", options={"fallback": "error"})(inputs)


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    cases = {**EXACT, **NEAR}
    with backend.recorded_graphs() as graphs:
        found = compiled([*(case[1] for case in cases.values()), [LARGE], [SPECIAL]])
    assert "reduction" in {function.entry for function in launched_functions(graphs)}
    return dict(zip([*cases, "large", "special"], found, strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_are_exact(results: dict[str, object], name: str) -> None:
    function, inputs = EXACT[name]
    torch.testing.assert_close(results[name], function(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", NEAR)
def test_results_are_near_pytorchs(results: dict[str, object], name: str) -> None:
    function, inputs = NEAR[name]
    torch.testing.assert_close(results[name], function(*inputs))


def test_long_sums_are_as_exact_as_pytorchs(results: dict[str, object]) -> None:
    total, means = results["large"]
    exact, own = LARGE.double().sum().item(), abs(total.item() - LARGE.double().sum().item())
    assert own <= 2 * abs(LARGE.sum().item() - exact) + exact * 2**-23
    torch.testing.assert_close(means.double(), LARGE.view(3, -1).double().mean(1), rtol=2**-22, atol=0)


def test_extrema_of_special_values(results: dict[str, object]) -> None:
    torch.testing.assert_close(results["special"], extrema(SPECIAL), equal_nan=True)


def test_what_a_reduction_reads_is_computed_in_its_program() -> None:
    graph = fused(lambda x: torch.sqrt(x).sum(1), (8, 24))
    assert calls(graph) == ["program"]
    assert not remaining(graph)


def test_sums_that_read_alike_are_one_call() -> None:
    graph = fused(lambda dy, x: (dy.sum(0), (dy * x).sum(0)), (8, 24), (8, 24))
    assert calls(graph) == ["program"]


def test_sums_over_other_axes_are_other_calls() -> None:
    graph = fused(lambda x: (x.sum(0), x.sum(1)), (24, 24))
    assert calls(graph) == ["program", "program"]


def test_a_sum_that_reads_another_ones_result_waits_for_it() -> None:
    graph = fused(lambda x: (x - x.sum(1, keepdim=True)).exp().sum(1), (8, 24))
    assert calls(graph) == ["program", "program"]
    assert not remaining(graph)


def test_sizes_do_not_make_programs() -> None:
    found = {functions(fused(lambda x: torch.tanh(x).sum(0), (n, c)))[0] for n, c in ((8, 24), (4, 64), (3, 7))}
    assert len(found) == 1


def test_many_addends_are_computed_before_they_are_summed() -> None:
    """No program takes twenty inputs."""
    graph = fused(lambda *addends: sum(torch.tanh(each) for each in addends).sum(0), *[(8, 24)] * 20)
    assert 2 <= len(calls(graph)) <= 8
    assert not remaining(graph)
