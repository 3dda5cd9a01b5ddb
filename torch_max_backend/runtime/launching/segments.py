"""A backward graph's launch list that runs in segments, and hands gradients over after each.

Autograd hands gradients on when a node returns. A compiled graph is one node, so all gradients would leave at its end.
Here arguments whose gradients come later reach the compiled graph through another node, a *relay*, one for each later
segment. The compiled graph's node runs the first segment alone and returns these gradients; autograd accumulates them,
and runs hooks such as those of DistributedDataParallel, before it comes to the first relay. That runs the next segment,
and returns what is complete then. All segments are one list: memory is planned, and kernels are fused, over the whole.

A gradient that is not there yet leaves the compiled graph's node as None, and the first one of each relay as NaN, by
which the relay finds the call that it belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torch_max_backend.launch_list.segments import Segments
from torch_max_backend.runtime.launching.launch_times import watched
from torch_max_backend.runtime.launching.runner import HEAD, SCRATCH, ListRunner, RunnerSpec, shaped
from torch_max_backend.runtime.memory.kept import lent_workspace
from torch_max_backend.runtime.tensors.leaving import taker
from torch_max_backend.torch_compat import backward_is_traced, graph_is_kept

_CALL = "_torch_max_backend_call"
"""The attribute of a tensor that stands for a gradient: the call that makes it."""


class SegmentedRunner(ListRunner):
    """A launch list that runs in segments.

    Args:
        spec: what it is made of.
        segments: where the list is cut.
        outputs: for each segment but the first, which of the graph's outputs its relay hands over.
    """

    def __init__(self, spec: RunnerSpec, segments: Segments, outputs: Sequence[Sequence[int]]) -> None:
        super().__init__(spec)
        self.outputs = outputs
        self._ranges = self._cut(segments)

    def _cut(self, segments: Segments) -> list[tuple[np.ndarray, tuple[int, int, int], list[np.ndarray]]]:
        """For each segment the operands of ``walk``, its arguments, and what has to be kept."""
        sizes = np.cumsum([0, *(HEAD + len(launch.words) for launch in self._listing.launches)])
        bounds = [0, *(int(sizes[end]) for end in segments.ends)]
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
        """The graph's outputs for ``args``; all of them are complete if gradients may be read at once."""
        # With ``create_graph`` the graph is kept, too.
        if self._waits or graph_is_kept() or torch.is_anomaly_enabled() or watched() or backward_is_traced():
            return self.run_at_once(args)
        entering, addresses, _ = self.entered(args)
        call = _Call(self, entering, addresses, self._reuse.written_over(entering, args), args)
        call.through(0)
        return call.results

    def run_segment(self, segment: int, bases: np.ndarray, workspace: torch.Tensor) -> None:
        """Runs the launches of one segment; on a GPU, queues their kernels.

        Raises:
            RuntimeError: a kernel refused its operands.
        """
        words, arguments, _ = self._ranges[segment]
        with self.turn():
            self.called(arguments, words, bases, workspace)

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self._ranges) - 1


class _Call:
    """A call whose later segments may still have to run.

    Attributes:
        results: what the compiled graph's node returns.
    """

    def __init__(
        self,
        runner: SegmentedRunner,
        entering: Sequence[torch.Tensor],
        addresses: Sequence[int],
        written_over: Sequence[torch.Tensor],
        args: Sequence[Any],
    ) -> None:
        self._runner, self._segment = runner, -1
        drawn = runner.draw()
        leaving = runner.fresh()
        self._borrowed = contextlib.ExitStack()
        self._workspace = self._borrowed.enter_context(lent_workspace(runner.needed, runner.device))
        self._bases = runner.bases([*addresses, *drawn.addresses], leaving, written_over, self._workspace)
        # Memory that launches read and write; results above all, which somebody may not want.
        self._used: list[Any] = [list(entering), drawn, list(written_over), list(leaving)]
        self._arguments = [*entering, *drawn.entering]
        results = runner.picked(leaving, [*args, *drawn.tensors])
        self._later = [[results[number] for number in numbers] for numbers in runner.outputs]
        for numbers in runner.outputs:
            for number in numbers:
                results[number] = self._token(results[number]) if number == numbers[0] else None
        self.results = results

    def _token(self, like: torch.Tensor) -> torch.Tensor:
        token = _nan(like.dtype, like.device).expand(like.shape)
        setattr(token, _CALL, self)
        return token

    def through(self, segment: int) -> None:
        """Runs the segments up to this one that have not run yet."""
        while self._segment < segment:
            self._segment += 1
            self._runner.run_segment(self._segment, self._bases, self._workspace)
            if self._segment == self._runner.last:
                self._runner.copy_results(self._used[-1], self._arguments)
                self._borrowed.close()
                self._used.clear()
                del self._workspace, self._arguments

    def handed_over(self, segment: int) -> list[torch.Tensor]:
        """The gradients of a segment's relay."""
        self.through(segment)
        results, self._later[segment - 1] = self._later[segment - 1], []
        return results


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), float("nan"), dtype=dtype, device=device)


class _Relay(torch.autograd.Function):
    """Tensors as they are; their gradients are those that a segment of the backward graph completes."""

    @staticmethod
    def forward(ctx: Any, segment: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.segment = segment
        ctx.set_materialize_grads(False)
        # Not views, and of the same version: who updates a weight before its backward pass hears what eager says.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = getattr(gradients[0], _CALL, None)
        if call is not None:
            if torch.is_grad_enabled():
                raise RuntimeError("create_graph=True with retain_graph=False needs options={'early_gradients': False}")
            return None, *call.handed_over(ctx.segment)
        if any(gradient is None for gradient in gradients):
            raise RuntimeError("the call that computes these gradients is lost: something replaced a tensor of NaN")
        return None, *gradients


def relayed(function: Callable[..., Any], numbers: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """``function`` with relays in front of the arguments whose gradients come later.

    Args:
        function: a compiled graph, forward and backward.
        numbers: of these arguments, for each segment but the first.
    """
    # The one made last runs first.
    segments = [(segment, taker(of), of) for segment, of in reversed(list(enumerate(numbers, 1)))]

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        given = list(args)
        for segment, take, of in segments:
            for number, tensor in zip(of, _Relay.apply(segment, *take(args)), strict=True):
                given[number] = tensor
        return function(*given)

    return call
