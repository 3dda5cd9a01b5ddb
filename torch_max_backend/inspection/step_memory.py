"""The memory of a training step: what is kept for the backward pass, and where the step needs most.

Counted are the bytes that a step is given and those that it allocates, from the graphs' launch lists. An allocator
rounds each of its blocks up. A GPU's memory also holds libraries, and what the rest of the process has, such as the
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from torch_max_backend.graph.account import needed
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.memory import SavedTensor

LISTED = 12
"""Saved tensors that are printed one by one."""


@dataclass(frozen=True)
class CallMemory:
    """The memory while one graph runs, in bytes.

    Results and workspace are allocated when the call begins, so this is its peak.

    Attributes:
        graph: "forward", "backward" or "inference".
        held: what is there before the call: parameters, buffers and inputs, and what earlier calls of the step have
            returned or kept.
        results: what the call returns, keeps or draws, but for what is updated in place.
        workspace: values between two launches.
        scratch: what launches keep between their kernels; 0 where no call has shown it yet.
        written_over: values between two launches that lie in saved tensors, and need no memory of their own.
        moment: the launch at which the workspace is fullest; where the graph is cut, the part that needs most.
    """

    graph: str
    held: int
    results: int
    workspace: int
    scratch: int
    written_over: int
    moment: str

    @property
    def total(self) -> int:
        """The total in bytes."""
        return self.held + self.results + self.workspace + self.scratch


@dataclass(frozen=True)
class StepMemory:
    """The memory of one forward and backward pass.

    Attributes:
        given: bytes of parameters, buffers and inputs.
        calls: of the graphs, in the order in which they run: backward graphs last, in reverse order.
        saved: what forward graphs keep for backward graphs beside these, the largest first.
    """

    given: int
    calls: tuple[CallMemory, ...]
    saved: tuple[SavedTensor, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes of ``saved``."""
        return sum(tensor.bytes for tensor in self.saved)

    @property
    def peak(self) -> CallMemory:
        """The call that needs most."""
        return max(self.calls, key=lambda call: call.total)

    @property
    def added(self) -> int:
        """Bytes that the step adds at its peak to what it is given."""
        return self.peak.total - self.given

    def print(self, console: Console) -> None:
        """Prints a table of the calls and one of the largest saved tensors."""
        title = f"memory in MiB; the peak is {_mib(self.peak.total)}, {_mib(self.added)} more than the step is given"
        table = Table("graph", "there before", "results", "workspace", "scratch", "together", "fullest at", title=title)
        for call in self.calls:
            sizes = (call.held, call.results, call.workspace, call.scratch, call.total)
            table.add_row(call.graph, *map(_mib, sizes), call.moment)
        console.print(table)
        if not self.saved:
            return
        reused = sum(tensor.bytes for tensor in self.saved if tensor.reused)
        title = f"{len(self.saved)} tensors kept for the backward pass, {_mib(self.saved_bytes)} MiB; "
        title += f"{_mib(reused)} MiB of it are used again as workspace"
        table = Table("MiB", "tensor", "made by", "line", "used again", title=title)
        for tensor in self.saved[:LISTED]:
            again = "yes" if tensor.reused else ""
            table.add_row(_mib(tensor.bytes), tensor.kind, tensor.op, tensor.user_line or "", again)
        rest = self.saved[LISTED:]
        if rest:
            table.add_row(_mib(sum(tensor.bytes for tensor in rest)), f"{len(rest)} more", "", "", "")
        console.print(table)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def step_memory(graphs: Sequence[CompiledGraph]) -> StepMemory | None:
    """The memory of a step that calls these graphs once each, in their order; None where that is not known."""
    calls: list[CallMemory] = []
    saved: dict[str, list[SavedTensor]] = {}
    given = held = kept = 0

    def call(graph: CompiledGraph, before: int) -> CallMemory:
        nonlocal kept
        bytes_ = needed(graph)
        workspace = bytes_.workspace + (bytes_.scratch or 0)
        on_cpu = bool(graph.executables) and graph.executables[0].device.type == "cpu"
        # There the last call's workspace serves the next one.
        kept = max(kept, workspace) if on_cpu else workspace
        scratch = bytes_.scratch or 0
        made = CallMemory(
            graph.name, before, bytes_.results, kept - scratch, scratch, bytes_.written_over, bytes_.moment
        )  # fmt: skip
        calls.append(made)
        return made

    forward = [graph for graph in graphs if not graph.name.startswith("backward")]
    backward = [graph for graph in graphs if graph.name.startswith("backward")]
    for number, graph in enumerate(forward):
        if graph.memory is None:
            return None
        # What a later graph is given besides, an earlier one has returned.
        own = graph.memory.state + (0 if number else graph.memory.given)
        given, held = given + own, held + own
        call(graph, held)
        saved[graph.memory.label] = list(graph.memory.saved)
        held += graph.memory.returned + sum(tensor.bytes for tensor in graph.memory.saved)
    for number, graph in enumerate(reversed(backward)):
        if graph.memory is None:
            return None
        # The gradients that later graphs of the backward pass are given, earlier ones have made.
        made = call(graph, held + (0 if number else graph.memory.given))
        mine = saved.get(graph.memory.label, [])
        held += made.results - sum(tensor.bytes for tensor in mine)
    return StepMemory(given, tuple(calls), tuple(_marked(forward, backward)))


def _marked(forward: Sequence[CompiledGraph], backward: Sequence[CompiledGraph]) -> list[SavedTensor]:
    """The saved tensors of all graphs, with those that are used again."""
    reused = {graph.memory.label: graph.memory.reused for graph in backward if graph.memory is not None}
    found = []
    for graph in forward:
        memory = graph.memory
        assert memory is not None
        again = reused.get(memory.label, frozenset())
        found += [
            replace(tensor, reused=number in again)
            for tensor, number in zip(memory.saved, memory.numbers, strict=True)
        ]  # fmt: skip
    return sorted(found, key=lambda tensor: -tensor.bytes)
