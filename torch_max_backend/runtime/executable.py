"""A compiled graph, as a launch list or as a model of MAX, that runs on PyTorch's tensors."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from max.engine import Model

from torch_max_backend.ir.layout import Order
from torch_max_backend.launch_list.segments import Segments, segments_of
from torch_max_backend.mojo_ops.functions import Function
from torch_max_backend.runtime.device_graphs.capture import Capture
from torch_max_backend.runtime.device_graphs.captured_runner import CapturedRunner
from torch_max_backend.runtime.engine.execution import execute
from torch_max_backend.runtime.engine.streams import stream_sync
from torch_max_backend.runtime.launching.runner import ListRunner, RunnerSpec
from torch_max_backend.runtime.launching.segments import SegmentedRunner
from torch_max_backend.runtime.memory.packs import Packing
from torch_max_backend.runtime.tensors.handover import Inputs, Outputs
from torch_max_backend.runtime.tensors.interface import BuiltGraph, Draw
from torch_max_backend.runtime.tensors.plain import WrappedError
from torch_max_backend.torch_compat import called_for_each, is_wrapped


@dataclass(frozen=True)
class ExecutableSpec:
    """Everything that an executable is made from, except what depends on the process.

    Attributes:
        built: the graph.
        device: that it computes on.
        private: outputs that only another graph of ours will see, see ``handover.Outputs``.
        kept: outputs that users may keep beyond the next call, see there.
        orders: for each output of the FX graph its memory order; None for one that no computation makes.
        packing: of the outputs that leave in packs.
        takes_packs: its arguments are packs, as they left the forward graph.
        functions: of libraries, that it calls.
        draws: make its last arguments.
        saved_alone: the values that are saved for the backward graph, by their numbers, that nobody else sees.
    """

    built: BuiltGraph
    device: torch.device
    private: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    orders: tuple[Order | None, ...] = ()
    packing: Packing | None = None
    takes_packs: bool = False
    functions: tuple[Function, ...] = ()
    draws: tuple[Draw, ...] = ()
    saved_alone: frozenset[int] = frozenset()


class Executable(torch.nn.Module):
    """One graph as a callable over tensors.

    Tensors cross without a copy, in and out, in whatever dense memory order the graph was built for; a tensor with
    other strides is copied into that order first.

    Args:
        spec: what it is made from.
        capture: replays its launches.
        walk: the function that runs a listing.
        waits: whether a call that reads indices on a GPU waits until all of them are known to be inside.

    Attributes:
        segments: what ``cut`` made.
    """

    def __init__(
        self, spec: ExecutableSpec, capture: Capture | None = None, walk: str = "", *, waits: bool = False
    ) -> None:
        super().__init__()
        built = spec.built
        self.spec, self.built = spec, built
        self.name = built.name
        self.op_count = built.op_count
        self.layout_changes = built.layout_changes
        self.device = spec.device
        self.inputs = Inputs(built.inputs)
        self.outputs = Outputs(built.outputs, built.writes, spec.device, spec.private, spec.kept, built.computed_bytes)
        self.capture = capture
        self.packing, self.takes_packs = spec.packing, spec.takes_packs
        self.model: Model | None = None
        self.listing = built.listing
        self._walk, self._waits = walk, waits
        self.runner: ListRunner | None = None
        self.segments: tuple[Segments, list[list[int]]] | None = None
        self._lock = threading.Lock()

    def bind(self, model: Model) -> None:
        """Gives the executable its compiled model."""
        self.model = model

    def bind_runner(self) -> None:
        """Makes the executable's launch list ready; its libraries are loaded."""
        spec = self.runner_spec()
        if self.segments is not None:
            self.runner = SegmentedRunner(spec, *self.segments)
        elif self.capture is None:
            self.runner = ListRunner(spec)
        else:
            self.runner = CapturedRunner(spec, self.capture, self.outputs.not_lent)

    def cut(self, least: int, outputs: Mapping[int, Collection[int]]) -> list[list[int]]:
        """Cuts the launch list, before ``bind_runner``, into segments that complete at least so many bytes each.

        Args:
            least: bytes.
            outputs: those that may leave later than the others; with each the arguments that may be written to as soon
                as it has left.

        Returns:
            For each segment but the first, which of ``outputs`` it completes; nothing where the list is not cut.
        """
        specs = self.built.outputs
        if self.listing is None or self.capture is not None or self.built.writes:
            return []
        sizes = {spec.index: spec.bytes for spec in specs}
        read: dict[int, set[int]] = {}
        for output, positions in outputs.items():
            mine = (number for number, spec in enumerate(self.built.inputs) if spec.position in positions)
            read.setdefault(specs[output].index, set()).update(mine)
        results = range(len(self.listing.results))
        segments = segments_of(self.listing, [sizes.get(number, 0) for number in results], least, read)
        if segments is None:
            return []
        places = [segments.complete[spec.index] if spec.index >= 0 else 0 for spec in specs]
        later = [
            [number for number, at in enumerate(places) if at == segment] for segment in range(1, len(segments.ends))
        ]
        if not all(later) or not outputs.keys() >= set(itertools.chain(*later)):
            return []
        self.segments = segments, later
        return later

    def runner_spec(self) -> RunnerSpec:
        """Everything that the runner of its launch list is made from."""
        assert self.listing is not None
        leaving, draws = self.outputs.leaving, self.spec.draws
        lasting = self.outputs.not_lent | {write.index for write in self.built.writes}
        return RunnerSpec(
            self.listing, self.built.inputs, leaving, self.device, self._walk, draws, self._waits, lasting
        )

    def output_order(self, number: int) -> Order | None:
        """The memory order of output ``number``; None for one that no computation makes."""
        return self.spec.orders[number]

    def forward(self, *args: Any) -> Any:
        """The FX graph's result for ``args``: a value, or a tuple of them."""
        results = self.run(args)
        return results[0] if self.built.bare_output else tuple(results)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The graph's outputs; ``args`` are the FX graph's placeholders, in order.

        Raises:
            RuntimeError: the graph was not compiled yet, or MAX failed.
            ValueError: a tensor of another shape, dtype or device than the graph was built for, or without memory.
        """
        try:
            return self._run(args)
        except WrappedError:
            updated = {write.position for write in self.built.writes}
            if any(isinstance(args[position], torch.Tensor) and not is_wrapped(args[position]) for position in updated):
                raise RuntimeError(f"{self.name} updates an argument by a batch of values") from None
            return called_for_each(functools.partial(self._run, at_once=True), args)

    def _run(self, args: Sequence[Any], at_once: bool = False) -> list[Any]:
        if self.runner is not None:
            return self.runner.run_at_once(args) if at_once else self.runner.run(args)
        if self.model is None:
            raise RuntimeError(f"{self.name} was called before it was compiled")
        args = [*args, *(draw() for draw in self.spec.draws)]
        buffers, _copies = self.inputs.buffers(args)
        with self._turn():
            results = execute(self.model, buffers)
        return self.outputs.collect(results, buffers, args)

    def _turn(self) -> AbstractContextManager[Any]:
        """One caller at a time; on a GPU also in order with PyTorch's streams."""
        return stream_sync(self.device).turn() if self.device.type == "cuda" else self._lock
