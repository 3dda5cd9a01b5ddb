"""A library function that calls another one, whose library is built and loaded in the middle of a launch list."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from max.graph import DeviceRef

from torch_max_backend.ir.layout import contiguous_order
from torch_max_backend.launch_list import Kind, Launch, LaunchList, Place
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.functions import require_entry
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.launching.runner import ListRunner, RunnerSpec
from torch_max_backend.runtime.tensors.interface import InputSpec, OutputSpec
from torch_max_backend.runtime.tensors.leaving import Leaving

CPU = torch.device("cpu")
_ADDS = """
def adds[target: StaticString](mut arguments: Arguments, ctx: DeviceContext) raises:
    var y = arguments.take[DType.float32, 1]()
    var x = arguments.take[DType.float32, 1]()
    for i in range(y.dim_size(0)):
        y.data[unsafe_offset=i] = x[i] + 1
"""
_ASKS = """
def asks_{symbol}[target: StaticString](mut arguments: Arguments, ctx: DeviceContext) raises:
    var call = Call()
    for _ in range(4):
        call.append_word(arguments.take_word())
    call.run["{symbol}"](ctx)
"""


@dataclass(frozen=True)
class Written:
    """A library function of the test's own."""

    symbol: str
    expression: str
    definition: str
    target: Literal["cpu", "gpu"] = "cpu"
    entry: str = "written"
    seconds: float = 0.1
    use: str = "a test"

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """What both functions need."""
        return frozenset(
            {("common.library", "Arguments"), ("common.library", "Call"), ("common.library", "DeviceContext")}
        )


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test needs these functions."""
    monkeypatch.setattr(functions, "_required", set(functions.required()))


def _runner(asked: str) -> ListRunner:
    """A list with one launch: of a function that calls the one whose symbol is ``asked``."""
    asks = Written(f"torch_max_test_asks_{asked}", f'asks_{asked}["cpu"]', _ASKS.format(symbol=asked))
    functions.require_function(asks)
    walk = require_entry("runner", "walk", DeviceRef.CPU(), ())
    with libraries.ready(CPU):
        pass
    places = (Place(Kind.RESULT, 0), Place(Kind.ARGUMENT, 0))
    words = tuple(word for place in places for word in (place, 3))
    inputs = [InputSpec(0, torch.float32, contiguous_order(1), CPU, (3,))]
    leaving = Leaving([OutputSpec(0, contiguous_order(1), torch.float32, (3,))], [])
    listing = LaunchList((Launch(asks.symbol, words),), 1, (places[0],), (), 0)
    return ListRunner(RunnerSpec(listing, inputs, leaving, CPU, walk))


def test_it_is_built_when_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    adds = Written("torch_max_test_adds", 'adds["cpu"]', _ADDS)
    runner = _runner(adds.symbol)
    functions.require_function(adds)
    with pytest.raises(KeyError):
        libraries.address(adds.symbol, CPU)
    with caplog.at_level(logging.DEBUG, "torch_max_backend"):
        for _ in range(2):
            (y,) = runner.run([torch.arange(3.0)])
            assert y.tolist() == [1, 2, 3]
    assert libraries.address(adds.symbol, CPU)
    assert caplog.text.count("was not expected to be") == 1


def test_what_nobody_knows_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    runner = _runner("torch_max_test_nothing")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the library of torch_max_test_nothing has not been loaded"):
            runner.run([torch.arange(3.0)])
    assert "torch_max_test_nothing cannot be loaded" in caplog.text
