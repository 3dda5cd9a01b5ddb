"""The memory of a compiled graph: what it is given, what it makes, and what it keeps for its backward graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a forward graph makes and keeps for its backward graph.

    Attributes:
        bytes: of its elements.
        shape: of the tensor.
        dtype: of the tensor.
        op: the aten op that makes it.
        name: of the op's node in the forward graph.
        user_line: the line of the user's code that the op came from, where it is known.
        reused: the backward graph uses its memory as workspace when it has read it for the last time.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    name: str
    user_line: str | None = None
    reused: bool = False

    @property
    def kind(self) -> str:
        """Dtype and shape, such as float32[2, 3]."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Kept:
    """The tensors that a Dynamo graph keeps for its backward pass, for error messages.

    Attributes:
        bytes: of all.
        largest: some tensors.
    """

    bytes: int
    largest: tuple[SavedTensor, ...]

    def __str__(self) -> str:
        lines = [f"{self.bytes / 2**20:.1f} MiB are kept for the backward pass of this graph; the largest tensors:"]
        for tensor in self.largest:
            where = f", {tensor.user_line}" if tensor.user_line else ""
            lines.append(f"  {tensor.bytes / 2**20:.1f} MiB: {tensor.kind} of {tensor.op}{where}")
        return "\n".join(lines)


@dataclass(frozen=True)
class GraphMemory:
    """The memory of one graph, in bytes.

    Attributes:
        label: graphs of one Dynamo graph have the same one.
        state: arguments that are the model's: parameters and buffers.
        given: other arguments: inputs of a forward graph, gradients of its results for a backward graph.
        returned: results that the caller gets, in memory of their own.
        saved: what a forward graph keeps, besides its arguments and results; the largest first.
        reused: numbers of the values that a backward graph writes over, among all that its forward graph keeps.
        numbers: of ``saved`` among these.
    """

    label: str
    state: int
    given: int
    returned: int
    saved: tuple[SavedTensor, ...] = ()
    reused: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Allocations:
    """Bytes that a call allocates.

    Attributes:
        results: what it returns, updates, keeps and draws.
        workspace: values between two launches; where the graph is cut, all that lives beside ``results`` at most.
        scratch: what launches keep between their kernels; None before a first call has shown it.
        written_over: values between two launches that lie in saved tensors.
        moment: the launch at which the workspace is fullest, in words; empty where there is none.
    """

    results: int
    workspace: int
    scratch: int | None
    written_over: int
    moment: str = ""
