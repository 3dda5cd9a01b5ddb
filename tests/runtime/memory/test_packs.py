"""What a forward graph keeps shares few tensors, and everything that users do to autograd stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.threads import in_threads
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.memory import packs

Net = Callable[..., torch.Tensor]


class Blocks(nn.Module):
    """Keeps several activations, one of them shown."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 6] to [N, 6]; tanh's result is what its gradient needs."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return torch.tanh(x)


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[nn.Module, Net, nn.Module, list[CompiledGraph]]]:
    """A model, its compiled form, its twin in eager and the graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    with recorded_graphs() as graphs:
        run = torch.compile(model, backend="max", fullgraph=True)
        run(_batch()).sum().backward()
    yield model, run, copy.deepcopy(model), list(graphs)


@pytest.fixture
def pair(compiled: Any) -> tuple[nn.Module, Net, nn.Module]:
    """A compiled model and its twin, without gradients."""
    model, run, twin, _ = compiled
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
    return model, run, twin


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def _packs_of(out: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for tensor in out.grad_fn.saved_tensors if tensor.dtype == torch.uint8]  # type: ignore[union-attr]


def _same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def _both(pair: tuple[nn.Module, Net, nn.Module], step: Callable[[Net], object]) -> None:
    model, run, twin = pair
    step(run)
    step(twin)
    _same_gradients(model, twin)


def test_activations_share_a_tensor(compiled: Any) -> None:
    model, run, _, graphs = compiled
    forward, backward = graphs
    out = run(_batch())
    kept = out.grad_fn.saved_tensors
    (pack,) = _packs_of(out)
    assert forward.packing is not None and forward.packing.sizes == (pack.numel(),)
    assert len(forward.packing.values) >= 6 and len(kept) == 1 + len(forward.packing.others)
    (executable,) = backward.executables
    assert executable.takes_packs and executable.built.inputs[0].dtype == torch.uint8
    # Parameters, inputs and results stay what they are, so that PyTorch sees who writes to them.
    places = {tensor.data_ptr() for tensor in kept}
    assert out.data_ptr() in places and {layer.weight.data_ptr() for layer in model.layers[1:]} <= places


def test_steps_are_eagers(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    def several(net: Net) -> None:
        first, second = net(_batch(1)), net(_batch(2))
        first.square().sum().backward(retain_graph=True)
        first.sum().backward()
        second.square().sum().backward()

    _both(pair, several)


def test_an_exception_midway_leaves_nothing_behind(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    model, run, _ = pair

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for hooked in (lambda out: out, lambda out: model.layers[0].weight):
        out = run(_batch())
        handle = hooked(out).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        handle.remove()
    model.zero_grad(set_to_none=True)
    _both(pair, lambda net: net(_batch()).square().sum().backward())


@pytest.mark.parametrize("what", ["parameter", "result", "view of the result"])
def test_writing_to_what_is_kept_is_noticed(pair: tuple[nn.Module, Net, nn.Module], what: str) -> None:
    model, run, _ = pair
    out = run(_batch())
    written = {"parameter": model.layers[2].weight, "result": out, "view of the result": out[1:]}[what]
    with torch.no_grad():
        written.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_pass_is_refused(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    out = pair[1](_batch())
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_double_backward_is_refused(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    x = _batch().requires_grad_()
    (gradient,) = torch.autograd.grad(pair[1](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() * tensor.element_size() + 4, dtype=torch.uint8)
    return room[4:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("kind", ["on the CPU", "copied", "unaligned"])
def test_hooks_may_copy_packs(pair: tuple[nn.Module, Net, nn.Module], kind: str) -> None:
    hooks = {
        "on the CPU": torch.autograd.graph.save_on_cpu,
        "copied": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
        "unaligned": lambda: torch.autograd.graph.saved_tensors_hooks(_unaligned, lambda tensor: tensor),
    }[kind]

    def step(net: Net) -> None:
        with hooks():
            out = net(_batch())
        out.square().sum().backward()

    _both(pair, step)


def test_a_hook_that_changes_the_dtype_is_told(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float()):
        out = pair[1](_batch())
    with pytest.raises(ValueError, match=r"expected torch\.uint8"):
        out.sum().backward()


def test_compiled_under_hooks_nothing_is_packed() -> None:
    """Hooks may look at what they get: who has them gets the activations."""
    torch._dynamo.reset()
    seen: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.dtype)
        return tensor

    model = Blocks()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(model, backend="max")(_batch()).sum().backward()
    assert len(seen) > 6 and torch.uint8 not in seen


def test_with_compiled_autograd_nothing_is_packed() -> None:
    """It traces the backward graph, which takes activations."""
    torch._dynamo.reset()
    model = Blocks()
    twin = copy.deepcopy(model)

    @torch.compile(backend="max")
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with recorded_graphs() as graphs, torch._dynamo.config.patch(compiled_autograd=True):
        step(_batch())
    twin(_batch()).sum().backward()
    assert graphs and all(graph.packing is None for graph in graphs)
    _same_gradients(model, twin)


def test_checkpointed_calls_are_packed_alike(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    def step(net: Net) -> None:
        x = _batch().requires_grad_()
        checkpoint(net, checkpoint(net, x, use_reentrant=False), use_reentrant=False).square().sum().backward()

    _both(pair, step)


def test_threads_have_packs_of_their_own(pair: tuple[nn.Module, Net, nn.Module]) -> None:
    model, run, twin = pair
    expected = [torch.autograd.grad(twin(_batch(seed)).sum(), list(twin.parameters())) for seed in range(3)]
    differences: list[str] = []

    def work(seed: int) -> None:
        for _ in range(10):
            found = torch.autograd.grad(run(_batch(seed)).sum(), list(model.parameters()))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected[seed], strict=True)):
                differences.append(f"thread {seed}")

    in_threads(work, 3)
    assert not differences


class _PartlyLowered(torch.autograd.Function):
    """The exponential; its gradient has an operation that stays in PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.exp()
        ctx.save_for_backward(out * 1)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return gradient * kept + 0 * torch.special.bessel_j0(kept)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_a_backward_graph_in_pieces_takes_packs() -> None:
    torch._dynamo.reset()
    model = Blocks()
    twin = copy.deepcopy(model)

    def function(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return _PartlyLowered.apply(net(x)) * 2

    with recorded_graphs() as graphs:
        torch.compile(function, backend="max", fullgraph=True)(model, _batch()).sum().backward()
    function(twin, _batch()).sum().backward()
    forward, backward = graphs
    assert forward.packing is not None and backward.refusals
    assert not any(executable.takes_packs for executable in backward.executables)
    _same_gradients(model, twin)


class _KeptGradient(torch.autograd.Function):
    """The sum of exponentials, for a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x.exp()
        ctx.save_for_backward(kept)
        return kept.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return kept


def test_a_kept_value_may_be_a_gradient() -> None:
    torch._dynamo.reset()
    model = Blocks()

    def function(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _KeptGradient.apply(y) + net(x).sum()

    gradients = []
    with recorded_graphs() as graphs:
        for run in (torch.compile(function, backend="max", fullgraph=True), function):
            y = _batch(7).requires_grad_()
            run(model, _batch(), y).backward()
            gradients.append(y.grad)
    assert graphs[0].packing is not None
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_a_forward_graph_in_pieces_packs_nothing() -> None:
    torch._dynamo.reset()
    model = Blocks()
    twin = copy.deepcopy(model)

    def function(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(net(x) + 0 * torch.special.bessel_j0(x))

    with recorded_graphs() as graphs:
        torch.compile(function, backend="max", fullgraph=True)(model, _batch()).sum().backward()
    function(twin, _batch()).sum().backward()
    assert graphs[0].refusals and graphs[0].packing is None
    _same_gradients(model, twin)


@pytest.mark.parametrize("options", [{"run": "launches"}, {"run": "graph"}], ids=["launches", "graph"])
def test_symbolic_sizes_are_not_packed(options: dict[str, str]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    twin = copy.deepcopy(model)
    with recorded_graphs() as graphs:
        run = torch.compile(model, backend="max", dynamic=True, options=options)
        for rows in (5, 7):
            for net in (run, twin):
                net(_batch().repeat(2, 1)[:rows]).square().sum().backward()
    assert all(graph.packing is None for graph in graphs)
    _same_gradients(model, twin)


def test_small_packs_and_large_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several packs, a value in none of them, and the numbers that come of it."""
    torch._dynamo.reset()
    monkeypatch.setattr(packs, "MIN_LIMIT", 1024)
    monkeypatch.setattr(packs, "_LARGEST", 0)

    def function(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ x.T) @ x * torch.sigmoid(x)
        return (torch.exp(wide) * torch.cos(torch.exp(wide)) @ wide.T).sum() + x.sum()

    gradients = []
    with recorded_graphs() as graphs:
        for net in (torch.compile(function, backend="max", fullgraph=True), function):
            leaves = [_batch().requires_grad_(), torch.randn(5, 300, generator=torch.Generator().manual_seed(3))]
            leaves[1].requires_grad_()
            net(*leaves).backward()
            gradients.append([leaf.grad for leaf in leaves])
    packing = graphs[0].packing
    assert packing is not None and len(packing.sizes) > 1 and max(packing.sizes) <= 1024
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_models_in_turn() -> None:
    torch._dynamo.reset()
    torch.manual_seed(4)
    models = [Blocks(), nn.Sequential(Blocks(), nn.Linear(6, 2))]
    twins = copy.deepcopy(models)
    runs = [torch.compile(model, backend="max") for model in models]
    for nets in (runs, twins):
        for seed in range(3):
            (nets[0](_batch(seed)).sum() + nets[1](nets[0](_batch(seed))).square().sum()).backward()
    for model, twin in zip(models, twins, strict=True):
        _same_gradients(model, twin)
