"""Libraries begin to be built before the graph is lowered, and are those that it calls."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from max.dtype import DType
from torch import nn

from torch_max_backend.backend import build_only
from torch_max_backend.mojo_ops.convolution import Grouping, convolution_function
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction, required
from torch_max_backend.problems.convolution import Pass
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.caches import cache

PATIENCE = 60
"""Seconds."""

Begun = list[tuple[set[Function], torch.device]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    calls: Begun = []

    def note(functions: Iterable[Function], device: torch.device) -> None:
        calls.append((set(functions), device))

    monkeypatch.setattr(libraries, "begin", note)
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", "8")
    yield calls
    torch.compiler.reset()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(F.max_pool2d(self.grouped(self.depthwise(self.stem(x))), 2))


def test_what_begins_is_what_the_graphs_call(begun: Begun) -> None:
    net = _Net()
    torch.compile(net, backend="max")(torch.randn(1, 3, 9, 9)).sum().backward()
    ((functions, device),) = begun
    assert device == torch.device("cpu")
    entries = {(each.entry, each.parameters) for each in functions if isinstance(each, LibraryFunction)}
    # The images' gradient is not asked for; a transposed convolution's forward pass is a data gradient.
    passes = [which.value for which in Pass]
    of_grouping = {(each, (DType.float32, kind.value)) for each in passes for kind in (Grouping.ONE, Grouping.WIDE)}
    depthwise = {(each, (DType.float32, Grouping.ANY.value)) for each in passes}
    # What the maxima keep is one byte each.
    pooling = {(f"max_pool_{each}", (DType.float32, DType.uint8, False)) for each in ("fprop", "dgrad")}
    assert entries == of_grouping | depthwise | pooling
    assert functions <= required()


def test_graphs_that_are_only_built_begin_nothing(begun: Begun) -> None:
    torch.compile(_Net(), backend=build_only)(torch.randn(1, 3, 8, 8)).sum().backward()
    assert not begun


def test_two_cores_have_enough_to_do(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", "2")
    torch.compile(_Net(), backend="max")(torch.randn(1, 3, 8, 8)).sum().backward()
    assert not begun


def test_two_builders_build_each_function_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second builds what the first does not, then takes what the first has built."""
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(libraries, "_loaded", {})
    first, second = (
        convolution_function(name, "cpu", DType.float32, Grouping.ONE) for name in ("conv_dgrad", "conv_wgrad")
    )
    inside, go_on = threading.Event(), threading.Event()
    built: list[Function] = []

    def build_one(functions: list[Function], facts: dict[Function, dict[str, str]]) -> dict[Function, Path]:
        if first in functions:
            inside.set()
            assert go_on.wait(PATIENCE)
        else:
            go_on.set()
        built.extend(functions)
        paths = {
            each: cache.store(
                libraries.LIBRARIES, facts[each], libraries.FILENAME, lambda path: path.write_bytes(b"library")
            )
            for each in functions
        }
        return {each: path for each, path in paths.items() if path is not None}

    monkeypatch.setattr(libraries, "_build_one", build_one)
    cpu = torch.device("cpu")
    libraries.begin([first], cpu)
    assert inside.wait(PATIENCE)
    assert set(libraries.build([first, second], cpu)) == {first, second}
    assert built == [second, first]


def test_what_begins_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs the function hears of it."""
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(libraries, "_loaded", {})
    failed = threading.Event()

    def build_one(*_: object) -> dict[Function, Path]:
        failed.set()
        raise RuntimeError("does not compile")

    monkeypatch.setattr(libraries, "_build_one", build_one)
    function = convolution_function("conv_dgrad", "cpu", DType.float32, Grouping.ONE)
    libraries.begin([function], torch.device("cpu"))
    assert failed.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="does not compile"):
        libraries.build([function], torch.device("cpu"))


def test_what_is_not_known_yet_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a device that MAX does not have: whoever compiles for it says so in better words."""

    def missing(*_: object) -> dict[str, str]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(libraries, "target_facts", missing)
    function = convolution_function("conv_dgrad", "cpu", DType.float32, Grouping.ONE)
    libraries.begin([function], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no such device"):
        libraries.build([function], torch.device("cpu"))
