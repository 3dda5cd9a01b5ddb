"""Library functions: the kernels behind the thin ops of a graph, compiled once for a machine.

An op of the Mojo package passes its operands to a C function by name (`kernels/common/library.mojo`). Building a graph
records the functions that its ops call; compiling the graph builds and loads libraries with these functions
(`torch_max_backend.runtime.libraries`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from max.driver import accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.ir.notes import key_of, notes
from torch_max_backend.mojo_ops.sources import symbol_of


class Function(Protocol):
    """A function that a library exports; functions of one symbol are equal."""

    @property
    def target(self) -> Literal["cpu", "gpu"]:
        """MAX's word for the kind of device."""
        ...

    @property
    def entry(self) -> str:
        """The function of an entries.mojo that it is made of."""
        ...

    @property
    def symbol(self) -> str:
        """The name of the exported C function: it says all that the function depends on, its sources too."""
        ...

    @property
    def expression(self) -> str:
        """The entry with its parameters, as Mojo writes it."""
        ...

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """What its source imports: module and name; modules stand in the kernels' package, or begin with `std.`."""
        ...

    @property
    def definition(self) -> str:
        """Mojo source that stands before the function, "" where there is none."""
        ...

    @property
    def seconds(self) -> float:
        """CPU-seconds that it adds to a library that has others of its family, about."""
        ...


#: By how an entry's name begins: for a CPU, for a GPU, and for Hopper where it has an entry of its own.
_SECONDS = {
    "conv_fprop": (1.3, 7.0, 6.0),
    "conv_": (1.3, 7.0, 10.0),
    "matmul": (1.5, 9.0, 9.0),
    "attention": (4.0, 14.0, 14.0),
    "max_pool_fprop": (0.7, 2.5, 2.5),
    "avg_pool_fprop": (0.7, 1.8, 1.8),
    "max_pool": (0.9, 7.0, 7.0),
    "avg_pool": (0.9, 6.0, 6.0),
    "": (0.3, 1.0, 1.0),
}


@dataclass(frozen=True)
class LibraryFunction:
    """One entry of `kernels/FAMILY/FOLDER/entries.mojo`, for one kind of device and with its parameters bound.

    Attributes:
        family: the folder below `kernels/`.
        entry: the function's name in Mojo.
        target: MAX's word for the kind of device.
        parameters: what stands between the entry's brackets after the target: types, flags and numbers.
        folder: the folder of the family that the entries stand in, "" for the family's own.
        module: the entries' module there.
        rest: another function that this one calls, by its symbol, for what it does not take itself.
        rest_is_rare: that is so little that the other one is built when it is first called.
    """

    family: str
    entry: str
    target: Literal["cpu", "gpu"]
    parameters: tuple[DType | int, ...]
    folder: str = ""
    module: str = "entries"
    rest: LibraryFunction | None = None
    rest_is_rare: bool = field(default=False, compare=False)

    @property
    def symbol(self) -> str:
        """The name of the exported C function."""
        name = "_".join(("torch_max", self.entry, *map(self._word, self.parameters), self.target))
        called = self.rest.imports if self.rest else ()
        return symbol_of(name, (module for module, _ in (*self.imports, *called)))

    @property
    def expression(self) -> str:
        """The entry with its parameters, as Mojo writes it."""
        words = [f'"{self.target}"', *(f"DType.{p.name}" if isinstance(p, DType) else str(p) for p in self.parameters)]
        if self.rest:
            words.append(f'"{self.rest.symbol}"')
        return f"{self.entry}[{', '.join(words)}]"

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """The entry."""
        module = f"{self.family}.{self.folder}" if self.folder else self.family
        return frozenset({(f"{module}.{self.module}", self.entry)})

    @property
    def definition(self) -> str:
        """An entry needs nothing beside it."""
        return ""

    @property
    def seconds(self) -> float:
        """As measured, for the entry's kind."""
        kind = next((kind for kind in _SECONDS if self.entry.startswith(kind)), "")
        own = _SECONDS[kind][0 if self.target == "cpu" else 1 if self.rest is None else 2]
        groups = self.parameters[-1] if self.family == "convolution" and self.parameters else 0
        return own + (groups if isinstance(groups, int) else 0)

    @property
    def at_once(self) -> tuple[LibraryFunction, ...]:
        """All that is built before this function is called."""
        return (self,) if self.rest is None or self.rest_is_rare else (self, self.rest)

    def is_part_of(self, other: LibraryFunction) -> bool:
        """Whether the other does all that this one does and more: a convolution that serves more groups."""
        if self.family != "convolution" or (self.entry, self.target) != (other.entry, other.target):
            return False
        *types, groups = self.parameters
        *others, more = other.parameters
        return types == others and isinstance(groups, int) and isinstance(more, int) and groups < more

    @staticmethod
    def _word(parameter: DType | int) -> str:
        return parameter.name if isinstance(parameter, DType) else str(int(parameter))


@dataclass(frozen=True)
class NotedCall:
    """What a custom op calls, as a typed graph's ``Call`` has it."""

    function: Function
    kernel: str
    facts: Any = None
    in_order: Mapping[int, frozenset[int]] = field(default_factory=dict)


_lock = threading.Lock()
_required: set[Function] = set()
_noted: ContextVar[list[Function] | None] = ContextVar("_noted", default=None)
"""Receives what the graph at hand calls."""


def required() -> frozenset[Function]:
    """Every function that a graph of this process calls, but for what others rarely call."""
    with _lock:
        return frozenset(_required)


def with_rest(functions: Iterable[Function]) -> frozenset[Function]:
    """The functions, and all that they may call."""
    called = frozenset(functions)
    return called | {each.rest for each in called if isinstance(each, LibraryFunction) and each.rest is not None}


@beartype
def require(family: str, entry: str, device: DeviceRef, parameters: tuple[DType | bool, ...]) -> str:
    """The symbol of a function that the graph being built calls, for an op's `function`."""
    return require_function(LibraryFunction(family, entry, target_of(device), parameters))


def target_of(device: DeviceRef) -> Literal["cpu", "gpu"]:
    """MAX's word for the kind of device."""
    return "gpu" if device.is_gpu() else "cpu"


def is_hopper() -> bool:
    """Whether the accelerator at hand is one of NVIDIA's Hopper generation."""
    return accelerator_architecture_name().startswith("sm_90")


def has_tensor_cores() -> bool:
    """Whether the accelerator at hand multiplies floats of 16 bits as NVIDIA's do since sm_80."""
    name = accelerator_architecture_name()
    return name.startswith("sm_") and int("".join(filter(str.isdigit, name))) >= 80


def require_function(function: Function) -> str:
    """As ``require``, for a function that is there already."""
    noted = _noted.get()
    if noted is not None:
        noted.append(function)
        return function.symbol
    with _lock:
        _required.update(function.at_once if isinstance(function, LibraryFunction) else (function,))
    return function.symbol


@contextlib.contextmanager
def noted() -> Iterator[list[Function]]:
    """A context whose list receives every function that is required in it, by this thread, instead of ``required``: the
    graph that calls them may be given up."""
    functions: list[Function] = []
    before = _noted.set(functions)
    try:
        yield functions
    finally:
        _noted.reset(before)


@beartype
def call(
    family: str,
    op: str,
    device: DeviceRef,
    values: Sequence[TensorValue],
    result_types: Sequence[TensorType],
    parameters: tuple[DType | bool, ...],
    in_order: Mapping[int, frozenset[int]] | None = None,
) -> list[TensorValue]:
    """Adds the op `op` to the graph that is being built, as a call of the library function of the same name.

    Args:
        family: the kernels' folder.
        op: the op's name, and its entry's.
        device: where it runs.
        values: the operands.
        result_types: of the results.
        parameters: the entry's, after the target.
        in_order: as ``call_function`` takes it.
    """
    function = LibraryFunction(family, op, target_of(device), parameters)
    return call_function(op, function, device, values, result_types, in_order=in_order)


def call_function(
    op: str,
    function: LibraryFunction,
    device: DeviceRef,
    values: Sequence[TensorValue],
    result_types: Sequence[TensorType],
    *,
    facts: Any = None,
    in_order: Mapping[int, frozenset[int]] | None = None,
) -> list[TensorValue]:
    """As ``call``, of a function that is there already.

    Args:
        op: the op's name.
        function: what it calls.
        device: where it runs.
        values: the operands.
        result_types: of the results.
        facts: what passes have to know of the call beyond its operands' shapes, such as a convolution's geometry.
        in_order: by a result's number, the operands of which an element is read for the element at its place alone.
    """
    chosen = {"function": require_function(function)}
    results = [result.tensor for result in ops.custom(op, device, list(values), list(result_types), chosen)]
    notes().calls[key_of(results[0])] = NotedCall(function, op, facts, in_order or {})
    return results
