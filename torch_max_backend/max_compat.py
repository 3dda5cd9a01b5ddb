"""Every private name of MAX and Mojo that this package needs.

Seen in MAX 26.7 and Mojo 1.2. Each has a comment that says what it is for, and which public name could replace it. If a
release moves a name, only this file changes; ``tests/repository/test_compat.py`` checks that no other file uses private
names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from max._core import Value as _CoreValue
from max._core import graph as _graph

# Types and operations of the graph. max.graph builds graphs; to read one there is MLIR alone.
from max._core.dialects import kgen as kgen
from max._core.dialects import mo as mo
from max._core.dialects import rmo as rmo

# Memory that somebody else owns, as DLPack; the protocol's Python side orders streams for every tensor.
from max._core.dlpack import make_dlpack_capsule as make_dlpack_capsule
from max._mlir import ir as _ir
from max._mlir_context import in_default_mlir_context as _in_default_mlir_context
from max.driver import Buffer, Device
from max.engine import Model
from max.graph import Graph, KernelLibrary, Module, Shape, TensorType, TensorValue
from max.graph.ops.elementwise import _trunc_div
from mojo import _package_root
from mojo.run import _mojo_env

# It logs by the functions of ``logging``, the first of which adds a handler to the user's root logger.
_package_root.logging = logging.getLogger("mojo")

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Decorates what builds or compiles graphs: each thread has to enter MAX's MLIR context before.
in_mlir_context: Callable[[_Function], _Function] = _in_default_mlir_context

#: The address of a buffer's memory; ``Buffer.__dlpack__`` tells it in a capsule alone.
buffer_address: Callable[[Buffer], int] = Buffer._data_ptr

#: A buffer over what an object with DLPack's protocol holds; ``Buffer.from_dlpack`` asks first what object that is.
buffer_from_capsule: Callable[[Any], Buffer] = Buffer._from_dlpack


_tensor_type_from_mlir = TensorType.from_mlir
_tensor_value_from = TensorValue.__init__


@functools.lru_cache(4096)
def _parsed(type_: Any) -> TensorType:
    return _tensor_type_from_mlir(type_)


def _type_from_mlir(type_: Any) -> TensorType:
    """``TensorType.from_mlir``, whose own parses the same types again and again: half of an op's time."""
    known = _parsed(type_)
    # MAX writes to a type's device, and a shape is a list.
    result = TensorType.__new__(TensorType)
    result.__dict__.update(known.__dict__)
    result.shape = Shape()
    result.shape.extend(known.shape)
    return result


def _value_from(self: TensorValue, value: Any) -> None:
    """``TensorValue.__init__``, which asks first whether ``value`` has a protocol: slow, and no to what MLIR has."""
    if isinstance(value, (TensorValue, _CoreValue)):
        self._mlir_value = value._mlir_value if isinstance(value, TensorValue) else value
    else:
        _tensor_value_from(self, value)


# For this process's own graphs as for ours: the results are the same.
TensorType.from_mlir = staticmethod(_type_from_mlir)
TensorValue.__init__ = _value_from


def execute(model: Model, buffers: list[Buffer]) -> list[Buffer]:
    """A model's outputs for buffers that lie on its devices; ``Model.execute`` looks at each in Python first."""
    return model._execute_device_tensors(buffers)


#: Division of whole numbers that rounds to zero; ``max.graph.ops.floor_div`` rounds down.
integer_division: Callable[[TensorValue, TensorValue], TensorValue] = _trunc_div


def device_context(device: Device) -> int:
    """The address of a device's context, as Mojo's ``DeviceContext`` holds it."""
    return device._device_context_ptr()


def block_of(graph: Graph) -> Any:
    """MLIR's block with the graph's operations."""
    return graph._mlir_op.regions[0].blocks[0]


def last_operation(graph: Graph) -> Any:
    """The operation that was added last; None where there is none."""
    return _graph.last_operation(graph._body)


def erase(graph: Graph) -> None:
    """Takes a graph out of its module."""
    graph._mlir_op.erase()


def add_op(graph: Graph, op: type[Any], **operands: Any) -> list[Any]:
    """Adds an operation in a form for which max.graph.ops has no function; its results."""
    return graph._add_op_generated(op, **operands)


def owner_of(value: TensorValue) -> Any:
    """The operation that makes the value."""
    return value._mlir_value.owner


def handle_of(tensor: TensorValue) -> Any:
    """A tensor as MLIR's Python bindings have it: what blocks and operations hold, and equal where they are."""
    return _ir.Value._CAPICreate(tensor._mlir_value._CAPIPtr)


def value_of(handle: Any) -> Any:
    """The inverse of ``handle_of``, in the form that ``TensorValue`` takes."""
    return _CoreValue._from_cmlir(handle)


def declare_kernels(library: KernelLibrary, module: Module) -> None:
    """Makes a library's kernels known in a module that was built without it."""
    library._analysis.seed_kernel_decls(module.mlir_module)


def text_of(module: Module) -> str:
    """A module as MLIR writes it."""
    return module._to_mlir_str()


def mojo_environment() -> Mapping[str, str]:
    """The environment that MAX's own launcher gives ``mojo``; it takes none of its caller's."""
    return _mojo_env()


@functools.cache
def ptx_compiler_path() -> Path:
    """The library with NVIDIA's compiler of PTX that comes with Mojo; it need not be there."""
    return Path(mojo_environment()["MODULAR_MOJO_MAX_PACKAGE_ROOT"]) / "lib" / "libNVPTX.so"
