"""Runs a launch list on PyTorch's tensors.

Results and workspace are allocated by PyTorch. Nothing is converted and nothing is compiled: a call costs the addresses
of its arguments, the allocation of its results, and the launches.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch

from torch_max_backend.dtypes import device_dtype
from torch_max_backend.launch_list import Kind, LaunchList, Place
from torch_max_backend.max_compat import device_context
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine import graph_team
from torch_max_backend.runtime.engine.session import max_device
from torch_max_backend.runtime.engine.streams import stream_sync
from torch_max_backend.runtime.launching.launch_times import timed_walk, watched
from torch_max_backend.runtime.launching.reports import reports_of
from torch_max_backend.runtime.launching.threads import team_start
from torch_max_backend.runtime.memory.kept import KEPT, LEAST, lent_workspace
from torch_max_backend.runtime.memory.reuse import Reuse
from torch_max_backend.runtime.tensors.handover import Inputs
from torch_max_backend.runtime.tensors.interface import Draw, InputSpec
from torch_max_backend.runtime.tensors.leaving import Leaving, taker
from torch_max_backend.torch_compat import written_to

_data_ptr = torch.Tensor.data_ptr

_walking = threading.Lock()
"""One list at a time: scratch memory is lent through one place for the process (kernels/common/library.mojo), and
threads may use several GPUs."""
SCRATCH = 3
"""The operand of ``walk`` that is memory for one launch after the other."""

HEAD = 3
"""Words of a launch in front of those that its function gets."""


@dataclass(frozen=True)
class Drawn:
    """The random draws of a graph, which are its last arguments.

    Attributes:
        tensors: as they were drawn.
        entering: as the graph takes them.
        addresses: of these.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    entering: tuple[torch.Tensor, ...] = ()
    addresses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Called:
    """The results of a call.

    Attributes:
        results: on a GPU, what will be the results when the queue has come to its end.
        drawn: before it ran.
        in_place: results were written over the arguments that may take them.
    """

    results: list[Any]
    drawn: Drawn
    in_place: bool


@dataclass(frozen=True)
class RunnerSpec:
    """Everything that a ``ListRunner`` is made from.

    Attributes:
        listing: the calls.
        inputs: how arguments enter; what is drawn comes last.
        leaving: how results leave.
        device: that the calls compute on.
        walk: the symbol of the function that runs a list.
        draws: make the graph's last arguments.
        waits: whether a call on a GPU waits until all indices are known to be inside their dimensions.
        lasting: results that users may keep beyond the next call.
    """

    listing: LaunchList
    inputs: Sequence[InputSpec]
    leaving: Leaving
    device: torch.device
    walk: str
    draws: Sequence[Draw] = ()
    waits: bool = False
    lasting: frozenset[int] = frozenset()


class ListRunner:
    """A launch list that is ready to run.

    Args:
        spec: what it is made of.

    Attributes:
        device: that the calls compute on.
        facts: shape, strides and dtype of each result.
        scratch: bytes that a launch keeps between its kernels; 0 before the first call.

    Raises:
        KeyError: a library is not loaded.

    What a launch keeps between its kernels lies behind the workspace from the second call on: the first one tells how
    much that is.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        listing, leaving, device = spec.listing, spec.leaving, spec.device
        given = [each for each in spec.inputs if not (spec.draws and each.drawn)]
        self._inputs, self._leaving, self.device = Inputs(given), leaving, device
        self._draws = spec.draws
        # A draw that is returned and not read is no input.
        self._drawn = Inputs(spec.inputs[len(given) :])
        self._given = 0
        self._own_device = max_device(device)
        self._listing = listing
        self._context = device_context(self._own_device)
        self._constants = [self._constant(each.content) for each in listing.constants]
        self._moved = listing.moved
        self.facts = [(fact.shape or (), fact.strides, fact.dtype) for fact in leaving.facts]
        self._in_kept_memory = frozenset(
            number
            for number, (shape, _, dtype) in enumerate(self.facts)
            if device.type == "cpu" and number not in spec.lasting and math.prod(shape) * dtype.itemsize >= LEAST
        )
        if self._in_kept_memory:
            weakref.finalize(self, KEPT.forget).atexit = False
        self._copied = [
            (number, place)
            for number, place in enumerate(listing.results)
            if place != Place(Kind.RESULT, number)
        ]  # fmt: skip
        self._updates = _Updates(listing, self._inputs, leaving)
        self._reuse = Reuse(listing, given, device)
        self._workspace = listing.workspace
        first_result = listing.arguments
        self._first_result, self._first_reused = first_result, first_result + len(listing.results)
        self._reused = {number: place for place, number in enumerate(listing.reused)}
        self._bases = np.zeros(self._first_reused + len(listing.reused) + 1, np.int64)
        self._reports = reports_of(device)
        self._waits = spec.waits and device.type == "cuda" and any(each.indexing for each in listing.launches)
        code, relocations = self._encoded(listing)
        self._code, self._relocations = np.array(code, np.int64), np.array(relocations, np.int64)
        self._needed = np.zeros(1, np.int64)
        self.scratch = 0
        start = team_start() if device.type == "cpu" else 0
        self._host = np.array([start, 1, libraries.loader(device), self._reports.found.address], np.int64)
        if device.type == "cpu" and not team_start():
            graph_team.lend()
        arrays = self._code, self._relocations, self._bases, self._needed, self._host
        operands = [shaped(array) for array in arrays]
        operands.insert(SCRATCH, (0, 0))
        self._words = np.array([word for operand in operands for word in operand], np.int64)
        self._message = ctypes.create_string_buffer(libraries.MESSAGE_BYTES)
        self._call = libraries.callable_at(libraries.address(spec.walk, device))
        self._arguments = (self._words.ctypes.data, self._context, ctypes.addressof(self._message))
        self._lock = threading.Lock()

    def _constant(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(self.device)

    def _encoded(self, listing: LaunchList) -> tuple[list[int], list[int]]:
        """The arguments of ``walk`` in kernels/runner/entries.mojo."""
        code: list[int] = []
        relocations: list[int] = []
        for launch in listing.launches:
            record = self._reports.record(launch) if launch.indexing else 0
            code += [libraries.address(launch.function, self.device), record, len(launch.words)]
            for word in launch.words:
                if isinstance(word, Place) and word.kind is not Kind.CONSTANT:
                    relocations += [len(code), self._base(word), word.offset]
                    code.append(0)
                else:
                    code.append(self._constants[word.number].data_ptr() if isinstance(word, Place) else word)
        return code, relocations

    def _base(self, place: Place) -> int:
        """The place's number among the bases: arguments, results, arguments that are written over, and last the
        workspace."""
        if place.kind is Kind.ARGUMENT:
            return place.number
        if place.kind is Kind.REUSED:
            return self._first_reused + self._reused[place.number]
        return self._first_result + place.number if place.kind is Kind.RESULT else len(self._bases) - 1

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The graph's outputs for ``args``.

        Raises:
            IndexOutsideError: an index of this call lies outside its dimension, or on a GPU one of an earlier call.
            RuntimeError: a kernel refused its operands.
            ValueError: a tensor of another shape, dtype or device than the graph was built for, or without memory.
            WrappedError: a tensor that stands for a batch.
        """
        return self.run_at_once(args)

    def run_at_once(self, args: Sequence[Any]) -> list[Any]:
        """As ``run``, with results that are complete."""
        entering, addresses, updated = self.entered(args)
        called = self.launched(entering, addresses, updated, self._reuse.written_over(entering, args))
        if self._waits:
            self._reports.wait(self.device)
        leaving, drawn = called.results, called.drawn
        self.copy_results(leaving, [*entering, *drawn.entering])
        return self.picked(leaving, [*args, *drawn.tensors] if self._draws else args, in_place=called.in_place)

    def entered(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], Sequence[int], dict[int, torch.Tensor]]:
        """The list's arguments, their addresses, and those that take results, by the results' numbers."""
        self._reports.raise_found(self.device)
        self._given = len(args)
        entering, addresses = self._inputs.enter(args)
        if self._moved:
            addresses = list(addresses)
        for number in self._moved:
            host = entering[number]
            # Read now: a copy from pinned memory would read it later, when its user may have written to it.
            entering[number] = torch.full((), host.item(), dtype=device_dtype(host.dtype), device=self.device)
            addresses[number] = entering[number].data_ptr()
        return entering, addresses, self._updates.safe(entering, addresses, args)

    def copy_results(self, leaving: Sequence[Any], arguments: Sequence[torch.Tensor]) -> None:
        """Makes the results that are copies of what lies elsewhere."""
        if self._copied:
            with torch.no_grad():
                for number, place in self._copied:
                    _flat(leaving[number]).copy_(self._source(place, leaving[number], arguments, leaving))

    def picked(self, leaving: Sequence[Any], args: Sequence[Any], *, in_place: bool = False) -> list[Any]:
        """The graph's outputs, made from the list's results and the graph's arguments."""
        return self._leaving.picked(list(leaving), args, in_place=in_place)

    def launched(
        self,
        entering: Sequence[torch.Tensor],
        addresses: Sequence[int],
        updated: Mapping[int, torch.Tensor],
        written_over: Sequence[torch.Tensor],
    ) -> Called:
        """Draws, and launches.

        Args:
            entering: the arguments that are given.
            addresses: of these.
            updated: arguments that take results, by the results' numbers.
            written_over: memory for what replaces the arguments ``listing.reused``.
        """
        drawn = self.draw()
        leaving = self.fresh(updated)
        with self.turn(), self.lent_workspace() as workspace:
            self.walk([*addresses, *drawn.addresses], leaving, workspace, written_over)
        return Called(leaving, drawn, bool(updated))

    def lent_workspace(self) -> AbstractContextManager[torch.Tensor]:
        """The workspace of one call, in the caller's turn on the device."""
        return lent_workspace(self.needed, self.device)

    def draw(self) -> Drawn:
        """The last arguments of a call: what was drawn for it."""
        if not self._draws:
            return _NOTHING
        tensors = tuple(draw() for draw in self._draws)
        entering, addresses = self._drawn.enter([*repeat(None, self._given), *tensors])
        return Drawn(tensors, tuple(entering), tuple(addresses))

    def fresh(self, taken: Mapping[int, torch.Tensor] | None = None) -> list[Any]:
        """Memory for all results except those in ``taken``."""
        device, taken = self.device, taken or {}
        return [
            taken[number] if number in taken
            else KEPT.tensor(shape, strides, dtype) if number in self._in_kept_memory
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for number, (shape, strides, dtype) in enumerate(self.facts)
        ]  # fmt: skip

    def workspace(self) -> torch.Tensor:
        """Memory for a call of its own."""
        return torch.empty(self.needed, dtype=torch.uint8, device=self.device)

    @property
    def needed(self) -> int:
        """Bytes of the workspace, with what launches keep between their kernels."""
        return self._workspace + self.scratch

    def walk(
        self,
        addresses: Sequence[int],
        leaving: Sequence[Any],
        workspace: torch.Tensor,
        written_over: Sequence[torch.Tensor],
    ) -> None:
        """Runs the list over arguments at ``addresses``; on a GPU, queues its kernels. It is the caller's turn on the
        device.

        Raises:
            RuntimeError: a kernel refused its operands.
        """
        self.called(self._arguments, self._words, self.bases(addresses, leaving, written_over, workspace), workspace)

    def bases(
        self,
        addresses: Sequence[int],
        leaving: Sequence[Any],
        written_over: Sequence[torch.Tensor],
        workspace: torch.Tensor,
    ) -> np.ndarray:
        """The addresses that the list's places begin at."""
        found = [*addresses, *map(_data_ptr, leaving), *map(_data_ptr, written_over), workspace.data_ptr()]
        return np.array(found, np.int64)

    def called(
        self, arguments: tuple[int, int, int], words: np.ndarray, bases: np.ndarray, workspace: torch.Tensor
    ) -> None:
        """Runs the launches that ``words``, operands of the walk, say."""
        with _walking:
            size = min(self.scratch, workspace.numel() - self._workspace)
            words[2 * SCRATCH : 2 * SCRATCH + 2] = workspace.data_ptr() + self._workspace, size
            self._bases[:] = bases
            self._host[1] = torch.get_num_threads()
            if watched():
                call = functools.partial(self._call, *arguments)
                failed = timed_walk(self._listing, call, words, self._code, self._needed, self.device)
            else:
                failed = self._call(*arguments)
            needed = int(self._needed[0])
            # A GPU's kernels have not run yet.
            error = self._reports.taken() if self.device.type == "cpu" else None
        if error or failed:
            raise error or RuntimeError(self._message.value.decode(errors="replace"))
        self.scratch = max(self.scratch, needed)

    def _source(
        self, place: Place, like: torch.Tensor, entering: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The elements at ``place``, in the order of the memory."""
        if place.kind is Kind.CONSTANT:
            # Cut first: the byte that stands for no elements is no element.
            return self._constants[place.number][: like.numel() * like.element_size()].view(like.dtype)
        return _flat((entering if place.kind is Kind.ARGUMENT else leaving)[place.number])

    def turn(self) -> AbstractContextManager[Any]:
        """One caller at a time; on a GPU also in order with PyTorch's streams."""
        return stream_sync(self.device).turn() if self.device.type == "cuda" else self._lock


_NOTHING = Drawn()


class _Updates:
    """Results that overwrite the arguments whose new values they are.

    Where another argument shares the memory, results are copied back after the last launch instead.
    """

    def __init__(self, listing: LaunchList, inputs: Inputs, leaving: Leaving) -> None:
        self._positions = {write.index: write.position for write in leaving.writes}
        self._results = list(listing.updates)
        numbers = list(listing.updates.values())
        self._take = taker(numbers)
        self._take_argument = taker([self._positions[result] for result in self._results])
        self._bytes = np.array(inputs.sizes, np.int64)
        self._own = np.array(numbers, np.int64)
        self._addresses: list[int] = []
        leaving.leave_out(frozenset(self._results))

    def safe(
        self, entering: Sequence[torch.Tensor], addresses: Sequence[int], args: Sequence[Any]
    ) -> dict[int, torch.Tensor]:
        """The arguments that take results in this call, by the results' numbers: all that may, or none.

        Autograd learns that they are written to.
        """
        if not self._results:
            return {}
        tensors = list(self._take(entering))
        # A copy in another memory order is not the argument.
        if not all(map(is_, tensors, self._take_argument(args))) or not self._apart(addresses):
            return {}
        written_to([tensor for tensor in tensors if not tensor.is_inference()])
        return dict(zip(self._results, tensors, strict=True))

    def _apart(self, addresses: Sequence[int]) -> bool:
        """Whether what is updated shares no memory with another argument; quick where nothing has moved."""
        if addresses == self._addresses:
            return True
        first = np.array(addresses, np.int64)
        last, order = first + self._bytes, np.argsort(first)
        # One behind the other, or at least each of those that are updated meets itself alone.
        if (first[order[1:]] < np.maximum.accumulate(last[order[:-1]])).any():
            low, high = first[self._own, None], last[self._own, None]
            if np.count_nonzero((low < last) & (first < high)) != len(self._own):
                return False
        self._addresses = list(addresses)
        return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(array: np.ndarray) -> tuple[int, int]:
    """An array as an operand."""
    return array.ctypes.data, len(array)
