"""When a captured graph is replayed, captured anew or run plainly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torch_max_backend.runtime.device_graphs import capture
from torch_max_backend.runtime.device_graphs.capture import Capture, refusal
from torch_max_backend.runtime.memory.shared_storage import SharedStorage


class Doubling:
    """Doubles its arguments; a recording reads and writes the memory that it was made with."""

    def __init__(self, fails: bool = False) -> None:
        self.recorded: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self.recordings = self.plain_calls = 0
        self.fails = fails
        self.most = 1000
        self.kept: list[torch.Tensor] | None = None
        """Results of a replay that somebody keeps."""

    def plain(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        self.plain_calls += 1
        return [tensor * 2 for tensor in tensors]

    def copies_for_long(self, arguments: int) -> bool:
        return arguments > self.most

    def place(self, number: int, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, torch.nan)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        self.recordings += 1
        if self.fails:
            raise RuntimeError("not while capturing")
        self.recorded = list(tensors), [torch.full_like(tensor, torch.nan) for tensor in tensors]

    def replay(self) -> list[Any]:
        assert self.recorded is not None
        for source, result in zip(*self.recorded, strict=True):
            torch.mul(source, 2, out=result)
        return list(self.recorded[1])

    def in_use(self) -> bool:
        return self.kept is not None and self.recorded is not None and self.kept[0] is self.recorded[1][0]

    def release(self) -> None:
        self.recorded = None


class Caller:
    """Calls a captured graph with one argument that stays and one that moves."""

    def __init__(self, graph: Doubling, moving: Sequence[int] = ()) -> None:
        self.graph = graph
        self.capture = Capture("doubling", 3, moving)
        self.weight = torch.zeros(3)
        self.numbers = itertools.count()
        self.alive: list[torch.Tensor] = []

    def __call__(self, moving: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The results, checked."""
        moving = torch.full((4,), float(next(self.numbers))) if moving is None else moving
        # Its memory does not serve the next argument.
        self.alive.append(moving)
        self.weight += 1
        arguments = [self.weight, moving]
        results = self.capture.run(self.graph, arguments, [tensor.data_ptr() for tensor in arguments])
        for value, source in zip(results, arguments, strict=True):
            assert torch.equal(value, source * 2)
        return results

    def replayed(self, calls: int) -> list[bool]:
        """Which of so many calls are replayed."""
        found = []
        for _ in range(calls):
            before = self.capture.replays
            self()
            found.append(self.capture.replays > before)
        return found


def test_replays_follow_plain_calls_and_see_new_values() -> None:
    call = Caller(Doubling())
    assert call.replayed(6) == [False, False, True, True, True, True]
    assert call.graph.recordings == 1 and call.graph.plain_calls == 2 and call.capture.copied == [1]


def test_results_in_use_are_not_written_to() -> None:
    call = Caller(Doubling())
    call.replayed(2)
    kept = call.graph.kept = call()
    before = [value.clone() for value in kept]
    assert call.replayed(1) == [False] and all(map(torch.equal, kept, before))
    call.graph.kept = None
    assert call.replayed(1) == [True] and call.graph.recordings == 1


def test_results_that_stay_in_use_get_their_memory() -> None:
    call = Caller(Doubling())
    call.replayed(2)
    kept = call.graph.kept = call()
    before = [value.clone() for value in kept]
    call.replayed(6)
    assert call.graph.recordings == 2 and call.capture.replays > 1
    assert all(map(torch.equal, kept, before))


def test_an_argument_that_moved_is_read_in_its_new_place() -> None:
    call = Caller(Doubling())
    call.replayed(4)
    call.weight, _old = torch.full((3,), 50.0), call.weight
    assert call.replayed(4) == [False, False, True, True]
    assert call.graph.recordings == 2


def test_a_graph_whose_arguments_keep_moving_runs_plainly() -> None:
    call, old = Caller(Doubling()), []
    for _ in range(capture._CAPTURES * 5):
        call.replayed(4)
        old.append(call.weight)
        call.weight = torch.full((3,), 50.0)
    assert call.graph.recordings < capture._CAPTURES and call.graph.recorded is None
    assert call.replayed(1) == [False]


def test_what_moves_is_copied_wherever_it_lies() -> None:
    """The allocator may give its memory again: that two draws lie in one place says nothing of the next."""
    call = Caller(Doubling(), moving=[1])
    again = [torch.full((4,), float(number)) for number in (1, 2)]
    for draw in (*[again[0]] * 4, *again * 3):
        call(draw)
    assert call.graph.recordings == 1 and call.capture.replays == 8


def test_memory_that_is_dealt_out_anew_is_copied_from() -> None:
    """An allocator may give another tensor the same address; the next one may lie elsewhere."""
    call, memory = Caller(Doubling()), bytearray(16)
    for number in range(6):
        another = torch.frombuffer(memory, dtype=torch.float32)
        call(another.fill_(number))
    assert call.capture.copied == [1] and call.capture.replays == 4


def test_results_of_other_recordings_are_read_where_they_lie() -> None:
    call, shared = Caller(Doubling()), SharedStorage([((4,), (1,), torch.float32)], torch.device("cpu"))
    call.replayed(2)
    for number in range(4):
        shared.tensors[0].fill_(number)
        call(shared.tensors[0].detach())
    assert call.capture.copied == [] and call.capture.replays == 4


def test_what_cannot_be_captured_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    call = Caller(Doubling(fails=True))
    assert call.replayed(6) == [False] * 6
    assert call.graph.recordings == 1 and call.graph.plain_calls == 6
    assert caplog.text.count("cannot be captured and runs plainly: not while capturing") == 1


def test_a_graph_that_copies_for_long_runs_plainly() -> None:
    graph = Doubling()
    graph.most = 15
    call = Caller(graph)
    assert call.replayed(5) == [False] * 5 and graph.recordings == 0 and not call.capture.may_record


def test_refusals_say_why() -> None:
    assert refusal({"cuda"}, listed=True, recordable=True) is None
    for devices, listed, recordable, words in (
        ({"cuda", "cpu"}, True, True, "CPU"),
        ({"cuda"}, False, True, "MAX compiles"),
        ({"cuda"}, True, False, "draws"),
        (set[str](), True, True, "no arg"),
    ):
        assert words in str(refusal(devices, listed=listed, recordable=recordable))


@pytest.mark.parametrize(
    "arguments", [{"options": {"capture": True}}, {"mode": "reduce-overhead"}, {"mode": "default"}]
)
def test_users_may_ask_for_it_anywhere(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max", **arguments)(x).sum().item() == 18
    assert ("inference is not captured: it computes on the CPU" in caplog.text) == ("default" not in arguments.values())
