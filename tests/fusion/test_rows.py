"""Programs over the same rows in one launch; a CPU stands for a GPU, where they are chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.ahead import compile_ahead
from torch_max_backend.fusion import rewrite
from torch_max_backend.fusion.program import Program
from torch_max_backend.fusion.rows import RowsFunction
from torch_max_backend.runtime.building import libraries


@pytest.fixture(autouse=True)
def chains_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(rewrite, "TARGETS", frozenset({"cpu"}))
    yield
    torch._dynamo.reset()


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


class Branches(nn.Module):
    """Two normalizations of which one waits for the other, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + x
        return torch.softmax(self.second(y.relu()), -1) * y


class Residual(nn.Module):
    """A normalization of a sum that is needed later, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.linear(x)
        return y + self.linear(self.norm(y))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layer_norm": (nn.LayerNorm(48), (3, 37, 48)),
    "layer_norm of odd rows": (nn.LayerNorm(33), (65, 33)),
    "softmax": (Function(lambda x: torch.softmax(x * 3, -1)), (2, 3, 17, 40)),
    "log_softmax": (Function(lambda x: F.log_softmax(x, -1)), (70, 100)),
    "rms_norm": (nn.RMSNorm(64), (5, 9, 64)),
    "normalize": (Function(lambda x: F.normalize(x, dim=-1) + 1), (41, 32)),
    "branches": (Branches(40), (6, 11, 40)),
    "residual": (Residual(64), (9, 17, 64)),
    "residual of odd rows": (Residual(37), (9, 17, 37)),
    "long rows": (nn.LayerNorm(5000), (3, 5000)),
}


class All(nn.Module):
    """All cases, so that they are compiled together."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = nn.ModuleList(model for model, _ in CASES.values())

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(case(x) for case, x in zip(self.cases, inputs, strict=True))


def test_chains_compute_what_eager_does() -> None:
    torch.manual_seed(0)
    model = All()
    inputs = [torch.randn(shape, requires_grad=True) for _, shape in CASES.values()]
    slopes = [torch.randn_like(x) for x in inputs]
    with backend.recorded_graphs() as graphs:
        run = torch.compile(model, backend="max", options={"fallback": "error"})
        results = run(*inputs)
        gradients = torch.autograd.grad(results, [*inputs, *model.parameters()], slopes)
    wide = copy.deepcopy(model).double()
    own = [x.detach().double().requires_grad_() for x in inputs]
    expected = wide(*own)
    for name, mine, true in zip(CASES, results, expected, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
    wanted = torch.autograd.grad(expected, [*own, *wide.parameters()], [slope.double() for slope in slopes])
    for mine, true in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-3, atol=1e-4)
    chains = [each for each in launched_functions(graphs) if isinstance(each, RowsFunction)]
    # One in each pass at least, of most.
    assert len(chains) >= 2 * len(CASES) - 1 and all(sum(chain.whole) > 1 for chain in chains)
    # The residual's sum, in rows of whole vectors.
    assert sum(chain.programs[0].reduction is None for chain in chains) >= 1


def test_sums_without_a_reader_of_the_rows_stay_alone() -> None:
    """One program over whole rows, and what else is computed of its sums, is no chain."""
    with backend.recorded_graphs() as graphs:
        run = torch.compile(lambda x: (x * 2).sum(-1).sqrt(), backend=backend.build_only)
        run(torch.rand(70, 50))
    assert not [each for each in launched_functions(graphs) if isinstance(each, RowsFunction)]


def test_other_rows_are_not_read() -> None:
    """A program that reads the sums of its neighbours' rows waits until all are there."""

    def program(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True).flip(0)

    with backend.recorded_graphs() as graphs:
        run = torch.compile(program, backend="max", options={"fallback": "error"})
        x = torch.randn(70, 50)
        torch.testing.assert_close(run(x), program(x))
    assert not [each for each in launched_functions(graphs) if isinstance(each, RowsFunction)]


def test_chains_stand_beside_sums_in_a_convolutions_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of the Hopper generation, for which nothing is compiled here."""
    monkeypatch.setattr(rewrite, "TARGETS", frozenset({"gpu"}))
    tokens = Function(lambda x: x.flatten(2).transpose(1, 2))
    layers = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), tokens, nn.LayerNorm(64)]
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(
            nn.Sequential(*layers), torch.empty(4, 64, 8, 8, device="meta"), target="sm_90a", autocast=torch.bfloat16
        )
    functions = launched_functions(graphs)
    assert any(isinstance(each, RowsFunction) for each in functions)
    assert any(isinstance(each, Program) and each.entry == "conv_pointwise_sums" for each in functions)


class Scaled(nn.Module):
    """A normalization, a product and a scale for each channel, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(self.norm(x))


def test_tokens_that_are_pooled_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean's gradient is repeated for each token; the residual's gradient, its sum with others, has rows."""
    monkeypatch.setattr(rewrite, "TARGETS", frozenset({"gpu"}))
    model = nn.Sequential(Scaled(64), Scaled(64), Function(lambda x: x.mean(1)))
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(
            model, torch.empty(4, 49, 64, device="meta", requires_grad=True), target="sm_90a", autocast=torch.bfloat16
        )
    chains = [each for each in launched_functions(graphs) if isinstance(each, RowsFunction)]
    assert sum("native_layer_norm_backward" in chain.ops for chain in chains) == 2
