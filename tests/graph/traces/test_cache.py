"""Compiled Dynamo graphs in the cache: a step from there is the step that was compiled, and what may differ is not."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.fx import GraphModule, symbolic_trace

from torch_max_backend import backend
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph import compiler
from torch_max_backend.graph.traces import cache as graph_cache
from torch_max_backend.options import Options

Step = Callable[[], list[torch.Tensor]]


class Net(nn.Module):
    """Updates running statistics, keeps many activations, and may draw a mask."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(rate),
            nn.Flatten(),
            nn.Linear(64, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 3, 4, 4] to [N, 5]."""
        return self.layers(x).tanh().square()


@pytest.fixture(autouse=True)
def fresh_keys() -> Iterator[None]:
    """The cache is on; entries of other tests and earlier runs are not found."""
    torch._dynamo.reset()
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=uuid.uuid4().hex), functorch_config.patch(enable_autograd_cache=True):
        yield


def _step(make: Callable[[], nn.Module], **compiling: Any) -> list[torch.Tensor]:
    """One step of a new model in a process that has compiled nothing: its result, its gradients and its buffers."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = make()
    run = torch.compile(model, backend="max", **compiling)
    x = torch.randn(6, 3, 4, 4)
    y = run(x)
    y.sum().backward(retain_graph=True)
    # Once more from what was kept: gradients double.
    y.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [y, *(each for each in gradients if each is not None), *model.buffers()]


def _hits(step: Step) -> tuple[list[torch.Tensor], int]:
    counters.clear()
    results = step()
    return results, counters["aot_autograd"]["autograd_cache_hit"]


def _assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.4], ids=["whole", "cut"])
def test_a_step_from_the_cache_is_the_step_that_was_compiled(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[torch.Tensor]:
        return _step(lambda: Net(rate))

    expected, hits = _hits(step)
    assert hits == 0
    # Nothing is lowered any more.
    monkeypatch.delattr(backend, "compile_graph")
    got, hits = _hits(step)
    assert hits == 1
    _assert_equal(got, expected)


def test_a_step_from_the_cache_does_not_wait_in_eager_pytorch() -> None:
    expected, _ = _hits(lambda: _step(lambda: Net(0.0)))
    got, hits = _hits(lambda: _step(lambda: Net(0.0), options={"compile": "background"}))
    assert hits == 1
    _assert_equal(got, expected)


def test_an_inference_graph_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(5)
        model = Net(0.0).eval()
        with torch.no_grad():
            return [torch.compile(model, backend="max")(torch.randn(2, 3, 4, 4))]

    expected, _ = _hits(step)
    monkeypatch.delattr(backend, "compile_graph")
    got, hits = _hits(step)
    assert hits == 1
    _assert_equal(got, expected)


class Falling(nn.Module):
    """Has an op that MAX does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 3, 4, 4] to [N, 3, 4, 4]."""
        return torch.linalg.matrix_exp(x * self.scale).sin()


def test_ops_left_to_pytorch_are_told_again() -> None:
    def step() -> list[torch.Tensor]:
        compiler.fallback_warnings.forget()
        with pytest.warns(UserWarning, match="linalg_matrix_exp.* runs in PyTorch"):
            return _step(Falling)

    expected, _ = _hits(step)
    got, hits = _hits(step)
    assert hits == 1
    _assert_equal(got, expected)


def test_who_records_graphs_gets_graphs() -> None:
    _step(lambda: Net(0.0))
    with recorded_graphs() as graphs:
        _, hits = _hits(lambda: _step(lambda: Net(0.0)))
    assert hits == 0
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    assert all(executable.built.typed is not None for graph in graphs for executable in graph.executables)


class Scaled(nn.Module):
    """Compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[...] to [...]."""
        return (x * self.scale).tanh()


@pytest.mark.parametrize("compiling", [{"options": {"run": "graph"}}, {"dynamic": True}], ids=["graph", "dynamic"])
def test_graphs_that_max_compiles_and_symbolic_sizes_are_not_kept(compiling: dict[str, Any]) -> None:
    for _ in range(2):
        counters.clear()
        _step(Scaled, **compiling)
        found = counters["aot_autograd"]
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_what_cannot_be_read_is_compiled_anew(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _step(lambda: Net(0.0))
    monkeypatch.setattr(graph_cache, "_find", lambda facts, key: content)
    got, hits = _hits(lambda: _step(lambda: Net(0.0)))
    assert hits == 0
    _assert_equal(got, expected)


def test_what_cannot_be_made_ready_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _step(lambda: Net(0.0))
    made = backend.loaded
    names: list[str] = []

    def half(*arguments: Any) -> Any:
        graph = made(*arguments)
        names.append(graph.name)
        if len(names) == 2:
            raise ValueError("not this one")
        return graph

    monkeypatch.setattr(backend, "loaded", half)
    got, hits = _hits(lambda: _step(lambda: Net(0.0)))
    assert (hits, names) == (0, ["forward", "backward"])
    _assert_equal(got, expected)


def _traced() -> tuple[GraphModule, list[torch.Tensor]]:
    return symbolic_trace(nn.Tanh()), [torch.zeros(2)]


def test_facts_tell_what_lowering_looks_at() -> None:
    gm, inputs = _traced()

    def tag(**options: Any) -> str:
        facts = graph_cache.facts_of(gm, inputs, Options(**options))
        assert facts is not None
        return facts["state"]

    tags = {tag()}
    tags.add(tag(run="graph"))
    tags.add(tag(capture=True))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_default_dtype()
    try:
        torch.set_float32_matmul_precision("high" if before[0] == "highest" else "highest")
        tags.add(tag())
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = not before[1]
        tags.add(tag())
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.set_default_dtype(torch.float64)
        tags.add(tag())
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.set_default_dtype(before[2])
    assert len(tags) == 6
    assert tag(compile="background") in tags


def test_what_a_key_does_not_tell_is_not_kept() -> None:
    gm, inputs = _traced()
    with torch.autograd.graph.save_on_cpu():
        assert graph_cache.facts_of(gm, inputs, Options()) is None
    assert graph_cache.facts_of(gm, [], Options()) is None
    holding = symbolic_trace(nn.Tanh())
    object.__setattr__(holding, "constant", torch.ones(2))
    assert graph_cache.facts_of(holding, inputs, Options()) is None
    with torch.library._scoped_library("programs_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        own = symbolic_trace(lambda x: torch.ops.programs_test.twice(x))
        assert graph_cache.facts_of(own, inputs, Options()) is None


_SCRIPT = """
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from tests.graph.traces.test_cache import Net, _step
print([each.double().sum().item() for each in _step(lambda: Net(0.4))])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_saved"])
"""


def test_another_process_takes_the_step_without_tracing() -> None:
    environment = {**os.environ, "TORCH_COMPILE_CACHE_KEY_TAG": uuid.uuid4().hex}
    ran = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert ran[0][-2] == ran[1][-2]
    assert (ran[0][-1], ran[1][-1]) == ("0 1", "1 0")


def test_no_warning_where_nothing_falls_back() -> None:
    _step(lambda: Net(0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, hits = _hits(lambda: _step(lambda: Net(0.0)))
    assert hits == 1
