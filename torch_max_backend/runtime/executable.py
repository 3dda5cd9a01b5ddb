"""Running a compiled MAX graph on PyTorch's tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from max.driver import Buffer
from max.engine import Model

from torch_max_backend.graph.builder import BuiltGraph, InputSpec, OutputSpec
from torch_max_backend.graph.layout import Order, contiguous_order
from torch_max_backend.runtime.execution import execute


class Executable(torch.nn.Module):
    """One MAX graph as a callable over tensors.

    Tensors cross by DLPack without a copy, in and out, in whatever dense memory order the graph was built for;
    a tensor with other strides is copied into that order first. Inputs named in ``static_inputs`` (parameters
    and buffers) keep their DLPack hand-over between calls for as long as they stay at one address.
    """

    def __init__(self, built: BuiltGraph, device: torch.device, static_inputs: frozenset[int]) -> None:
        super().__init__()
        self.built = built
        self.name = built.name
        self.op_count = built.op_count
        self.layout_changes = built.layout_changes
        self.device = device
        self.inputs = [_Input(spec, spec.position in static_inputs) for spec in built.inputs]
        self.writes = [(write.position, _Output(OutputSpec(write.index, write.order))) for write in built.writes]
        self.outputs = [_Output(spec) for spec in built.outputs]
        self._orders = [spec.order if spec.index >= 0 else None for spec in built.outputs]
        self.model: Model | None = None
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    def bind(self, model: Model) -> None:
        """Gives the executable its compiled model."""
        self.model = model

    def output_order(self, number: int) -> Order | None:
        """The memory order of output ``number``; None for one that no computation makes."""
        return self._orders[number]

    def forward(self, *args: Any) -> Any:
        """What the FX graph returns for ``args``: a value, or a tuple of them."""
        results = self.run(args)
        return results[0] if self.built.bare_output else tuple(results)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The graph's outputs; ``args`` are the FX graph's placeholders, in order."""
        if self.model is None:
            raise RuntimeError(f"{self.name} was called before it was compiled")
        results: list[Buffer] = []
        with self._lock, torch.no_grad():
            if self.device.type == "cuda":
                results = self._run_on_stream(args)
            else:
                results = execute(self.model, [source.buffer(args) for source in self.inputs])
            if self.writes:
                torch._foreach_copy_(
                    [args[position] for position, _ in self.writes],
                    [output.tensor(results, args) for _, output in self.writes],
                )
            return [output.tensor(results, args) for output in self.outputs]

    def _run_on_stream(self, args: Sequence[Any]) -> list[Buffer]:
        """Runs on MAX's stream, ordered after what PyTorch's current stream holds and before what it gets."""
        assert self.model is not None
        current = torch.cuda.current_stream(self.device)
        if self._stream is None:
            from torch_max_backend.runtime.session import max_device

            queue = max_device(self.device).default_queue
            self._stream = torch.cuda.ExternalStream(queue.native_stream_handle, device=self.device)
        buffers = [source.buffer(args) for source in self.inputs]
        self._stream.wait_stream(current)
        results = execute(self.model, buffers)
        current.wait_stream(self._stream)
        return results


class _Input:
    """One tensor argument on its way into MAX."""

    def __init__(self, spec: InputSpec, static: bool) -> None:
        self.position = spec.position
        self.dtype = spec.dtype
        self.device = spec.device
        self.order = None if spec.order == contiguous_order(len(spec.order)) else spec.order
        self.static = static
        self._known: tuple[int, tuple[int, ...], Buffer] | None = None

    def buffer(self, args: Sequence[Any]) -> Buffer:
        tensor = args[self.position]
        if self._known is not None:
            address, stride, buffer = self._known
            if tensor.data_ptr() == address and tensor.stride() == stride:
                return buffer
        view = tensor if self.order is None else tensor.permute(self.order)
        if view.requires_grad:
            view = view.detach()
        if not view.is_contiguous():
            return _to_buffer(view.contiguous())
        buffer = _to_buffer(view)
        if self.static and tensor.numel():
            self._known = (tensor.data_ptr(), tensor.stride(), buffer)
        return buffer


def _to_buffer(tensor: torch.Tensor) -> Buffer:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return Buffer._from_dlpack(tensor)


class _Output:
    """One result on its way out of MAX."""

    def __init__(self, spec: OutputSpec) -> None:
        self.index = spec.index
        self.passthrough = spec.passthrough
        self.constant = spec.constant
        rank = len(spec.order)
        self.inverse = (
            None if spec.order == contiguous_order(rank) else tuple(spec.order.index(dim) for dim in range(rank))
        )

    def tensor(self, results: Sequence[Buffer], args: Sequence[Any]) -> Any:
        if self.index < 0:
            return self.constant if self.passthrough is None else args[self.passthrough]
        tensor = torch.from_dlpack(results[self.index])
        return tensor if self.inverse is None else tensor.permute(self.inverse)
