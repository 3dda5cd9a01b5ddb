"""Custom ops as MAX graphs. Most serve any size: every extent is symbolic, the geometry a run-time host operand.

An extent of the result that no operand has (the input size of a data gradient, say) comes in as the length of an
otherwise unused host tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.runtime import session
from torch_max_backend.runtime.execution import execute

Build = Callable[[Sequence[TensorValue], TensorValue, DeviceRef], TensorValue]


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads: its dtype and the names of its extents; an int is a fixed extent."""

    dtype: DType
    dims: tuple[str | int, ...]


@dataclass(frozen=True)
class KernelGraph:
    """One graph.

    Attributes:
        name: unique among the graphs of a process; it decides what the graph is.
        operands: the tensors it reads, in order.
        extents: names of the result's extents that no operand has.
        build: adds the ops: (operands, geometry, device) to the result.
    """

    name: str
    operands: tuple[Operand, ...]
    extents: tuple[str, ...]
    build: Build


_models: dict[tuple[str, torch.device], Model] = {}


@beartype
def load(kernel: KernelGraph, device: torch.device) -> Model:
    """The compiled graph, from this process, the disk cache or the compiler."""
    preload([kernel], device)
    return _models[kernel.name, device]


@beartype
def preload(kernels: Sequence[KernelGraph], device: torch.device) -> None:
    """Compiles those that this process does not have yet, together: many cost little more than one."""
    missing = {kernel.name: kernel for kernel in kernels if (kernel.name, device) not in _models}
    if not missing:
        return
    module = Module()
    for kernel in missing.values():
        add_graph(kernel, device, module)
    names = list(missing)
    for name, model in session.compile_module(module, device, names, len(names), names[0]).items():
        _models[name, device] = model


@beartype
def hold(kernel: KernelGraph, device: torch.device, model: Model) -> None:
    """Takes `model` for the compiled graph: `add_graph` put it into a module that was compiled elsewhere."""
    _models[kernel.name, device] = model


@beartype
def add_graph(kernel: KernelGraph, device: torch.device, module: Module) -> Graph:
    """Builds the graph into `module`."""
    place = DeviceRef.GPU(device.index or 0) if device.type == "cuda" else DeviceRef.CPU()
    host = DeviceRef.CPU()
    types = [TensorType(operand.dtype, operand.dims, place) for operand in kernel.operands]
    types.append(TensorType(DType.int64, ["geometry"], host))
    types.extend(TensorType(DType.uint8, [name], host) for name in kernel.extents)
    graph = Graph(kernel.name, input_types=types, kernel_library=session.kernel_library(), module=module)
    with graph:
        values = [value.tensor for value in graph.inputs]
        count = len(kernel.operands)
        graph.output(kernel.build(values[:count], values[count], place))
    return graph


@beartype
def bind(
    model: Model,
    kernel: KernelGraph,
    operands: Sequence[torch.Tensor],
    geometry: Sequence[int],
    extents: Mapping[str, int],
) -> Callable[[], torch.Tensor]:
    """A call of the model on these operands; it gives the result as the tensor that the graph returns."""
    buffers = [Buffer.from_dlpack(operand) for operand in operands]
    buffers.append(Buffer.from_numpy(np.array(geometry, np.int64)))
    buffers.extend(Buffer.from_numpy(np.zeros(extents[name], np.uint8)) for name in kernel.extents)

    def call() -> torch.Tensor:
        return torch.from_dlpack(execute(model, buffers)[0])

    return call


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Makes MAX's stream PyTorch's current one, so that both runtimes' work is ordered and timed on one stream."""
    if device.type != "cuda":
        yield
        return
    queue = session.max_device(device).default_queue
    stream = torch.cuda.ExternalStream(queue.native_stream_handle, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
