"""A MAX graph that is being built, read back: its operations, and the values between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, StaticDim, TensorValue

from torch_max_backend.dtypes import MAX_TO_TORCH
from torch_max_backend.fusion.scalars import DTYPES
from torch_max_backend.max_compat import block_of, mo, value_of


@dataclass(eq=False)
class Operation:
    """One operation.

    Attributes:
        handle: MLIR's operation.
        name: with its dialect, such as "rmo.add".
        operands: what it reads; chains are left out.
        results: what it makes; chains are left out.
        position: its place among the others.
    """

    handle: Any
    name: str
    position: int
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)

    def constant(self) -> np.ndarray | None:
        """The values of a constant that stands in the graph's text, flat, None for anything else; halves as float32."""
        raw = self.content()
        if raw is None or self.results[0].dtype not in DTYPES:
            return None
        dtype = MAX_TO_TORCH[self.results[0].dtype]
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.float().numpy() if dtype in (torch.bfloat16, torch.float16) else flat.numpy()

    def content(self) -> bytes | None:
        """The bytes of a constant that stands in the graph's text, None for anything else."""
        if self.name != "mo.constant" or len(self.results) != 1:
            return None
        attribute, result = self.results[0].core.owner.value, self.results[0]
        data = getattr(getattr(attribute, "data", None), "data", None)
        if data is None or result.shape is None or result.dtype not in MAX_TO_TORCH:
            return None
        raw = bytes(data)
        return raw if len(raw) == result.size * MAX_TO_TORCH[result.dtype].itemsize else None


@dataclass(eq=False)
class Value:
    """One tensor.

    Attributes:
        handle: MLIR's value.
        core: the same for ``max.graph``.
        dtype: of its elements.
        shape: None where an extent is symbolic.
        device: where it lies.
        maker: None for an argument of the graph.
        readers: who reads it, each as often as it does.
    """

    handle: Any
    core: Any
    dtype: DType
    shape: tuple[int, ...] | None
    device: DeviceRef
    maker: Operation | None
    readers: list[Operation] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many elements; 0 where an extent is symbolic."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of all its elements."""
        return self.size * self.dtype.size_in_bytes

    @property
    def tensor(self) -> TensorValue:
        """The value as ``max.graph`` has it."""
        return TensorValue(self.core)


def read(graph: Graph) -> tuple[list[Operation], dict[Any, Value]]:
    """The operations in their order, and every tensor by MLIR's value."""
    block = block_of(graph)
    values: dict[Any, Value] = {}
    operations: list[Operation] = []
    for argument in block.arguments:
        _add(values, argument, None)
    for handle in block:
        operation = Operation(handle, handle.name, len(operations))
        operations.append(operation)
        for operand in handle.operands:
            if operand in values:
                operation.operands.append(values[operand])
                values[operand].readers.append(operation)
        for result in handle.results:
            value = _add(values, result, operation)
            if value is not None:
                operation.results.append(value)
    return operations, values


def _add(values: dict[Any, Value], handle: Any, maker: Operation | None) -> Value | None:
    core = value_of(handle)
    if not isinstance(core.type, mo.TensorType):
        return None
    tensor = TensorValue(core)
    known = all(isinstance(dim, StaticDim) for dim in tensor.shape)
    shape = tuple(int(dim) for dim in tensor.shape) if known else None
    values[handle] = Value(handle, core, tensor.dtype, shape, tensor.device, maker)
    return values[handle]
