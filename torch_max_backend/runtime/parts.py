"""A backward graph's launch list that runs in parts, and hands gradients over after each.

Autograd hands gradients on when a node returns. A compiled graph is one node, so all gradients would leave at its end.
Here arguments whose gradients come later reach the compiled graph through another node, a *relay*, one for each later
part. The compiled graph's node runs the first part alone and returns these gradients; autograd accumulates them, and
runs hooks such as those of DistributedDataParallel, before it comes to the first relay. That runs the next part, and
returns what is complete then. All parts are one list: memory is planned, and kernels are fused, over the whole.

A gradient that is not there yet leaves the compiled graph's node as None, and the first one of each relay as NaN, by
which the relay finds the call that it belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_max_backend.launch_list.parts import Parts
from torch_max_backend.runtime.capture import Capture
from torch_max_backend.runtime.captured_runner import CapturedRunner
from torch_max_backend.runtime.common_memory import CommonMemory
from torch_max_backend.runtime.launch_times import watched
from torch_max_backend.runtime.leaving import taker
from torch_max_backend.runtime.runner import HEAD, SCRATCH, Drawn, ListRunner, RunnerSpec, lent_workspace, shaped
from torch_max_backend.torch_compat import backward_is_traced, graph_is_kept

_CALL = "_torch_max_backend_call"
"""The attribute of a tensor that stands for a gradient: the call that makes it."""


class InParts(ListRunner):
    """A launch list that runs in parts; ``cut`` comes before the first call."""

    def cut(self, parts: Parts, outputs: Sequence[Sequence[int]]) -> None:
        """Says where.

        Args:
            parts: where the list is cut.
            outputs: for each part but the first, which of the graph's outputs its relay hands over.
        """
        self.outputs = outputs
        self._ranges = self._ranges_of(parts)
        self.parts = len(self._ranges)

    def _ranges_of(self, parts: Parts) -> list[tuple[np.ndarray, tuple[int, int, int], list[np.ndarray]]]:
        """For each part the operands of ``walk``, its arguments, and what has to be kept."""
        sizes = np.cumsum([0, *(HEAD + len(launch.words) for launch in self._listing.launches)])
        bounds = [0, *(int(sizes[end]) for end in parts.ends)]
        every = self._relocations.reshape(-1, 3)
        found = []
        for begin, end in itertools.pairwise(bounds):
            mine = every[(every[:, 0] >= begin) & (every[:, 0] < end)].copy()
            mine[:, 0] -= begin
            arrays = [self._code[begin:end], mine.reshape(-1), self._bases, self._needed, self._host]
            operands = [shaped(array) for array in arrays]
            operands.insert(SCRATCH, (0, 0))
            words = np.array([word for operand in operands for word in operand], np.int64)
            found.append((words, (words.ctypes.data, *self._arguments[1:]), arrays))
        return found

    def run(self, args: Sequence[Any]) -> list[Any]:
        """What the graph returns for ``args``; where somebody looks at gradients at once, all of it is complete."""
        # With ``create_graph`` the graph is kept, too.
        if self._waits or graph_is_kept() or torch.is_anomaly_enabled() or watched() or backward_is_traced():
            return self.run_at_once(args)
        entering, addresses, _ = self.entered(args)
        begun = self.begun(entering, addresses, self._reuse.written_over(entering, args))
        call = _Call(self, begun, [*entering, *begun.drawn.entering], [*args, *begun.drawn.tensors])
        call.through(0)
        return call.results

    def begun(
        self, entering: Sequence[torch.Tensor], addresses: Sequence[int], written_over: Sequence[torch.Tensor]
    ) -> _Begun:
        """A call of which no part has run yet."""
        drawn, leaving, borrowed = self.draw(), self.fresh(), contextlib.ExitStack()
        workspace = borrowed.enter_context(lent_workspace(self.needed, self.device))
        bases = self.bases([*addresses, *drawn.addresses], leaving, written_over, workspace)

        def run(part: int, _holding: object = (entering, written_over, drawn, leaving)) -> None:
            self.run_part(part, bases, workspace)

        return _Begun(leaving, drawn, run, borrowed.close)

    def walk_part(self, part: int, bases: np.ndarray, workspace: torch.Tensor) -> None:
        words, arguments, _ = self._ranges[part]
        self.called(arguments, words, bases, workspace)

    def run_part(self, part: int, bases: np.ndarray, workspace: torch.Tensor) -> None:
        """Runs the launches of one part; on a GPU, queues their kernels.

        Raises:
            RuntimeError: a kernel refused its operands.
        """
        with self.turn():
            self.walk_part(part, bases, workspace)


@dataclass(frozen=True)
class _Begun:
    """A call that runs part by part.

    Attributes:
        leaving: the results' memory.
        drawn: before it ran.
        run: runs the launches of a part; it holds the memory that launches read and write, results above all, which
            somebody may not want.
        end: is called behind the last part.
    """

    leaving: list[Any]
    drawn: Drawn
    run: Callable[[int], None]
    end: Callable[[], None]


class PartedRunner(InParts):
    """A launch list that runs in parts.

    Args:
        spec: what it is made of.
        parts: where the list is cut.
        outputs: for each part but the first, which of the graph's outputs its relay hands over.
    """

    def __init__(self, spec: RunnerSpec, parts: Parts, outputs: Sequence[Sequence[int]]) -> None:
        super().__init__(spec)
        self.cut(parts, outputs)


class CapturedPartedRunner(InParts, CapturedRunner):
    """A launch list in parts, each of which is replayed as a device graph; no result is one that users may keep.

    Args:
        spec: what it is made of.
        capture: decides.
        parts: where the list is cut.
        outputs: for each part but the first, which of the graph's outputs its relay hands over.
    """

    def __init__(self, spec: RunnerSpec, capture: Capture, parts: Parts, outputs: Sequence[Sequence[int]]) -> None:
        # Between two parts other graphs may be replayed: they share no memory with this one.
        CapturedRunner.__init__(self, spec, capture, frozenset(), CommonMemory(spec.device))
        self.cut(parts, outputs)

    def begun(
        self, entering: Sequence[torch.Tensor], addresses: Sequence[int], written_over: Sequence[torch.Tensor]
    ) -> _Begun:
        return self.captured(_InSteps(self, entering, written_over), entering, addresses, {}, written_over)

    def begun_plainly(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], written_over: Sequence[torch.Tensor]
    ) -> _Begun:
        """A call whose results have memory of their own."""
        return super().begun(tensors, addresses, written_over)

    def begun_again(self, entering: Sequence[torch.Tensor]) -> _Begun:
        """A call that replays what is recorded."""
        recorded = self.recorded
        assert recorded is not None
        leaving, drawn = self.replayed(recorded), self.drawn_again(recorded)

        def run(part: int, _holding: object = (entering, leaving, drawn)) -> None:
            self.replay_part(recorded, part)

        return _Begun(leaving, drawn, run, lambda: None)


class _InSteps:
    """A captured runner's calls that are begun: their parts have still to run."""

    def __init__(
        self, runner: CapturedPartedRunner, entering: Sequence[torch.Tensor], written_over: Sequence[torch.Tensor]
    ) -> None:
        self._runner, self._entering, self._written_over = runner, entering, written_over
        self.place, self.copy, self.record = runner.place, runner.copy, runner.record
        self.in_use, self.release = runner.in_use, runner.release

    def plain(self, tensors: Sequence[torch.Tensor]) -> _Begun:
        addresses = [tensor.data_ptr() for tensor in tensors]
        return self._runner.begun_plainly(tensors, addresses, self._written_over)

    def replay(self) -> _Begun:
        return self._runner.begun_again(self._entering)


class _Call:
    """A call whose later parts may still have to run.

    Args:
        runner: of the list.
        begun: the call.
        arguments: of the list.
        given: arguments of the graph, and what was drawn.

    Attributes:
        results: what the compiled graph's node returns.
    """

    def __init__(self, runner: InParts, begun: _Begun, arguments: Sequence[torch.Tensor], given: Sequence[Any]) -> None:
        self._runner, self._begun, self._arguments, self._part = runner, begun, arguments, -1
        results = runner.picked(begun.leaving, given)
        self._later = [[results[number] for number in numbers] for numbers in runner.outputs]
        for numbers in runner.outputs:
            for number in numbers:
                results[number] = self._token(results[number]) if number == numbers[0] else None
        self.results = results

    def _token(self, like: torch.Tensor) -> torch.Tensor:
        token = _nan(like.dtype, like.device).expand(like.shape)
        setattr(token, _CALL, self)
        return token

    def through(self, part: int) -> None:
        """Runs the parts up to this one that have not run yet."""
        while self._part < part:
            self._part += 1
            self._begun.run(self._part)
            if self._part == self._runner.parts - 1:
                self._runner.copy_results(self._begun.leaving, self._arguments)
                self._begun.end()
                del self._begun, self._arguments

    def handed_over(self, part: int) -> list[torch.Tensor]:
        """The gradients of a part's relay."""
        self.through(part)
        results, self._later[part - 1] = self._later[part - 1], []
        return results


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), float("nan"), dtype=dtype, device=device)


class _Relay(torch.autograd.Function):
    """Tensors as they are; their gradients are those that a part of the backward graph completes."""

    @staticmethod
    def forward(ctx: Any, part: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        # Not views, and of the same version: who updates a weight before its backward pass hears what eager says.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = getattr(gradients[0], _CALL, None)
        if call is not None:
            if torch.is_grad_enabled():
                raise RuntimeError("create_graph=True with retain_graph=False needs options={'early_gradients': False}")
            return None, *call.handed_over(ctx.part)
        if any(gradient is None for gradient in gradients):
            raise RuntimeError("the call that computes these gradients is lost: something replaced a tensor of NaN")
        return None, *gradients


def relayed(function: Callable[..., Any], numbers: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """``function`` with relays in front of the arguments whose gradients come later.

    Args:
        function: a compiled graph, forward and backward.
        numbers: of these arguments, for each part but the first.
    """
    # The one made last runs first.
    parts = [(part, taker(of), of) for part, of in reversed(list(enumerate(numbers, 1)))]

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        given = list(args)
        for part, take, of in parts:
            for number, tensor in zip(of, _Relay.apply(part, *take(args)), strict=True):
                given[number] = tensor
        return function(*given)

    return call
