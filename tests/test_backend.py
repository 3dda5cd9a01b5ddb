"""The backend as users meet it: registration, options, fallback, mutation, random ops, dynamic sizes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_max_backend import (
    MaxBackendError,
    OptionError,
    UnsupportedOpError,
    backend,
    explain,
    max_backend,
)
from torch_max_backend.graph import compiler
from torch_max_backend.graph.compiler import CompiledGraph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiler.warned.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Iterator[list[CompiledGraph]]:
    """The graphs that the test compiles."""
    seen: list[CompiledGraph] = []
    backend.observers.append(seen.append)
    yield seen
    backend.observers.remove(seen.append)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="max", options=options or None)


def test_the_name_is_registered_without_an_import() -> None:
    code = "import torch; from torch._dynamo.backends.registry import lookup_backend; print(lookup_backend('max'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "max_backend" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [({"fallbck": "error"}, "fallbck"), ({"fallback": "never"}, "'never'"), ({"fallback": 3}, "3")],
)
def test_wrong_options_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        torch.compile(torch.relu, backend="max", options=options)(torch.ones(2))


def test_a_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="mode"):
        torch.compile(torch.relu, backend="max", mode="max-autotune")(torch.ones(2))


def _with_unsupported(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + 1
    return torch.linalg.inv(y @ y.T + torch.eye(3)) * 2


def test_an_unsupported_op_cuts_the_graph_with_one_warning(graphs: list[CompiledGraph]) -> None:
    x = torch.randn(3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(_with_unsupported)(x)
    torch.testing.assert_close(got, _with_unsupported(x))
    told = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    (inverse,) = (text for text in told if "linalg_inv_ex" in text)
    assert "float32[3, 3]" in inverse
    ops = [refusal.op for refusal in graphs[0].refusals]
    assert len(told) == len(set(ops)), "one warning for each op"
    assert len(graphs[0].executables) == 2 and "aten.linalg_inv_ex.default" in ops


def test_fallback_error_names_op_arguments_and_line() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        compiled(_with_unsupported, fallback="error")(torch.randn(3, 5))
    assert caught.value.op == "aten.linalg_inv_ex.default"
    assert "float32[3, 3]" in caught.value.arguments
    assert caught.value.user_line is not None and "torch.linalg.inv(y @ y.T" in caught.value.user_line


def test_gradients_flow_through_a_cut_graph() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(_with_unsupported)(x).sum().backward()
    _with_unsupported(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-5)


def test_complex_and_sparse_tensors_stay_in_pytorch() -> None:
    def spectrum(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(torch.relu(x)).abs() + 1

    x = torch.randn(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(compiled(spectrum)(x), spectrum(x))
        sparse = torch.eye(3).to_sparse()
        product = compiled(lambda a, b: torch.sparse.mm(a, b) + 1)(sparse, torch.ones(3, 2))
    torch.testing.assert_close(product, torch.full((3, 2), 2.0))


def test_meta_and_mixed_devices_raise_instead_of_crashing() -> None:
    with pytest.raises((MaxBackendError, RuntimeError), match=r"meta|device"):
        compiled(lambda a, b: a + b)(torch.ones(2), torch.ones(2, device="meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_exception() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, device="cuda")
        x.meta["val"] = fake
        y = graph.call_function(torch.ops.aten.relu.default, (x,))
        y.meta["val"] = fake
    graph.output((y,))
    unit = compiler.CompilationUnit("gpu")
    with pytest.raises(MaxBackendError, match="accelerator"):
        compiler.compile_graph(torch.fx.GraphModule(nn.Module(), graph), unit, backend.Options(), "gpu")


class _Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = F.dropout(x, 0.3) + torch.rand_like(x)
        z = torch.bernoulli(y, 0.25) * torch.randn(3, 4)
        return [y, z, F.dropout(z + 1, 0.5), torch.randint(0, 9, (5,)) + 1]


def test_random_ops_draw_what_eager_draws(graphs: list[CompiledGraph]) -> None:
    model, x = _Noisy().train(), torch.randn(3, 4)
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    got = compiled(model, fallback="error")(x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert len(graphs[0].executables) == 1, "random ops must not cut the graph"
    torch.manual_seed(5)
    model(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    compiled(model)(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_and_arguments_are_updated_in_place(graphs: list[CompiledGraph]) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            y.mul_(2).t().add_(1)
            return self.total * 2

    ours, theirs = Counter(), Counter()
    run = compiled(ours, fallback="error")
    y, twin = torch.ones(4, 2), torch.ones(4, 2)
    strided, twin_strided = torch.ones(2, 4).t(), torch.ones(2, 4).t()
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(5, 3)
            version = ours.total._version
            torch.testing.assert_close(run(x, y), theirs(x, twin))
            assert ours.total._version > version
        torch.testing.assert_close(run(x, strided), theirs(x, twin_strided))
    torch.testing.assert_close(ours.total, theirs.total)
    assert torch.equal(y, twin) and torch.equal(strided, twin_strided)


def test_one_graph_serves_every_batch_size(graphs: list[CompiledGraph]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    run = torch.compile(model, backend="max", dynamic=True, options={"fallback": "error"})
    for batch in (4, 7, 2):
        x = torch.randn(batch, 3, 8, 8)
        y = run(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
        y.sum().backward()
    assert len(graphs) == 2, [graph.name for graph in graphs]


def test_strided_inputs_are_copied_and_outputs_keep_their_strides() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.permute(1, 0, 2) + 1

    run = compiled(function)
    base = torch.randn(4, 6, 8)
    for x in (base, base[::2, :, 1::2], base.permute(2, 0, 1), base[1:3, :1].expand(2, 5, 8)):
        for got, expected in zip(run(x), function(x), strict=True):
            torch.testing.assert_close(got, expected)


def test_explain_counts_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        account = explain(_with_unsupported, torch.randn(3, 5, requires_grad=True))
    assert [graph.name for graph in account.graphs] == ["forward", "backward"]
    assert account.fallback_count >= 1 and account.max_op_count > 5
    printed = capsys.readouterr().out
    assert "linalg_inv_ex" in printed and "no lowering" in printed
    assert "linalg_inv_ex" in str(account)


def test_an_output_that_is_an_input_comes_back_itself() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + 1

    x = torch.randn(3)
    same, more = compiled(function)(x)
    assert torch.equal(same, x) and torch.equal(more, x + 1)


def test_the_callable_can_be_passed_as_the_backend() -> None:
    x = torch.randn(3)
    assert torch.equal(torch.compile(torch.relu, backend=max_backend)(x), torch.relu(x))
