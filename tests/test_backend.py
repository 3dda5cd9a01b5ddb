"""The backend as users meet it: options, fallback, mutation, random ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from torch_max_backend.graph.compiled import CompiledGraph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiler.fallback_warnings.forget()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="max", options=options or None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fallbck": "error"}, "fallbck"),
        ({"fallback": "never"}, "'never'"),
        ({"fallback": 3}, "3"),
        ({"capture": "yes"}, "'yes'"),
    ],
)
def test_wrong_options_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        torch.compile(torch.relu, backend="max", options=options)(torch.ones(2))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="'fastest': expected one of 'default', 'reduce-overhead'"):
        torch.compile(torch.relu, backend="max", mode="fastest")(torch.ones(2))


def _with_unsupported(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x) + 1
    spectrum = torch.fft.rfft(y.detach() * 2).abs() + 1
    return torch.lgamma(y * 3) * 2, spectrum


def test_an_unsupported_op_cuts_the_graph_with_one_warning(graphs: list[CompiledGraph]) -> None:
    """Complex tensors stay in PyTorch; gradients flow through the cut graph; ``explain`` tells the same."""
    x = torch.randn(3, 5, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(_with_unsupported)(x)
        got[0].sum().backward()
    expected = _with_unsupported(twin)
    expected[0].sum().backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-5)
    told = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    (line,) = (text for text in told if "aten.lgamma" in text)
    assert "float32[3, 5]" in line
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    forward, backward = ({refusal.op for refusal in graph.refusals} for graph in graphs)
    assert len(told) == len(forward | backward), "one warning for each op"
    assert {"aten.lgamma.default", "aten._fft_r2c.default"} <= forward
    assert len(graphs[0].executables) >= 2


def test_fallback_error_names_op_arguments_and_line() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        compiled(lambda x: torch.lgamma(x * 3) + 1, fallback="error")(torch.randn(3, 5))
    assert caught.value.op == "aten.lgamma.default"
    assert "float32[3, 5]" in caught.value.arguments
    assert caught.value.user_line is not None and "torch.lgamma(x * 3)" in caught.value.user_line


def test_explain_counts_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        account = explain(_with_unsupported, torch.randn(3, 5, requires_grad=True))
    assert [graph.name for graph in account.graphs] == ["forward", "backward"]
    assert account.fallback_count >= 1 and account.max_op_count > 5
    printed = capsys.readouterr().out
    assert "lgamma" in printed and "no lowering" in printed
    assert "lgamma" in str(account)


def test_explain_counts_launches() -> None:
    account = explain(lambda x: (x.softmax(1) + 1).sum(), torch.randn(3, 5), quiet=True, compile=False)
    (graph,) = account.graphs
    assert graph.launches["reduction"] >= 2 and set(graph.launches) <= {"reduction", "pointwise"}
    assert f"reduction {graph.launches['reduction']}" in str(account)


def test_sparse_tensors_stay_in_pytorch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        product = compiled(torch.sparse.mm)(torch.eye(3).to_sparse(), torch.ones(3, 2))
    torch.testing.assert_close(product, torch.ones(3, 2))


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


class _Everything(nn.Module):
    """Several behaviours in one graph, since each compilation takes a third of a minute; a test looks at each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(
        self, x: torch.Tensor, changed: list[torch.Tensor], strided: list[torch.Tensor]
    ) -> dict[str, list[torch.Tensor] | torch.Tensor]:
        y = F.dropout(x, 0.3) + torch.rand_like(x)
        z = torch.bernoulli(y, 0.25) * torch.randn(5, 3)
        noise = [y, z, F.dropout(z + 1, 0.5), torch.randint(0, 9, (5,)) + 1]
        # What libraries hand on: their caller's generator, of which there is none.
        noise += [make(5, 3, generator=None) + 1 for make in (torch.randn, torch.rand)]
        noise += [torch.randperm(6, generator=None) + 1, torch.randint(2, 9, (4,), generator=None) + 1]
        noise += [torch.bernoulli(x.sigmoid()) + 1, torch.rand(2) + 1]
        self.total.add_(x.sum(0))
        for tensor in changed:
            tensor.mul_(2).t().add_(1)
        permuted = [result for s in strided for result in (s * 2, s.permute(1, 0, 2) + 1)]
        return {"noise": noise, "total": self.total * 2, "permuted": permuted, "same": x}


@dataclass
class _Calls:
    """Two calls of ``_Everything`` by our backend and by eager, with the same seeds and equal inputs."""

    graphs: list[CompiledGraph]
    ours: list[dict[str, Any]]
    eager: list[dict[str, Any]]
    inputs: list[torch.Tensor]
    changed: tuple[list[torch.Tensor], list[torch.Tensor]]
    totals: tuple[torch.Tensor, torch.Tensor]
    versions: list[int]
    random_states: list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def everything() -> _Calls:
    torch._dynamo.reset()
    ours, eager = _Everything().train(), _Everything().train()
    # The callable serves as the backend's name does.
    run = torch.compile(ours, backend=max_backend, options={"fallback": "error"})
    base = torch.randn(4, 6, 8)
    strided = [base, base[::2, :, 1::2], base.permute(2, 0, 1), base[1:3, :1].expand(2, 5, 8)]
    changed = tuple([torch.ones(4, 2), torch.ones(2, 4).t()] for _ in range(2))
    with backend.recorded_graphs() as seen, torch.no_grad():
        calls = _Calls(seen, [], [], [], changed, (ours.total, eager.total), [ours.total._version], [])
        for seed in (5, 6):
            x = torch.randn(5, 3)
            torch.manual_seed(seed)
            calls.eager.append(eager(x, changed[1], strided))
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            calls.ours.append(run(x, changed[0], strided))
            calls.random_states.append((torch.get_rng_state(), state))
            calls.inputs.append(x)
            calls.versions.append(ours.total._version)
    assert [graph.name for graph in seen] == ["inference"]
    assert len(seen[0].executables) == 1, "random ops and mutations must not cut the graph"
    return calls


def test_random_ops_draw_what_eager_draws(everything: _Calls) -> None:
    for got, expected in zip(everything.ours, everything.eager, strict=True):
        for a, b in zip(got["noise"], expected["noise"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert not torch.equal(everything.ours[0]["noise"][3], everything.ours[1]["noise"][3])
    for got, expected in everything.random_states:
        assert torch.equal(got, expected)


def _chosen(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draws around two whose distribution depends on data; only their order tells what the later ones draw."""
    y = F.dropout(x.exp() + 1, 0.3)
    first = torch.multinomial(y + 0.1, 2)
    z = F.dropout(x * 2, 0.5) + torch.rand(5, 3)
    second = torch.multinomial(x.square() + 0.1, 2)
    return y, first, z, second, F.dropout(z + 1, 0.4) * y


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_draws_behind_one_that_stays_in_pytorch_wait_for_it() -> None:
    torch._dynamo.reset()
    results = []
    with backend.recorded_graphs() as graphs:
        for call in (_chosen, torch.compile(_chosen, backend="max")):
            x = torch.linspace(-1, 1, 15).reshape(5, 3).requires_grad_()
            torch.manual_seed(7)
            values = call(x)
            sum(value.sum() for value in values if value.is_floating_point()).backward()
            results.append([*values, x.grad, torch.get_rng_state(), torch.rand(3)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected)
    assert [{refusal.op for refusal in graph.refusals} for graph in graphs] == [{"aten.multinomial.default"}, set()]


def test_buffers_and_arguments_are_updated_in_place(everything: _Calls) -> None:
    ours, theirs = everything.totals
    torch.testing.assert_close(ours, theirs)
    assert sorted(set(everything.versions)) == everything.versions, "each call raises the buffer's version"
    for got, expected in zip(everything.ours, everything.eager, strict=True):
        torch.testing.assert_close(got["total"], expected["total"])
    for tensor, twin in zip(*everything.changed, strict=True):
        assert torch.equal(tensor, twin) and tensor.stride() == twin.stride()
        assert not torch.equal(tensor, torch.ones_like(tensor))


def test_strided_inputs_are_copied_and_outputs_keep_their_strides(everything: _Calls) -> None:
    for got, expected in zip(everything.ours, everything.eager, strict=True):
        assert len(got["permuted"]) == 8
        for a, b in zip(got["permuted"], expected["permuted"], strict=True):
            torch.testing.assert_close(a, b, check_stride=True)


def test_an_output_that_is_an_input_comes_back_itself(everything: _Calls) -> None:
    for got, x in zip(everything.ours, everything.inputs, strict=True):
        assert got["same"] is x or got["same"].data_ptr() == x.data_ptr()
