"""What users do around ``torch.compile``: each habit gives eager's numbers with nothing left to PyTorch, or
docs/habits.md says why not.

Tests share graphs, since each compilation costs seconds: those whose habit lies outside the graph use one model with
one input, those whose habit lies inside stand side by side in one graph.
"""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph

STRICT = {"fallback": "error"}
Contender = tuple[nn.Module, nn.Module]
"""What is called, and the module that holds the parameters."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test begins as a process does, and Dynamo's limit of recompilations raises rather than runs eager."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """The model whose graphs are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 5] of images [N, 3, H, W]."""
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


LABELS = torch.tensor([0, 1, 2, 3])


def loss(model: Callable[..., torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(images()).float(), LABELS)


def compiled(model: Any, backend: Any = "max", **settings: Any) -> Any:
    return torch.compile(model, backend=backend, options=STRICT, **settings)


def twins(make: Callable[[], nn.Module] = Net, **settings: Any) -> tuple[Contender, Contender]:
    """Ours, compiled, and eager's, of the same parameters."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    return (compiled(ours, **settings), ours), (theirs, theirs)


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    """Parameters and their gradients agree."""
    state = dict(theirs.named_parameters())
    for name, mine in ours.named_parameters():
        other = state[name]
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=tolerance, atol=tolerance)
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


# Outside the graph: one model, one input, one pair of graphs.


def test_retain_graph(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    for call, _ in pair:
        value = loss(call)
        value.backward(retain_graph=True)
        value.backward()
    assert_same(pair[0][1], pair[1][1])
    assert [graph.name for graph in graphs] == ["forward", "backward"]


def test_accumulation_and_clipping(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    for call, model in pair:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            (loss(call) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same(pair[0][1], pair[1][1])
    assert len(graphs) == 2


def test_averaged_model(graphs: list[CompiledGraph]) -> None:
    results = []
    for call, model in twins():
        average = AveragedModel(call, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss(call).backward()
            optimizer.step()
            average.update_parameters(call)
        results.append(average(images()))
        results[-1].sum().backward()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2, "a copy of a compiled model runs the graphs of the original"


def test_tensor_hooks(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    calls: list[list[str]] = [[], []]
    for (call, model), seen in zip(pair, calls, strict=True):
        model.head.weight.register_hook(lambda gradient: gradient * 3)
        model.head.bias.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append("accumulated"))
        loss(call).backward()
    assert_same(pair[0][1], pair[1][1])
    assert calls[0] == calls[1] == ["accumulated"]
    assert len(graphs) == 2


def test_a_module_hook_that_comes_later_is_seen_where_dynamo_guards_on_hooks() -> None:
    """PyTorch's default is that it does not, whatever the backend."""
    for guards, expected in ((False, 0.0), (True, 7.0)):
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=not guards):
            torch._dynamo.reset()
            torch.manual_seed(0)
            net = Net().requires_grad_(False)
            call = compiled(net)
            before = call(images())
            net.head.register_forward_hook(lambda module, inputs, output: output + 7)
            torch.testing.assert_close(call(images()) - before, torch.full((4, 5), expected), rtol=0, atol=1e-5)


def test_autocast_around_a_model(graphs: list[CompiledGraph]) -> None:
    """Its setting is part of the graph, which is compiled once more where it changes."""
    pair = twins()
    for call, _ in pair:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(call)
        (value + loss(call)).backward()
    assert_same(pair[0][1], pair[1][1], 2e-2)
    assert [graph.name for graph in graphs] == ["forward", "backward"] * 2


def test_unfrozen_layers_compile_once_more(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    for call, model in pair:
        for frozen in (True, False):
            model.conv.requires_grad_(not frozen)
            loss(call).backward()
    assert_same(pair[0][1], pair[1][1])
    assert [graph.name for graph in graphs] == ["forward", "backward"] * 2


def test_first_call_in_a_thread(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            loss(pair[0][0]).backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert not errors, errors
    loss(pair[1][0]).backward()
    assert_same(pair[0][1], pair[1][1])
    assert len(graphs) == 2


def test_data_loader_workers(graphs: list[CompiledGraph]) -> None:
    """Workers are forked after MAX's threads have begun."""
    data = torch.utils.data.TensorDataset(images(), LABELS)
    pair = twins()
    for call, _ in pair:
        loss(call).backward()
        for batch, labels in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
            F.cross_entropy(call(batch), labels).backward()
    assert_same(pair[0][1], pair[1][1])
    assert len(graphs) == 2


def test_copies_and_state_dicts(graphs: list[CompiledGraph]) -> None:
    (call, _), (_, theirs) = twins()
    loss(call).backward()
    state = call.state_dict()
    assert all(name.startswith("_orig_mod.") for name in state), "so torch.compile names them, whatever the backend"
    theirs.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state.items()})
    twin = copy.deepcopy(call)
    twin.zero_grad()
    twin.load_state_dict(state)
    kept = io.BytesIO()
    torch.save(call, kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    loaded.zero_grad()
    for model in (twin, loaded, theirs):
        loss(model).backward()
    for model in (twin, loaded):
        for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    in_place = copy.deepcopy(theirs)
    in_place.compile(backend="max", options=STRICT)
    assert in_place.state_dict().keys() == theirs.state_dict().keys(), "Module.compile leaves the names alone"
    assert len(graphs) == 2, "copies run the graphs of the original"


def test_checkpoint_around_a_compiled_model(graphs: list[CompiledGraph]) -> None:
    pair = twins()
    for call, _ in pair:
        F.cross_entropy(checkpoint(call, images(), use_reentrant=False), LABELS).backward()
    assert_same(pair[0][1], pair[1][1])
    assert len(graphs) == 2


def test_a_second_derivative_of_a_compiled_call_is_refused() -> None:
    """PyTorch refuses it for every backend that AOTAutograd serves; ``Penalty`` below is the way out."""
    call, _ = twins()[0]
    x = images().requires_grad_()
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()


def test_functional_transforms_of_a_compiled_call_run_in_eager(graphs: list[CompiledGraph]) -> None:
    """Dynamo compiles nothing that is called under a transform; compile the function that holds the transform."""
    (call, _), (eager, _) = twins()
    found = []
    for model in (call, eager):
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        found.append(grad(lambda p, model=model: loss(lambda x: functional_call(model, p, (x,))))(parameters))
    for mine, other in zip(*(gradients.values() for gradients in found), strict=True):
        torch.testing.assert_close(mine, other)
    assert not graphs


def test_export_for_inference(graphs: list[CompiledGraph]) -> None:
    (call, ours), (eager, _) = twins()
    for module in (ours, eager):
        module.requires_grad_(False).eval()
    for source in (ours, call):
        program = torch.export.export(source, (images(),)).module()
        torch.testing.assert_close(compiled(program)(images()), eager(images()), rtol=1e-5, atol=1e-5)
    assert {graph.name for graph in graphs} == {"inference"}


# Inside the graph: side by side in one.


class Checkpointed(Net):
    """Activation checkpointing of a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: F.relu(self.conv(x)), x, use_reentrant=False)
        return self.head(y.mean((2, 3)))


class Autocast(Net):
    """Autocast, in it a part without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
            assert y.dtype is torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                y = F.relu(y.float()).mean((2, 3))
            return self.head(y)


class Narrow(Net):
    """A model in a narrow type, with an input in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.head.weight.dtype))


class Hooked(Net):
    """Forward hooks that change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        self.head.register_forward_hook(lambda module, inputs, output: output * 2)


def _frozen() -> nn.Module:
    net = Net()
    net.conv.requires_grad_(False)
    return net


def _weight_norm() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.conv)
    return net


def _old_weight_norm() -> nn.Module:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net.conv)
    # Its weight is an attribute that autograd computes, which only a forward pass may copy.
    with torch.no_grad():
        net.conv.weight = net.conv.weight.detach()
    return net


def _spectral_norm() -> nn.Module:
    net = Net()
    parametrizations.spectral_norm(net.head)
    return net


INSIDE: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "checkpoint": (Checkpointed, 1e-5),
    "autocast": (Autocast, 2e-2),
    "in_bfloat16": (lambda: Narrow().bfloat16(), 2e-2),
    "in_half": (lambda: Narrow().half(), 5e-3),
    "frozen": (_frozen, 1e-5),
    "hooks": (Hooked, 1e-5),
    "weight_norm": (_weight_norm, 1e-5),
    "old_weight_norm": (_old_weight_norm, 1e-5),
    "spectral_norm": (_spectral_norm, 1e-5),
}


@pytest.fixture(scope="module")
def inside() -> tuple[nn.ModuleDict, nn.ModuleDict, list[CompiledGraph]]:
    """Ours and eager's after a backward pass, and our graphs."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    ours = nn.ModuleDict({name: make() for name, (make, _) in INSIDE.items()})
    theirs = copy.deepcopy(ours)

    def total(models: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.cross_entropy(model(x).float(), LABELS) for model in models.values()]).sum()

    with backend.recorded_graphs() as seen:
        compiled(total)(ours, images()).backward()
    total(theirs, images()).backward()
    return ours, theirs, seen


@pytest.mark.parametrize("habit", INSIDE)
def test_inside_a_graph(habit: str, inside: tuple[nn.ModuleDict, nn.ModuleDict, list[CompiledGraph]]) -> None:
    ours, theirs, seen = inside
    assert_same(ours[habit], theirs[habit], INSIDE[habit][1])
    assert [graph.name for graph in seen] == ["forward", "backward"]
    for name, buffer in ours[habit].named_buffers():
        torch.testing.assert_close(buffer, theirs[habit].get_buffer(name))


class Transforms(nn.Module):
    """torch.func inside a compiled function, a gradient penalty among it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
        parameters = dict(self.net.named_parameters())

        def of_one(image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
            return grad(lambda p: F.cross_entropy(functional_call(self.net, p, (image[None],)), label[None]))(
                parameters
            )

        value, along = jvp(self.net, (x,), (direction,))
        penalty = grad(lambda x: self.net(x).sum())(x).square().sum()
        return {"value": value, "along": along, "penalty": penalty, **vmap(of_one)(x, LABELS)}


def test_transforms_and_a_gradient_penalty_inside_a_graph(graphs: list[CompiledGraph]) -> None:
    pair = twins(Transforms)
    results = []
    for call, _ in pair:
        results.append(call(images(), images().flip(0)))
        (results[-1]["penalty"] + results[-1]["value"].square().sum()).backward()
    for name, mine in results[0].items():
        torch.testing.assert_close(mine, results[1][name], rtol=1e-5, atol=1e-5)
    assert_same(pair[0][1], pair[1][1])
    assert [graph.name for graph in graphs] == ["forward", "backward"]


# Sizes that change.


class Pooled(nn.Module):
    """Every kind of pooling over extents that change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 3, 2, 2] of images [N, 3, H, W]."""
        y = F.max_pool2d(x * self.scale, 3, stride=2, padding=1)
        y = F.avg_pool2d(y, 2, ceil_mode=True)
        return F.adaptive_avg_pool2d(y, 2) + F.adaptive_max_pool2d(y, 2)


def _at_sizes(pair: tuple[Contender, Contender], shapes: list[tuple[int, ...]], mark: bool = False) -> None:
    generator = torch.Generator().manual_seed(2)
    for shape in shapes:
        x = torch.randn(shape, generator=generator)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        for call, _ in pair:
            call(x).square().mean().backward()
    assert_same(pair[0][1], pair[1][1])


BATCHES = [(count, 3, 8, 8) for count in (4, 6, 3)]


def test_another_batch_size_compiles_once_more(graphs: list[CompiledGraph]) -> None:
    _at_sizes(twins(), BATCHES)
    assert [graph.name for graph in graphs] == ["forward", "backward"] * 2


def test_a_marked_batch_size_compiles_once(graphs: list[CompiledGraph]) -> None:
    _at_sizes(twins(), BATCHES, mark=True)
    assert [graph.name for graph in graphs] == ["forward", "backward"]


def test_all_sizes_dynamic_pooling_among_them_compile_once(graphs: list[CompiledGraph]) -> None:
    pair = twins(Pooled, dynamic=True)
    _at_sizes(pair, [(2, 3, 16, 12), (3, 3, 9, 21), (4, 3, 15, 11)])
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    assert all(len(graph.executables) == 1 for graph in graphs), "nothing cuts the graph"


def test_draws_over_dynamic_sizes_do_not_cut_the_graph(graphs: list[CompiledGraph]) -> None:
    """They are hoisted; their sizes are computed of those that the graph is given."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x * 2, 0.3).flatten()
        return F.dropout(y, 0.5) + torch.rand_like(y)

    call = compiled(noisy, dynamic=True)
    for count in (4, 6):
        x = torch.randn(count, 6)
        results = []
        for function in (call, noisy):
            torch.manual_seed(0)
            results.append(function(x))
        torch.testing.assert_close(*results)
    assert [len(graph.executables) for graph in graphs] == [1]


# Several models in turn.


def test_two_models_in_turn(graphs: list[CompiledGraph]) -> None:
    """A generator and a discriminator, each with its own optimizer."""
    z, real = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).unbind()
    pairs = [twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(2)]
    for (generate, generator), (judge, discriminator) in zip(*pairs, strict=True):
        steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (discriminator, generator)]
        for _ in range(2):
            fake = generate(z)
            steps[0].zero_grad()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            steps[0].step()
            steps[1].zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            steps[1].step()
    for ours, theirs in pairs:
        assert_same(ours[1], theirs[1])
    assert len(graphs) == 4, (
        "models of one architecture share graphs: one pair for an input with a gradient, one without"
    )
