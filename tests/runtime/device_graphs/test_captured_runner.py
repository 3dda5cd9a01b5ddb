"""Captured launch lists beside plain ones, bit for bit; a CPU stands for a GPU, where a replay walks the list."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from torch_max_backend.backend import recorded_graphs
from torch_max_backend.dtypes import max_dtype
from torch_max_backend.launch_list import listing
from torch_max_backend.max_compat import make_dlpack_capsule
from torch_max_backend.runtime.device_graphs import captured_runner
from torch_max_backend.runtime.device_graphs.capture import Capture
from torch_max_backend.runtime.device_graphs.captured_runner import CapturedRunner
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.launching import runner
from torch_max_backend.runtime.launching.runner import Drawn
from torch_max_backend.runtime.memory.shared_storage import SharedStorage
from torch_max_backend.torch_compat import tensor_of_capsule


@pytest.fixture(autouse=True)
def small_values_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MIN_REUSED", 1)


class OneQueue:
    """A device with one queue."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    turn = lane

    def synchronize(self) -> None:
        """Nothing is queued."""

    give_back = synchronize


class Walked(CapturedRunner):
    """Replays by walking over the memory that was recorded."""

    def _record(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        workspace: torch.Tensor,
        written_over: Sequence[torch.Tensor],
    ) -> tuple[torch.cuda.CUDAGraph, Drawn]:
        addresses, places = [tensor.data_ptr() for tensor in tensors], list(map(place, results))
        memory = list(map(place, written_over))
        # Recording draws nothing: what is here is written by each replay.
        state = torch.get_rng_state()
        drawn = self.draw()
        torch.set_rng_state(state)
        drawn_places = list(map(place, drawn.tensors))

        def replay() -> None:
            for target, source in zip(drawn_places, self.draw().tensors, strict=True):
                target.copy_(source)
            self.walk([*addresses, *drawn.addresses], places, workspace, memory)

        return cast(torch.cuda.CUDAGraph, SimpleNamespace(replay=replay)), drawn


def place(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that does not keep it: a device graph knows addresses."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    capsule = make_dlpack_capsule(
        (), tensor.data_ptr(), 1, 0, max_dtype(tensor.dtype), tensor.shape, tensor.stride(), None
    )
    return tensor_of_capsule(capsule)


def capture(executable: Executable, patience: int) -> Capture:
    """Lets a compiled list be replayed."""
    queue = cast(Any, OneQueue())
    capturing = Capture(executable.name, patience)
    with mock.patch.object(captured_runner, "stream_sync", lambda _: queue):
        executable.runner = Walked(executable.runner_spec(), capturing, executable.outputs.not_lent)
    executable.capture = capturing
    return capturing


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def drawing_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def wide_net() -> nn.Module:
    """Both of its graphs need a workspace."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048), nn.Softmax(1), nn.Linear(2048, 512))


def train(model: nn.Module, variant: str, captured: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Outputs, parameters and buffers of a run, and how often its graphs were replayed."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []
    captures: list[Capture] = []
    with recorded_graphs() as graphs:
        run = torch.compile(model, backend="max", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad(set_to_none=variant != "grads stay")
            outputs = [run(torch.randn(5, 6)) for _ in range(2 if variant == "two forwards" else 1)]
            for out in outputs:
                for _ in range(2 if variant == "graph is kept" else 0):
                    out.square().mean().backward(retain_graph=True)
                out.square().mean().backward()
            optimizer.step()
            seen += [out.detach() for out in outputs]
            if step == 0 and captured:
                captures = [
                    capture(each, 3 if graph.name == "forward" else 5) for graph in graphs for each in graph.executables
                ]
            for name, buffer in list(model[1].named_buffers()):
                if (variant == "statistics move" and step == 8) or variant == "statistics keep moving":
                    setattr(model[1], name, buffer.clone())
            if variant == "statistics overlap" and step == 8:
                both = torch.zeros(8)
                model[1].running_mean, model[1].running_var = both, both
    return [*seen, *model.parameters(), *model.buffers()], [each.replays for each in captures]


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "two forwards",
        "grads stay",
        "statistics move",
        "statistics keep moving",
        "statistics overlap",
        "graph is kept",
    ],
)
@pytest.mark.parametrize("make", [net, drawing_net])
def test_captured_steps_are_the_plain_ones(make: Callable[[], nn.Module], variant: str) -> None:
    model = make()
    expected, none = train(copy.deepcopy(model), variant, False)
    found, replays = train(model, variant, True)
    least = {"two forwards": 1, "graph is kept": 0}
    assert not none and len(replays) == 2 and max(replays) >= 3 and min(replays) >= least.get(variant, 3)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {number} differs"


def test_what_is_kept_is_read_where_it_was_left() -> None:
    """A replayed backward graph reads the replayed forward graph's pack, and copies it nowhere."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(net(), backend="max", fullgraph=True)
        run(torch.randn(5, 6)).sum().backward()
    (forward,), (backward,) = (graph.executables for graph in graphs)
    capturing = [capture(forward, 3), capture(backward, 8)]
    # Both graphs' arguments stay where they are, whatever the allocator does: a capture waits for those that move.
    x, slopes = torch.randn(5, 6), torch.randn(5, 3)
    for _ in range(12):
        run(x).backward(slopes)
        run.zero_grad(set_to_none=True)
    assert [each.replays for each in capturing] == [12 - 2, 12 - 7]
    assert forward.packing is not None and backward.takes_packs
    assert backward.built.inputs[0].dtype == torch.uint8 and not capturing[1].copied
    # And written over there, not in memory of its own.
    assert isinstance(backward.runner, CapturedRunner)
    recorded = backward.runner.recorded
    assert recorded is not None and backward.listing is not None
    assert backward.listing.reused and not recorded.elsewhere


def test_statistics_are_written_where_they_lie() -> None:
    """A replay leaves none of them to a copy."""
    model = net()
    with mock.patch("torch_max_backend.runtime.tensors.leaving.copy_all") as copies:
        _, replays = train(model, "plain", True)
    assert min(replays) > 3 and not copies.called


def test_results_memory_goes_with_the_model() -> None:
    made: list[weakref.ref[SharedStorage]] = []

    def noted(*arguments: Any) -> SharedStorage:
        shared = SharedStorage(*arguments)
        made.append(weakref.ref(shared))
        return shared

    with mock.patch.object(captured_runner, "SharedStorage", noted):
        train(net(), "plain", True)
    assert len(made) == 2
    torch._dynamo.reset()
    gc.collect()
    assert all(each() is None for each in made)


def test_graphs_work_in_common_memory() -> None:
    """One piece, as large as one graph needs it, has workspaces, results that are copied, and what arguments are copied
    to."""
    torch._dynamo.reset()
    model = wide_net()
    with recorded_graphs() as graphs:
        run = torch.compile(model, backend="max", fullgraph=True)
        run(torch.randn(256, 64)).sum().backward()
    (forward,), (backward,) = (graph.executables for graph in graphs)
    capturing = [capture(forward, 3), capture(backward, 5)]
    alive, slopes = [], torch.randn(256, 512)
    for _ in range(9):
        x = torch.randn(256, 64)
        out = run(x)
        out.backward(slopes)
        # Its memory does not serve the next input.
        alive += [x, out]
        run.zero_grad(set_to_none=True)
    assert all(each.replays for each in capturing)
    recorded = []
    for executable in (forward, backward):
        assert isinstance(executable.runner, CapturedRunner) and executable.runner.recorded is not None
        recorded.append(executable.runner.recorded)
    memory = recorded[0].workspace
    assert recorded[1].workspace is memory
    result, needed = 256 * 512 * 4, [each.runner.needed for each in (forward, backward) if each.runner]
    assert min(needed) > result and memory.numel() == max(needed)
    assert [each.numel() for each in recorded[0].copied.values()] == [256 * 512]
    inside = [*recorded[0].copied.values(), *capturing[0]._places]
    assert len(inside) == 2
    assert {each.untyped_storage().data_ptr() for each in inside} == {memory.untyped_storage().data_ptr()}
    gone = weakref.ref(memory)
    del memory, recorded, inside, alive, graphs, executable, forward, backward, capturing, run, model, out
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_plain_calls_work_in_common_memory() -> None:
    """The backward graph, which is captured later, takes none beside what the forward graph was captured over."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(wide_net(), backend="max", fullgraph=True)
        run(torch.randn(256, 64)).sum().backward()
    (forward,), (backward,) = (graph.executables for graph in graphs)
    capturing = [capture(forward, 1), capture(backward, 5)]
    with mock.patch.object(runner, "lent_workspace", wraps=runner.lent_workspace) as taken:
        for _ in range(4):
            run(torch.randn(256, 64)).sum().backward()
            run.zero_grad(set_to_none=True)
    assert backward.runner is not None and backward.runner.needed
    assert [each.replays for each in capturing] == [3, 0] and taken.call_count == 2


def test_large_results_of_few_launches_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is memory kept for them."""
    # As on a GPU, where saved values lie elsewhere in each call.
    monkeypatch.setattr(runner, "LEAST", sys.maxsize)
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(wide_net(), backend="max", fullgraph=True)
        run(torch.randn(256, 64)).sum().backward()
    (forward,), (backward,) = (graph.executables for graph in graphs)
    assert forward.listing is not None
    monkeypatch.setattr(captured_runner, "COPIED_FOR_LAUNCH", 256 * 512 * 4 // len(forward.listing.launches) - 1)
    # Neither is the backward graph replayed, which would copy what is saved anew in each call.
    capturing = [capture(forward, 1), capture(backward, 1)]
    for _ in range(4):
        run(torch.randn(256, 64)).sum().backward()
    assert isinstance(forward.runner, CapturedRunner) and not forward.runner.wanted
    assert [each.replays for each in capturing] == [0, 0]


def test_masks_are_read_where_they_were_drawn() -> None:
    """A replayed backward graph reads the masks that the replayed forward graph drew, and copies them nowhere."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(drawing_net(), backend="max", fullgraph=True)
        run(torch.randn(5, 6)).sum().backward()
    (forward,), (backward,) = (graph.executables for graph in graphs)
    assert len(forward.spec.draws) == 1 and not backward.spec.draws
    capturing = [capture(forward, 3), capture(backward, 8)]
    x, slopes = torch.randn(5, 6), torch.randn(5, 3)
    outputs = []
    for _ in range(12):
        out = run(x)
        out.backward(slopes)
        outputs.append(out.detach().clone())
        run.zero_grad(set_to_none=True)
    assert [each.replays for each in capturing] == [12 - 2, 12 - 7]
    assert not capturing[0].copied and not capturing[1].copied
    assert len({tuple(out.flatten().tolist()) for out in outputs}) == len(outputs)


def test_a_draw_that_is_returned_is_no_input() -> None:
    """The first is returned alone, the second is read and returned, the third is read."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = torch.rand(3), torch.rand(4), torch.rand(4)
        return first, second, x * second + third

    torch._dynamo.reset()
    x = torch.randn(4)
    with recorded_graphs() as graphs:
        run = torch.compile(program, backend="max", fullgraph=True)
        run(x)
    (executable,) = graphs[0].executables
    assert len(executable.spec.draws) == 3 and len(executable.built.inputs) == 3
    capturing = capture(executable, 3)
    for call in range(6):
        torch.manual_seed(call)
        expected = program(x)
        torch.manual_seed(call)
        for ours, theirs in zip(run(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert capturing.replays == 4


def test_a_mask_that_is_kept_is_not_drawn_over() -> None:
    """Two forward passes before the backward passes: the second one's masks lie elsewhere."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * 3, backend="max", fullgraph=True)
        run(torch.ones(64, requires_grad=True)).sum().backward()
    capture(graphs[0].executables[0], 2)
    for _ in range(6):
        x = torch.ones(64, requires_grad=True)
        outs = [run(x) for _ in range(2)]
        for out in outs:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(gradient, out.detach())


def test_shared_storage_knows_of_tensors_over_it() -> None:
    facts = [((3, 2), (2, 1), torch.float32), None, ((5,), (1,), torch.int64), ((), (), torch.bfloat16)]
    shared = SharedStorage(facts, torch.device("cpu"))
    first, nothing, second, third = shared.tensors
    assert nothing is None and not shared.in_use()
    for number, tensor in enumerate((first, second, third)):
        tensor.fill_(number + 1)
    assert first.eq(1).all() and second.eq(2).all() and third.eq(3).all()
    assert (first.shape, first.stride(), second.dtype, third.dim()) == ((3, 2), (2, 1), torch.int64, 0)
    lent = second.detach()
    assert shared.in_use()
    view = lent[1:]
    del lent
    assert shared.in_use()
    version = first._version
    view += 1
    assert first._version == version
    del view
    assert not shared.in_use()
