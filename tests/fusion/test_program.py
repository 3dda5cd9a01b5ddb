"""Generated programs against PyTorch, on the CPU: dtypes, broadcasts, views, several results, many tensors at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import SEED
from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.mojo_ops.functions import Function


def arguments(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(function: Callable[..., object], *inputs: object) -> tuple[object, list[Function]]:
    """The compiled function's results and what it launched."""
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        found = torch.compile(function, backend="max", options={"fallback": "error"})(*inputs)
    return found, launched_functions(graphs)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.relu(x * scale[:, None, None] + shift[:, None, None]) @ torch.ones(x.shape[-1], 2, dtype=x.dtype)


def last_axis(x: Tensor, scale: Tensor) -> Tensor:
    return (torch.tanh(x) * scale).contiguous()


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x.transpose(0, 2) + y).exp()


def split(x: Tensor, y: Tensor) -> Tensor:
    return (x.reshape(4, 6, -1) * y[:, :, None]).reshape(x.shape) - x


def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = x * y
    return z.sigmoid(), (z > 0) & (y < 1), z.to(torch.float16)


def selected(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(x > y, x.floor(), -y.abs()), (x.isnan() | y.isinf()).to(torch.int64)


def whole(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (x * 100).to(torch.int32), (y * 7).to(torch.int64)
    return a * b + 3, (a == b) ^ (a.to(torch.bool))


def quotients(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (x * 100).to(torch.int64), (y * 7).to(torch.int64)
    small = b.to(torch.uint8).clamp(min=1)
    return a // b.where(b != 0, 3), torch.div(a, b.where(b != 0, -3), rounding_mode="trunc"), a.to(torch.uint8) // small


def stacked(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Of three computed parts, which follow each other closely."""
    return torch.stack([x * w, F.pad(y.relu(), (0, 0, 1, 0))[:, :-1], x - y], 2) + w


def parted(x: Tensor, y: Tensor) -> Tensor:
    """Of two computed parts, with zeros behind them."""
    return F.pad(torch.cat([x * 2 + 1, y.abs()], 1), (0, 0, 0, 2)) - 1


CASES: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "channel of NCHW, rows of 35": (affine, arguments((3, 8, 5, 7), (8,), (8,))),
    "channel of NCHW, rows of 64": (affine, arguments((2, 6, 8, 8), (6,), (6,))),
    "last axis of 64": (last_axis, arguments((9, 5, 64), (64,))),
    "last axis of 3": (last_axis, arguments((9, 5, 3), (3,))),
    "transposed": (transposed, arguments((4, 3, 5), (5, 3, 4))),
    "split": (split, arguments((24, 10), (4, 6))),
    "several results": (two_results, arguments((7, 33), (7, 33))),
    "several results, broadcast": (two_results, arguments((7, 33), (7, 1))),
    "stacked": (stacked, arguments((6, 5, 16), (6, 5, 16), (16,))),
    "parts of other lengths": (parted, arguments((4, 3, 16), (4, 5, 16))),
    "select": (selected, arguments((70, 33), (33,))),
    "whole numbers": (whole, arguments((70, 33), (33,))),
    "quotients of whole numbers": (quotients, arguments((70, 33), (33,))),
    "more than a share": (two_results, arguments((300, 333), (333,))),
    "bfloat16": (last_axis, arguments((40, 24), (24,), dtype=torch.bfloat16)),
    "float64": (last_axis, arguments((40, 24), (24,), dtype=torch.float64)),
    "one element": (two_results, arguments((), ())),
    "empty": (two_results, arguments((0, 4), (4,))),
}


def test_programs_compute_what_eager_does() -> None:
    """One compilation for all cases."""

    def every(inputs: list[list[Tensor]]) -> list[object]:
        return [function(*each) for (function, _), each in zip(CASES.values(), inputs, strict=True)]

    inputs = [case[1] for case in CASES.values()]
    found, launched = run(every, inputs)
    for name, own, wanted in zip(CASES, found, every(inputs), strict=True):
        torch.testing.assert_close(own, wanted, msg=lambda message, name=name: f"{name}: {message}")
    entries = {each.entry for each in launched if each.symbol.startswith("torch_max_pointwise_")}
    assert "pointwise" in entries and entries <= {"pointwise", "pointwise_many"}


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
def test_special_values_are_not_folded(special: float) -> None:
    """``x * 0`` of a NaN is NaN."""
    x = torch.tensor([special, 1.0, -2.0])
    compiled = torch.compile(lambda x: (x * 0 + x, x - x, x != x), backend="max")
    for own, wanted in zip(compiled(x), (x * 0 + x, x - x, x != x), strict=True):
        torch.testing.assert_close(own, wanted, equal_nan=True)


def test_many_conversions_are_one_call() -> None:
    """Weights of several shapes, one op."""
    tensors = arguments(*[(n, 3) for n in range(1, 40)])
    found, launched = run(lambda *all: [each.to(torch.bfloat16) for each in all], *tensors)
    for own, each in zip(found, tensors, strict=True):
        assert torch.equal(own, each.to(torch.bfloat16))
    (program,) = launched
    assert program.symbol.startswith("torch_max_pointwise_many") and program.target == "cpu"
    assert "cast[DType.bfloat16]" in program.definition


def scaled(dtype: torch.dtype, numbers: tuple[float, float, float]) -> tuple[list[Tensor], list[Function]]:
    """Products and a sum with numbers that no program has in its text."""
    (x,) = arguments((7, 33), dtype=dtype)
    first, second, third = numbers

    def function(x: Tensor) -> list[Tensor]:
        return [(x * first + second).relu() * first, (x - third).square().sum(1)]

    found, launched = run(function, x)
    for own, wanted in zip(found, function(x), strict=True):
        torch.testing.assert_close(own, wanted)
    return found, [each for each in launched if each.symbol.startswith(("torch_max_pointwise", "torch_max_reduction"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_arguments(dtype: torch.dtype) -> None:
    """Expressions that differ in numbers share programs."""
    found, launched = scaled(dtype, (1 / 768, 0.3, -1.7))
    others, again = scaled(dtype, (-1e-30, -7.25, 1e4) if dtype != torch.float16 else (-1e-7, -7.25, 3.5))
    assert launched and [each.symbol for each in launched] == [each.symbol for each in again]
    assert not torch.equal(found[1], others[1])


def test_generated_functions_are_named_by_what_they_compute() -> None:
    torch._dynamo.reset()
    with backend.recorded_graphs() as graphs:
        run = torch.compile(lambda x: torch.relu(x) * 2 + torch.sigmoid(x), backend=backend.build_only)
        run(torch.randn(8))
    (executable,) = graphs[0].executables
    (launch,) = executable.built.listing.launches
    (function,) = (each for each in executable.spec.functions if each.symbol == launch.function)
    assert launch.ops == "sigmoid_relu_mul_add"
    assert "def sigmoid_relu_mul_add_" in function.definition
