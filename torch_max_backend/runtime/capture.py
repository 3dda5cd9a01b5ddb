"""Replaying a graph's launches on a GPU instead of queueing them one by one."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from max.driver import Buffer
from max.driver.buffer import batch_inplace_copy

from torch_max_backend.max_compat import wait_for_captures
from torch_max_backend.runtime.execution import execute

log = logging.getLogger("torch_max_backend")

#: Captures of one graph, after which it runs plainly: its arguments keep moving.
_CAPTURES = 8

#: Calls in a row that found the results of the last replay in use.
_BUSY = 3

_keys = itertools.count(1)


class Memory:
    """How ``Capture`` handles arguments; here, MAX's buffers: one address has one buffer for as long as it is
    remembered (``handover.Inputs``)."""

    def same(self, first: Any, second: Any) -> bool:
        """Whether both lie in one place."""
        return first is second

    def place(self, like: Any) -> Any:
        """A place for such an argument."""
        return Buffer(like.dtype, like.shape, like.device)

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copies each source into its target."""
        batch_inplace_copy(list(targets), list(sources))

    def in_use(self, results: Sequence[Any], loan: weakref.ref[Loan]) -> bool:
        """Whether the results of the last replay are still in use."""
        return loan() is not None


class Loan:
    """Results of a captured graph, in memory that its next replay writes to, while tensors over them exist."""

    __slots__ = ("__weakref__", "results")

    def __init__(self, results: list[Any]) -> None:
        self.results = results


class Capture:
    """One graph's captured launches.

    A captured graph reads and writes the places that it was captured with. Arguments that stay at one address are read
    there; others are copied to a place of their own first. An argument that has moved makes the call run plainly, and
    after a few such calls in a row the graph is captured anew.

    Results lie in the same place each time. They are lent: as long as a tensor over them exists, calls run plainly and
    get memory of their own, so no tensor changes under its user.

    Args:
        name: of the graph, for the log.
        patience: the call that captures. Graphs that take another graph's results wait until that one is captured, and
            its results have come to rest.
        memory: that arguments lie in.
        moving: numbers of arguments that are others in each call, wherever they lie.
    """

    def __init__(
        self, name: str, patience: int, memory: Memory | None = None, moving: frozenset[int] = frozenset()
    ) -> None:
        self.replays = 0
        self.memory = memory or Memory()
        self._name = name
        self._moving = moving
        self._patience = patience
        self._left = _CAPTURES
        self._missed = 0
        self._last: list[Any] = []
        self._key: int | None = None
        self._fixed: list[Any] = []
        self._copied: dict[int, None] = {}
        self._results: list[Any] = []
        self._loan: weakref.ref[Loan] | None = None
        self._busy = 0

    def run(self, model: Any, buffers: list[Any]) -> tuple[list[Any], Loan | None]:
        """The results for ``buffers``, and the loan that keeps them from being written to (None: they are fresh)."""
        if not self._left:
            return execute(model, buffers), None
        if self._loan is not None and self.memory.in_use(self._results, self._loan):
            self._busy += 1
            if self._busy >= _BUSY:
                # Somebody keeps them for good, as gradients that are set to zero in place: they get this memory.
                self._release(model)
            return execute(model, buffers), None
        self._busy = 0
        if self._key is None or not self._matches(buffers):
            self._missed += 1
            if self._missed < self._patience or len(self._last) != len(buffers) or not self._captured(model, buffers):
                self._last = buffers
                return execute(model, buffers), None
        self._missed = 0
        assert self._key is not None
        if self._copied:
            self.memory.copy([self._fixed[i] for i in self._copied], [buffers[i] for i in self._copied])
        model.replay(self._key, *self._fixed)
        self.replays += 1
        loan = Loan(self._results)
        self._loan = weakref.ref(loan)
        return self._results, loan

    def _matches(self, buffers: list[Any]) -> bool:
        same = map(self.memory.same, buffers, self._fixed)
        return all(each or number in self._copied for number, each in enumerate(same))

    def _captured(self, model: Any, buffers: list[Any]) -> bool:
        """Captures the graph; False if that is not possible."""
        self._release(model)
        self._left -= 1
        if not self._left:
            log.info("%s is not captured any more: its arguments keep moving", self._name)
            return False
        pairs = enumerate(zip(buffers, self._last, strict=True))
        moving = [i for i, (now, last) in pairs if i in self._moving or not self.memory.same(now, last)]
        fixed = list(buffers)
        for i in moving:
            fixed[i] = self.memory.place(buffers[i])
        key = next(_keys)
        try:
            self.memory.copy([fixed[i] for i in moving], [buffers[i] for i in moving])
            self._results = model.capture(key, *fixed)
            wait_for_captures(model)
        except Exception as error:
            self._left = 0
            log.warning("%s cannot be captured and runs plainly: %s", self._name, error)
            return False
        self._key, self._fixed, self._copied = key, fixed, dict.fromkeys(moving)
        log.info("captured %s: %d of %d arguments are copied", self._name, len(moving), len(fixed))
        return True

    def _release(self, model: Any) -> None:
        if self._key is not None:
            model.release_captured_graph(self._key)
        self._key, self._results, self._fixed, self._copied = None, [], [], {}
        self._loan, self._busy, self._missed = None, 0, 0


def refusal(devices: Sequence[str], symbolic: bool) -> str | None:
    """Why a graph cannot be captured, by its arguments' devices and whether a size is symbolic; None if it can."""
    if any(device == "cpu" for device in devices):
        return "it computes on the CPU, or an argument lies there"
    if symbolic:
        return "it was compiled for symbolic sizes"
    return "it has no arguments" if not devices else None
