"""Programs over many tensors in one launch: which they are, and what they compute, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.test_groups import calls, functions, fused
from torch_max_backend import backend

SIZES = [(1,), (7,), (3, 5), (0, 4), (1_000_003,), (64, 64), (16,)]
"""Beside vectors, empty, and larger than a core's share."""


def averages(*tensors: Tensor) -> list[Tensor]:
    """Of tensors and their gradients, two new values each."""
    found = []
    for state, gradient in zip(tensors[::2], tensors[1::2], strict=True):
        mean = state * 0.9 + gradient * 0.1
        found += [mean, gradient - mean]
    return found


def test_equal_expressions_of_arguments_are_one_call() -> None:
    shapes = [shape for n in range(1, 40) for shape in [(n, 3)] * 2]
    assert calls(fused(averages, *shapes)) == ["programs"]


def test_what_waits_for_each_other_is_not_one_call() -> None:
    """Each tensor's new value needs the one before."""

    def chained(*tensors: Tensor) -> list[Tensor]:
        found = [tensors[0]]
        for tensor in tensors[1:]:
            found.append(torch.tanh(tensor * found[-1].sum()))
        return found[1:]

    assert "programs" not in calls(fused(chained, *[(n, 3) for n in range(1, 5)]))


def test_activations_are_not_kept_for_a_later_launch() -> None:
    """Equal expressions of what products made: their operands would live until the last of them is there."""

    def products(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [(x @ weight) * (x @ (weight + 1)) for weight in weights]

    graph = fused(products, (1024, 256), *[(256, 256)] * 3)
    assert calls(graph).count("program") == 3


def test_a_costly_number_is_computed_once() -> None:
    """Not in every vector of the tensor that it is multiplied with."""
    assert len(calls(fused(lambda x, step: x * torch.tanh(step), (300, 30), ()))) == 2
    assert len(calls(fused(lambda x, step: x * (step + 1), (300, 30), ()))) == 1


def test_parts_of_one_tensor_are_one_call() -> None:
    """The gradient of a stack: every part lies elsewhere in one tensor."""
    graph = fused(lambda x, *y: [x[n] * each for n, each in enumerate(y)], (60, 64), *[(64,)] * 60)
    assert calls(graph) == ["programs"]


def _compiled_steps(dtype: torch.dtype) -> Callable[[list[Tensor], list[Tensor], Tensor], list[Tensor]]:
    def steps(states: list[Tensor], gradients: list[Tensor], scale: Tensor) -> list[Tensor]:
        found = []
        for state, gradient in zip(states, gradients, strict=True):
            state.mul_(0.5).add_(gradient * scale)
            found.append((state - gradient).to(dtype))
        return found

    return steps


def test_sums_of_whole_arguments_are_one_call() -> None:
    """Not those along an axis."""
    shapes = [(n, 3) for n in range(1, 60)]
    assert calls(fused(lambda *t: [(each * each).sum() for each in t], *shapes)) == ["programs"]
    assert "programs" not in calls(fused(lambda *t: [each.sum(0) for each in t], *shapes[1:]))


def test_sums_of_all_sizes() -> None:
    """Whole numbers: exact. Every other tensor begins beside a vector."""
    rooms = [torch.randint(-2, 3, (torch.Size(shape).numel() + 3,)).float() for shape in SIZES if 0 not in shape]
    tensors = [room[number % 3 :] for number, room in enumerate(rooms)]

    def sums(tensors: list[Tensor]) -> list[Tensor]:
        return [x for each in tensors for x in ((each * each).sum(), each.amax())]

    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        found = torch.compile(sums, backend="max", options={"fallback": "error"})(tensors)
    for own, wanted in zip(found, sums(tensors), strict=True):
        assert torch.equal(own, wanted)
    listing = graphs[0].executables[0].listing
    assert listing is not None
    # The tensor of one element is apart; a second program lets NaN through to the maxima.
    assert len(listing.launches) <= 4


@pytest.mark.parametrize("count", [5, 70])
def test_clipping_is_a_few_launches(count: int) -> None:
    """Whatever the number of gradients."""
    ours = [nn.Parameter(torch.zeros(n + 1, 33)) for n in range(count)]
    for each in ours:
        each.grad = torch.randn_like(each)
    theirs = copy.deepcopy(ours)
    for each, other in zip(ours, theirs, strict=True):
        other.grad = each.grad.clone()
    clip = torch.compile(nn.utils.clip_grad_norm_, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        found = clip(ours, 1.0)
    wanted = nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(found, wanted)
    for each, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(each.grad, other.grad)
    listing = graphs[-1].executables[-1].listing
    assert listing is not None
    assert len(listing.launches) <= 6
    assert len(listing.updates) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_all_sizes(dtype: torch.dtype) -> None:
    """Whole numbers, so that results are exact; every other tensor begins beside a vector."""

    def drawn(shape: tuple[int, ...], apart: int) -> Tensor:
        room = torch.randint(-8, 8, (torch.Size(shape).numel() + apart,)).to(dtype)
        return room[apart:].view(shape)

    ours = [drawn(shape, number % 2) for number, shape in enumerate(SIZES)]
    gradients = [drawn(shape, number % 3) for number, shape in enumerate(SIZES)]
    theirs = copy.deepcopy(ours)
    steps = _compiled_steps(torch.float32)
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        found = torch.compile(steps, backend="max", options={"fallback": "error"})(ours, gradients, torch.tensor(2.0))
    for own, wanted in zip([*found, *ours], [*steps(theirs, gradients, torch.tensor(2.0)), *theirs], strict=True):
        assert torch.equal(own, wanted)
    ((executable,),) = [graph.executables for graph in graphs]
    assert executable.listing is not None
    # The tensor of one element reads the scale as it reads the others.
    assert len(executable.listing.launches) == 2


@pytest.mark.parametrize(
    ("optimizer", "launches"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1), 1),
        (lambda p: torch.optim.Adam(p, 1e-2, foreach=True), 2),
        (lambda p: torch.optim.AdamW(p, 1e-2), 2),
    ],
)
def test_an_optimizers_step_is_a_few_launches(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], launches: int
) -> None:
    """And its new values are written over the old ones."""
    parameters = [nn.Parameter(torch.randn(n + 1, 33)) for n in range(50)]
    twins = copy.deepcopy(parameters)
    steppers = [optimizer(parameters), optimizer(twins)]
    step = torch.compile(steppers[0].step, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        for _ in range(3):
            for parameter, twin in zip(parameters, twins, strict=True):
                parameter.grad = torch.randn_like(parameter)
                twin.grad = parameter.grad.clone()
            step()
            steppers[1].step()
    for parameter, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=2e-5, atol=2e-6)
    listing = graphs[-1].executables[-1].listing
    assert listing is not None
    assert len(listing.launches) == launches
    assert len(listing.updates) == len(graphs[-1].executables[-1].built.writes)


def test_counters_of_many_layers_are_one_call() -> None:
    layers = nn.Sequential(*[
        layer for n in range(4) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    ])  # fmt: skip
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        torch.compile(layers, backend="max")(torch.randn(2, 3, 8, 8))
    listing = graphs[0].executables[0].listing
    assert listing is not None
    assert sum("pointwise_many" in launch.function and launch.words[0] == 4 for launch in listing.launches) == 1
    assert len(listing.updates) == 12


def test_functions_know_no_sizes() -> None:
    first = functions(fused(averages, *[(4, 3)] * 4))
    assert first == functions(fused(averages, *[(64,), (64,), (5, 5), (5, 5)]))


def divided(count: int) -> Callable[..., list[Tensor]]:
    """As losses are divided by a number of samples."""
    return lambda *tensors: [tensor / count for tensor in tensors]


def test_few_numbers_are_arguments() -> None:
    first, second = (functions(fused(divided(count), (4, 3), (4, 3))) for count in (31, 30))
    assert first == second


def test_numbers_reach_the_program() -> None:
    """Of each dtype, on vectors and on what is left of them."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return [tensor / 31 + 0.3 for tensor in tensors]

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        inputs = [torch.randn(size, dtype=dtype) for size in (1, 10_003)]
        torch.compiler.reset()
        with backend.recorded_graphs() as graphs:
            found = torch.compile(function, backend="max")(*inputs)
        for own, wanted in zip(found, function(*inputs), strict=True):
            torch.testing.assert_close(own, wanted)
        listing = graphs[0].executables[0].listing
        assert listing is not None
        assert sum("pointwise_many" in launch.function and launch.words[0] == 2 for launch in listing.launches) == 1
