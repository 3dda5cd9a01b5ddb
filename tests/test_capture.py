"""When a captured graph is replayed, captured anew or run plainly; a model on the CPU stands for one on a GPU."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch
from max.driver import Buffer
from max.engine import Model

from torch_max_backend.runtime import capture
from torch_max_backend.runtime.capture import Capture, Loan, refusal


class Doubling:
    """Doubles its arguments; a captured graph reads and writes the memory it was captured with."""

    def __init__(self, fails: bool = False) -> None:
        self.captured: dict[int, tuple[list[Buffer], list[Buffer]]] = {}
        self.captures = 0
        self.plain = 0
        self.fails = fails

    def _execute_device_tensors(self, buffers: list[Buffer]) -> list[Buffer]:
        self.plain += 1
        return [Buffer.from_numpy(buffer.to_numpy() * 2) for buffer in buffers]

    def capture(self, key: int, *buffers: Buffer) -> list[Buffer]:
        self.captures += 1
        if self.fails:
            raise RuntimeError("not while capturing")
        results = [Buffer.from_numpy(np.full_like(buffer.to_numpy(), np.nan)) for buffer in buffers]
        self.captured[key] = (list(buffers), results)
        return list(results)

    def replay(self, key: int, *buffers: Buffer) -> None:
        sources, results = self.captured[key]
        assert all(a is b for a, b in zip(buffers, sources, strict=True))
        for source, result in zip(sources, results, strict=True):
            result.to_numpy()[...] = source.to_numpy() * 2

    def release_captured_graph(self, key: int) -> None:
        del self.captured[key]

    def _await_device_graphs(self) -> None:
        pass


class Caller:
    """Calls a captured model with one argument that stays and one that moves."""

    def __init__(self, model: Doubling) -> None:
        self.model = model
        self.capture = Capture("doubling", 3)
        self.weight = Buffer.from_numpy(np.zeros(3, np.float32))
        self.numbers = itertools.count()

    def __call__(self) -> tuple[list[np.ndarray], Loan | None]:
        """The results, checked, and their loan."""
        moving = Buffer.from_numpy(np.full(4, next(self.numbers), np.float32))
        self.weight.to_numpy()[...] += 1
        results, loan = self.capture.run(cast(Model, self.model), [self.weight, moving])
        values = [result.to_numpy() for result in results]
        for value, source in zip(values, (self.weight, moving), strict=True):
            assert np.array_equal(value, source.to_numpy() * 2)
        return values, loan


def lent() -> tuple[Caller, list[np.ndarray], list[np.ndarray], Loan]:
    """A caller after its first replay: the results, which are in use, a copy of them, and their loan."""
    call = Caller(Doubling())
    call()
    call()
    kept, loan = call()
    assert loan is not None
    return call, kept, [value.copy() for value in kept], loan


def test_replays_follow_plain_calls_and_see_new_values() -> None:
    call = Caller(Doubling())
    loans = [call()[1] is not None for _ in range(6)]
    assert loans == [False, False, True, True, True, True]
    assert call.model.captures == 1 and call.model.plain == 2 and call.capture.replays == 4


def test_results_in_use_are_not_written_to() -> None:
    call, kept, before, loan = lent()
    values, none = call()
    assert none is None and all(np.array_equal(a, b) for a, b in zip(kept, before, strict=True))
    assert not np.array_equal(values[1], kept[1])
    del loan
    assert call()[1] is not None and call.model.captures == 1


def test_results_that_stay_in_use_get_their_memory() -> None:
    call, kept, before, _loan = lent()
    for _ in range(6):
        call()
    assert call.model.captures == 2 and call.capture.replays > 1
    assert all(np.array_equal(a, b) for a, b in zip(kept, before, strict=True))


def test_an_argument_that_moved_is_read_in_its_new_place() -> None:
    call = Caller(Doubling())
    for _ in range(4):
        call()
    call.weight = Buffer.from_numpy(np.full(3, 50, np.float32))
    assert [call()[1] is not None for _ in range(4)] == [False, False, True, True]
    assert call.model.captures == 2 and len(call.model.captured) == 1


def test_a_graph_whose_arguments_keep_moving_runs_plainly() -> None:
    call = Caller(Doubling())
    for _ in range(capture._CAPTURES * 5):
        for _ in range(4):
            call()
        call.weight = Buffer.from_numpy(np.full(3, 50, np.float32))
    assert call.model.captures < capture._CAPTURES and not call.model.captured
    assert call()[1] is None


def test_a_draw_is_copied_wherever_it_lies() -> None:
    """The allocator may give its memory again: that two draws lie in one place says nothing of the next."""
    model, weight = Doubling(), Buffer.from_numpy(np.ones(3, np.float32))
    captured = Capture("drawing", 3, moving=frozenset({1}))
    again = [Buffer.from_numpy(np.full(4, number, np.float32)) for number in (1, 2)]
    for draw in (*[again[0]] * 4, *again * 3):
        results, loan = captured.run(cast(Model, model), [weight, draw])
        assert np.array_equal(results[1].to_numpy(), draw.to_numpy() * 2)
        del loan
    assert model.captures == 1 and captured.replays == 8


def test_what_cannot_be_captured_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    call = Caller(Doubling(fails=True))
    assert [call()[1] for _ in range(6)] == [None] * 6
    assert call.model.captures == 1 and call.model.plain == 6
    assert caplog.text.count("cannot be captured and runs plainly: not while capturing") == 1


def test_refusals_say_why() -> None:
    assert refusal(["cuda", "cuda"], False) is None
    for devices, symbolic, words in (
        (["cuda", "cpu"], False, "CPU"),
        (["cuda"], True, "symbolic"),
        ([], False, "no arg"),
    ):
        assert words in cast(str, refusal(devices, symbolic))


@pytest.mark.parametrize(
    "arguments", [{"options": {"capture": True}}, {"mode": "reduce-overhead"}, {"mode": "default"}]
)
def test_users_may_ask_for_it_anywhere(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max", **arguments)(x).sum().item() == 18
    assert ("inference is not captured: it computes on the CPU" in caplog.text) == ("default" not in arguments.values())
