"""New values of arguments that a launch list writes over the old ones, and those that it must not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_max_backend import backend
from torch_max_backend.runtime.executable import Executable


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], list[Executable]]:
    """The compiled function, called once, and its graphs."""
    torch.compiler.reset()
    run = torch.compile(function, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        run(*args)
    return run, [each for graph in graphs for each in graph.executables]


def updates(executable: Executable) -> int:
    assert executable.listing is not None
    return len(executable.listing.updates)


def averaged(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5).add_(y)
    return x + y


@pytest.fixture(scope="module")
def average() -> tuple[Callable[..., Any], Executable]:
    run, (executable,) = compiled(averaged, torch.zeros(33), torch.zeros(33))
    return run, executable


def test_autograd_learns_of_it(average: tuple[Callable[..., Any], Executable]) -> None:
    run, executable = average
    x, y = torch.randn(33), torch.randn(33)
    wanted = x * 0.5 + y
    address, version = x.data_ptr(), x._version
    out = run(x, y)
    assert updates(executable) == 1
    assert torch.equal(x, wanted) and torch.equal(out, wanted + y)
    assert x.data_ptr() == address and x._version > version and y._version == 0
    assert out.data_ptr() != address

    z = torch.randn(33, requires_grad=True)
    product = (z * x).sum()
    run(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_dropout_leaves_running_statistics_in_place() -> None:
    """Its mask is an argument of the forward graph, which is one list: nothing is copied back beside it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    expected, wanted = copy.deepcopy(layers), torch.randn(2, 3, 8, 8)
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        run = torch.compile(layers, backend="max", options={"fallback": "error"})
        for seed in (1, 2):
            for step in (run, expected):
                torch.manual_seed(seed)
                step(wanted).square().sum().backward()
    (executable,) = graphs[0].executables
    assert len(executable.spec.draws) == 1 and executable.packing is not None
    assert updates(executable) == 3
    for ours, theirs in zip(layers.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(layers.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_tensors_of_inference_mode(average: tuple[Callable[..., Any], Executable]) -> None:
    run, _ = average
    with torch.inference_mode():
        x, y = torch.randn(33), torch.randn(33)
        wanted = x * 0.5 + y
        run(x, y)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("shift", [0, 1, 32])
def test_arguments_that_share_memory(average: tuple[Callable[..., Any], Executable], shift: int) -> None:
    """What is read are the values before the call, also where the new ones of another argument lie."""
    _, executable = average
    room = torch.randn(65)
    x, y = room[:33], room[shift : shift + 33]
    mean = x * 0.5 + y
    wanted = mean + y
    # Twice: what was found of the first call's addresses is not taken for the second one's.
    for _ in range(2):
        executable.run([torch.zeros(33), torch.zeros(33)])
        (out,) = executable.run([x, y]) if shift < 33 else (wanted,)
        assert torch.equal(out, wanted) and torch.equal(x, mean)
        mean = x * 0.5 + y
        wanted = mean + y


def test_arguments_in_another_memory_order(average: tuple[Callable[..., Any], Executable]) -> None:
    _, executable = average
    x, y = torch.randn(66)[::2], torch.randn(33)
    mean = x * 0.5 + y
    executable.run([x, y])
    assert torch.equal(x, mean)


def read_later(x: Tensor, w: Tensor) -> Tensor:
    old = x.clone()
    x.mul_(2)
    return old @ w + x


def read_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(x.t() * 2)
    return x + w


def read_as_a_number(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(x[0, :1] * w)
    return w + 1


def returned_before(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    old = x.clone()
    x.add_(w)
    return old, w + 1


def exchanged(x: Tensor, w: Tensor) -> Tensor:
    """Each one's new value is of the other's old one."""
    old = x.clone()
    x.copy_(w * 2)
    w.copy_(old * 3)
    return old.sum()


def result_and_argument(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)
    return x.clone()


@pytest.mark.parametrize(
    "function", [read_later, read_elsewhere, read_as_a_number, returned_before, exchanged, result_and_argument]
)
def test_old_values_that_are_read(function: Callable[..., Any]) -> None:
    x, w = torch.randint(-4, 4, (16, 16)).float(), torch.randint(-4, 4, (16, 16)).float()
    own, theirs = (x.clone(), w.clone()), (x.clone(), w.clone())
    run, _ = compiled(function, x, w)
    for _ in range(2):
        ours, wanted = run(*own), function(*theirs)
        for found, expected in zip((*own, *_several(ours)), (*theirs, *_several(wanted)), strict=True):
            assert torch.equal(found, expected)


def _several(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_running_statistics() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    twin = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    twin.load_state_dict(layers.state_dict())
    x = torch.randn(4, 3, 9, 9)
    run, executables = compiled(layers, x)
    twin(x)
    assert updates(executables[0]) == 3
    address, version = layers[1].running_mean.data_ptr(), layers[1].running_mean._version
    for _ in range(3):
        run(x).sum().backward()
        twin(x)
    assert layers[1].running_mean.data_ptr() == address and layers[1].running_mean._version > version
    for ours, wanted in zip(layers.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_a_launch_that_fails(average: tuple[Callable[..., Any], Executable]) -> None:
    """Bad arguments are refused before anything is written."""
    _, executable = average
    x = torch.ones(33)
    with pytest.raises(ValueError, match="expected shape"):
        executable.run([x, torch.ones(32)])
    assert torch.equal(x, torch.ones(33))
