"""Steps that users write in other ways than forward, backward, update: always eager's numbers, never old ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.threads import in_threads
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime import executable


class Net(nn.Module):
    """Convolutions, a batch norm whose statistics are updated, and a sigmoid, whose result is the user's and saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4, L] to [N, 4, L - 2]."""
        return torch.sigmoid(self.second(torch.relu(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def graphs() -> Iterator[list[CompiledGraph]]:
    """What the module compiles."""
    with backend.recorded_graphs() as seen:
        yield seen


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="max", options={"fallback": "error"})


@pytest.fixture(scope="module")
def nets(graphs: list[CompiledGraph]) -> tuple[Net, nn.Module, Net]:
    """A model, the same compiled, and an equal one that stays in eager mode."""
    torch.manual_seed(5)
    torch._dynamo.reset()
    model = Net()
    return model, _compiled(model), copy.deepcopy(model)


@pytest.fixture
def pair(nets: tuple[Net, nn.Module, Net]) -> tuple[Net, nn.Module, Net]:
    """The same with equal parameters and statistics, and no gradients."""
    model, run, reference = nets
    reference.load_state_dict(model.state_dict())
    for net in (model, reference):
        net.zero_grad(set_to_none=True)
    return model, run, reference


def _batch() -> torch.Tensor:
    return torch.randn(6, 4, 16)


def _assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _both(pair: tuple[Net, nn.Module, Net], step: Callable[[Any], None]) -> None:
    """Runs ``step`` on the compiled model and on eager's, and compares gradients and statistics."""
    model, run, reference = pair
    step(run)
    step(reference)
    _assert_same_state(model, reference)


def test_a_graph_may_be_retained(pair: tuple[Net, nn.Module, Net]) -> None:
    x = _batch()

    def step(net: Any) -> None:
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    _both(pair, step)


def test_activations_live_until_the_backward_pass(pair: tuple[Net, nn.Module, Net]) -> None:
    model, run, _ = pair
    out = run(_batch())
    kept = {parameter.data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    saved = [
        StorageWeakRef(tensor.untyped_storage())
        for tensor in out.grad_fn.saved_tensors
        if tensor.data_ptr() not in kept
    ]
    assert len(saved) > 1 and not any(storage.expired() for storage in saved)
    loss = out.sum()
    del out
    loss.backward(retain_graph=True)
    assert not any(storage.expired() for storage in saved)
    loss.backward()
    assert all(storage.expired() for storage in saved)


def test_nothing_keeps_the_memory_of_a_large_step(graphs: list[CompiledGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX gets a call's memory back as a whole: neither a result that its user keeps nor a cache may hold a part."""
    results: list[Any] = []
    execute = executable.execute

    def watched(*args: Any) -> Any:
        returned = execute(*args)
        results.extend(returned)
        return returned

    monkeypatch.setattr(executable, "execute", watched)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv1d(4, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))
    run = torch.compile(model, backend="max", options={"fallback": "error", "run": "graph"})
    x = torch.randn(64, 4, 16_384)
    kept = []
    for _ in range(2):
        out = run(x)
        out.square().sum().backward()
        kept.append(out)
        model.zero_grad(set_to_none=True)
        assert all(e.built.computed_bytes > 2**26 for graph in graphs[-2:] for e in graph.executables)
        # The list's reference and the argument of the call.
        assert {sys.getrefcount(results[i]) for i in range(len(results))} == {2}
        results.clear()
    for out in kept:
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first_first", "last_first"])
def test_two_forwards_before_a_backward(pair: tuple[Net, nn.Module, Net], order: tuple[int, int]) -> None:
    xs = [_batch(), _batch()]

    def step(net: Any) -> None:
        losses = [net(x).square().sum() for x in xs]
        for number in order:
            losses[number].backward()

    _both(pair, step)


def test_gradients_accumulate(pair: tuple[Net, nn.Module, Net]) -> None:
    xs = [_batch() for _ in range(4)]

    def step(net: Any) -> None:
        for x in xs:
            net(x).square().mean().backward()

    _both(pair, step)


def test_an_error_in_the_middle_leaves_nothing_behind(pair: tuple[Net, nn.Module, Net]) -> None:
    xs = [_batch(), _batch()]

    def refuse(_: torch.Tensor) -> None:
        raise ArithmeticError("stop")

    def step(net: Any) -> None:
        out = net(xs[0])
        out.register_hook(refuse)
        with pytest.raises(ArithmeticError, match="stop"):
            out.sum().backward()
        net(xs[1]).square().sum().backward()

    _both(pair, step)


def test_weights_are_replaced_between_forward_and_backward(pair: tuple[Net, nn.Module, Net]) -> None:
    model, run, reference = pair
    x = _batch()
    new = torch.randn_like(model.second.weight)
    for net, owner in ((run, model), (reference, reference)):
        net(x).sum().backward()
        loss = net(x).square().sum()
        owner.second.weight.data = new.clone()
        loss.backward()
        net(x).square().sum().backward()
    _assert_same_state(model, reference)


def test_state_is_loaded_by_assignment(pair: tuple[Net, nn.Module, Net]) -> None:
    model, _, _ = pair
    x = _batch()
    state = {name: value.clone() for name, value in Net().state_dict().items()}

    def step(net: Any) -> None:
        owner = getattr(net, "_orig_mod", net)
        net(x).sum().backward()
        owner.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        net(x).square().sum().backward()

    _both(pair, step)
    assert torch.equal(model.first.weight, state["first.weight"])


def test_two_models_in_turn(pair: tuple[Net, nn.Module, Net]) -> None:
    model, run, reference = pair
    other = Net()
    other_reference = copy.deepcopy(other)
    other_run = _compiled(other)
    for _ in range(3):
        x = _batch()
        for first, second in ((run, other_run), (reference, other_reference)):
            losses = [first(x).square().sum(), second(x).sum()]
            losses[0].backward()
            losses[1].backward()
    _assert_same_state(model, reference)
    _assert_same_state(other, other_reference)


def test_threads_train_one_model(pair: tuple[Net, nn.Module, Net]) -> None:
    model, run, reference = pair
    xs = [_batch() for _ in range(4)]
    expected = [torch.autograd.grad(reference(x).square().sum(), list(reference.parameters())) for x in xs]
    failures: list[str] = []

    def work(number: int) -> None:
        for repeat in range(20):
            index = (number + repeat) % len(xs)
            found = torch.autograd.grad(run(xs[index]).square().sum(), list(model.parameters()))
            for a, b in zip(found, expected[index], strict=True):
                if not torch.allclose(a, b, rtol=1e-3, atol=1e-3):
                    failures.append(f"thread {number}, repeat {repeat}: {(a - b).abs().max()}")

    run(xs[0])
    in_threads(work, 4)
    assert not failures


def test_what_is_saved_may_be_packed(pair: tuple[Net, nn.Module, Net]) -> None:
    x = _batch()

    def step(net: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            loss = net(x).square().sum()
        loss.backward()

    _both(pair, step)


class _Negated(torch.autograd.Function):
    """The identity, whose gradient is a view that stands for its negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(gradient)


@pytest.mark.parametrize("kind", ["expanded", "permuted", "negated"])
def test_gradients_of_any_layout_enter(pair: tuple[Net, nn.Module, Net], kind: str) -> None:
    x, weight = _batch(), torch.randn(14, 4, 6)

    def step(net: Any) -> None:
        out = net(x)
        loss = {
            "expanded": lambda: out.sum(),
            "permuted": lambda: (out.permute(2, 1, 0) * weight).sum(),
            "negated": lambda: (_Negated.apply(out) * weight.permute(2, 1, 0)).sum(),
        }[kind]()
        loss.backward()

    _both(pair, step)


def test_writing_to_what_is_saved_is_noticed(pair: tuple[Net, nn.Module, Net]) -> None:
    def step(net: Any) -> None:
        out = net(_batch())
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    model, run, reference = pair
    step(reference)
    step(run)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_call_past_the_guards_is_refused(pair: tuple[Net, nn.Module, Net], graphs: list[CompiledGraph]) -> None:
    pair[1](_batch())
    forward = next(graph for graph in graphs if graph.name == "forward").executables[0]
    good: list[torch.Tensor] = [torch.zeros(1)] * (max(spec.position for spec in forward.built.inputs) + 1)
    for spec in forward.built.inputs:
        assert spec.shape is not None
        good[spec.position] = torch.ones(spec.shape, dtype=spec.dtype)
    forward.run(good)
    position = next(spec.position for spec in forward.built.inputs if spec.shape == (6, 4, 16))
    for bad, words in ((good[position][:3], "shape"), (good[position].double(), "float64")):
        with pytest.raises(ValueError, match=f"argument {position}.*{words}"):
            forward.run([*good[:position], bad, *good[position + 1 :]])


def test_results_share_no_memory() -> None:
    """A result is its user's alone, whatever MAX would hand out: an argument, a constant, one value twice."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return x.clone(), x.reshape(6).clone(), x[1:].clone(), y, y.clone(), torch.ones(3), x * 0 + torch.arange(3.0)

    run = torch.compile(function, backend="max", options={"fallback": "error"})
    for _ in range(3):
        x = torch.randn(2, 3)
        kept = x.clone()
        results = run(x)
        for number, result in enumerate(results):
            torch.testing.assert_close(result, function(kept)[number])
            result.fill_(number + 100)
            assert torch.equal(x, kept)
        assert [result.unique().tolist() for result in results] == [[number + 100.0] for number in range(7)]
