"""Memory of saved values and gradients that a CPU's graphs keep from step to step."""

from __future__ import annotations

import copy
import gc
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torch_max_backend.runtime.memory import kept
from torch_max_backend.runtime.memory.kept import KeptMemory

MIB = 2**20


def bytes_of(memory: KeptMemory, mib: float) -> torch.Tensor:
    return memory.tensor((int(mib * MIB),), (1,), torch.uint8)


@pytest.fixture
def memory() -> KeptMemory:
    return KeptMemory()


def test_memory_is_used_again(memory: KeptMemory) -> None:
    first = memory.tensor((512, 1024), (1, 512), torch.float32)
    assert (first.shape, first.stride(), first.dtype) == ((512, 1024), (1, 512), torch.float32)
    first.fill_(1.0)
    place, version = first.data_ptr(), first._version
    del first
    second = bytes_of(memory, 2)
    assert second.data_ptr() == place and second._version < version
    assert memory.held == 2 * MIB


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor[5:],
    "array": torch.Tensor.numpy,
    "storage": lambda tensor: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()),
    "detached": torch.Tensor.detach,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_stays_as_it_is(memory: KeptMemory, holder: str) -> None:
    first = bytes_of(memory, 1).fill_(7)
    place = first.data_ptr()
    held = HOLDERS[holder](first)
    del first
    bytes_of(memory, 1).fill_(8)
    assert bool((held == 7).all())
    del held
    both = [bytes_of(memory, 1) for _ in range(2)]
    assert place in [each.data_ptr() for each in both] and memory.held == 2 * MIB


@pytest.mark.parametrize("change", [lambda storage: storage.resize_(0), lambda storage: storage.share_memory_()])
def test_a_storage_that_somebody_changed_is_not_used_again(memory: KeptMemory, change: Callable[[Any], Any]) -> None:
    change(bytes_of(memory, 1).untyped_storage())
    value = bytes_of(memory, 1).fill_(1)
    assert value.untyped_storage().nbytes() == MIB and not value.is_shared()


def test_it_holds_no_more_than_was_in_use_at_once(memory: KeptMemory) -> None:
    a, b = bytes_of(memory, 8), bytes_of(memory, 4)
    assert memory.held == 12 * MIB
    del a, b
    # Too small for what is free: that goes.
    for size in (1, 2, 3, 1.5, 2.5, 12):
        value = bytes_of(memory, size)
        assert memory.held <= 12 * MIB
        del value
    together = [bytes_of(memory, 5) for _ in range(4)]
    assert memory.held == 20 * MIB
    del together


def test_forgotten_memory_lives_as_long_as_its_value(memory: KeptMemory) -> None:
    value = bytes_of(memory, 2).fill_(3)
    memory.forget()
    assert memory.held == 0
    bytes_of(memory, 2).fill_(4)
    assert bool((value == 3).all())


def test_memory_that_is_not_taken_is_given_back(memory: KeptMemory) -> None:
    def call(times: int, *sizes: float) -> None:
        for _ in range(times):
            memory.called()
            values = [bytes_of(memory, size) for size in sizes]
            del values

    call(1, 1, 2, 3, 3)
    assert memory.held == 9 * MIB
    call(kept._IDLE_CALLS, 1, 3)
    assert memory.held == 9 * MIB
    call(kept._IDLE_CALLS, 1, 3)
    assert memory.held == 4 * MIB
    value = bytes_of(memory, 5)
    call(3 * kept._IDLE_CALLS)
    assert memory.held == 5 * MIB == value.nbytes


def test_what_is_free_goes_where_the_system_has_no_more(memory: KeptMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [bytes_of(memory, 2) for _ in range(3)]
    del held
    plain, failures = kept._Block, iter([RuntimeError("not enough memory")])

    def block(size: int) -> kept._Block:
        for error in failures:
            raise error
        return plain(size)

    monkeypatch.setattr(kept, "_Block", block)
    bytes_of(memory, 4.5)
    assert memory.held == int(4.5 * MIB)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    kept.drop_kept()
    yield
    kept.drop_kept()


def gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], *batches: torch.Tensor) -> list[Any]:
    """Of all batches together, whose graphs live at the same time."""
    model.zero_grad(set_to_none=True)
    torch.stack([run(batch).square().sum() for batch in batches]).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_take_no_memory_from_the_system(dynamic: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="max", dynamic=dynamic)
    x = torch.randn(16, 3, 96, 96)
    for _ in range(3):
        gradients(model, run, x)
    held, before = kept.KEPT.held, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        gradients(model, run, x)
    assert kept.KEPT.held == held > 4 * x.nbytes
    pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert pages < held
    found, expected = gradients(model, run, x, x + 1), gradients(twin, twin, x, x + 1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert kept.KEPT.held > held
    del run, model
    torch._dynamo.reset()
    gc.collect()
    assert kept.KEPT.held == 0
