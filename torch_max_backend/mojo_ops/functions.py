"""Library functions: C functions over kernels, compiled once for a machine.

Lowerings add calls of them to a graph (``call``). A launch list makes these calls; in a graph that MAX compiles, thin
ops make them (``registrations.py``). Building a graph records the functions that it calls; compiling it builds and
loads libraries with these functions (`torch_max_backend.runtime.building.libraries`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from max.driver import accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.ir.notes import key_of, notes
from torch_max_backend.mojo_ops.signatures import Cost, Family, Number, Signature, declared, load_all
from torch_max_backend.mojo_ops.sources import symbol_of

Target: TypeAlias = Literal["cpu", "gpu"]
"""MAX's word for a kind of device."""


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
        """The imports of its source: module and name; modules are in the kernels' package, or begin with `std.`."""
        ...

    @property
    def definition(self) -> str:
        """Mojo source that stands before the function, "" where there is none."""
        ...

    @property
    def use(self) -> str:
        """Its purpose, in a word or two."""
        ...

    @property
    def seconds(self) -> float:
        """CPU-seconds that it adds to a library that has others of its family, about."""
        ...


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
        table: what the entry chooses a kernel from: the name of a table in the family, with its module's path, such as
            "gpu.dispatch.DEPTHWISE_KERNELS". The entry takes it behind its parameters. A library may have the tables of
            several families: their names differ.
        rest: another function that this one calls, by its symbol, for what it does not take itself.
        rest_is_rare: that is so little that the other one is built when it is first called.
        cost: of the entry.
        graded: the last parameter says how much the function serves: a larger one does all that a smaller one does.
    """

    family: str
    entry: str
    target: Literal["cpu", "gpu"]
    parameters: tuple[DType | int, ...]
    folder: str = ""
    module: str = "entries"
    table: str = ""
    rest: LibraryFunction | None = None
    rest_is_rare: bool = field(default=False, compare=False)
    cost: Cost = field(default=Cost(), compare=False)
    graded: bool = field(default=False, compare=False)

    @property
    def symbol(self) -> str:
        """The name of the exported C function."""
        kernels = self.table.rpartition(".")[2].removesuffix("KERNELS").lower().split("_")
        told = (word for word in kernels if word not in ("", self.target, *self.entry.split("_")))
        name = "_".join(("torch_max", self.entry, *told, *map(self._word, self.parameters), self.target))
        called = self.rest.imports if self.rest else ()
        return symbol_of(name, (module for module, _ in (*self.imports, *called)))

    @property
    def expression(self) -> str:
        """The entry with its parameters, as Mojo writes it."""
        words = [f'"{self.target}"', *(f"DType.{p.name}" if isinstance(p, DType) else str(p) for p in self.parameters)]
        if self.table:
            words.append(self.table.rpartition(".")[2])
        if self.rest:
            words.append(f'"{self.rest.symbol}"')
        return f"{self.entry}[{', '.join(words)}]"

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """The entry, and its table."""
        module = f"{self.family}.{self.folder}" if self.folder else self.family
        entry = (f"{module}.{self.module}", self.entry)
        if not self.table:
            return frozenset({entry})
        path, _, name = self.table.rpartition(".")
        return frozenset({entry, (f"{self.family}.{path}", name)})

    @property
    def definition(self) -> str:
        """An entry needs nothing beside it."""
        return ""

    @property
    def use(self) -> str:
        """Its family's."""
        if self.family not in declared:
            load_all()
        return declared[self.family].use

    @property
    def seconds(self) -> float:
        """As the signature says; what a graded function serves beside the least costs more."""
        own = self.cost.cpu if self.target == "cpu" else self.cost.gpu if self.rest is None else self.cost.hopper
        return own + (int(self.parameters[-1]) if self.graded else 0)

    @property
    def at_once(self) -> tuple[LibraryFunction, ...]:
        """The functions that are built before this one is called."""
        return (self,) if self.rest is None or self.rest_is_rare else (self, self.rest)

    def is_part_of(self, other: LibraryFunction) -> bool:
        """Whether the other does all that this one does and more."""
        called, wanted = ((each.family, each.entry, each.target, each.table) for each in (other, self))
        if not self.graded or called != wanted:
            return False
        *own, grade = self.parameters
        *others, other_grade = other.parameters
        return own == others and int(grade) < int(other_grade)

    @staticmethod
    def _word(parameter: DType | int) -> str:
        return parameter.name if isinstance(parameter, DType) else str(int(parameter))


class Facts:
    """Facts about a call beyond its operands' shapes and its numbers; each family has a type of its own."""

    def outside(self, index: int, size: int) -> str:
        """The text of an error about an index that the call's kernels have reported.

        Args:
            index: as it was reported.
            size: of the dimension that it is outside of.
        """
        return f"{index} in a dimension of {size}"


@dataclass(frozen=True)
class NotedCall:
    """The call that a custom op makes."""

    function: Function
    signature: Signature
    numbers: tuple[Number, ...] | None
    """None where the graph gets them as an operand of its own."""
    facts: Facts | None = None


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
def require_entry(family: str, entry: str, device: DeviceRef, parameters: tuple[DType | bool, ...]) -> str:
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
    """As ``require_entry``, for a function that is there already."""
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


def function_of(
    family: Family,
    entry: str,
    target: Literal["cpu", "gpu"],
    parameters: tuple[DType | int, ...],
    folder: str = "",
    module: str = "entries",
    table: str = "",
) -> LibraryFunction:
    """The library function of a family's entry, for one kind of device and with its parameters bound; the rest as
    ``LibraryFunction`` has it."""
    return LibraryFunction(family.folder, entry, target, parameters, folder, module, table, cost=family[entry].cost)


Variants: TypeAlias = Callable[[Target, Sequence[DType]], Iterable[LibraryFunction]]
"""Gives the functions of a family for a kind of device and for floats of these dtypes."""
_variants: dict[str, Variants] = {}
"""Families whose entries have other parameters than one dtype, by folder."""


def variants(folder: str) -> Callable[[Variants], Variants]:
    """Declares how the functions of a family's entries are enumerated, for ``all_functions``."""

    def declare(each: Variants) -> Variants:
        _variants[folder] = each
        return each

    return declare


def of_each_dtype(family: Family, target: Target, dtypes: Sequence[DType]) -> Iterator[LibraryFunction]:
    """The functions of a family whose entries have a dtype for their only parameter."""
    for entry in dict.fromkeys(signature.name for signature in family.signatures):
        for dtype in dtypes:
            yield function_of(family, entry, target, (dtype,))


def all_functions(target: Target, dtypes: Sequence[DType]) -> list[Function]:
    """Every function that lowerings may call on floats of these dtypes, on the machine at hand, with what they call.

    Generated programs are not among them.
    """
    load_all()
    found: set[Function] = set()
    for folder, family in declared.items():
        enumerated = _variants.get(folder, functools.partial(of_each_dtype, family))
        found.update(enumerated(target, dtypes))
    return sorted(with_rest(found), key=lambda each: each.symbol)


@beartype
def call(
    signature: Signature,
    function: LibraryFunction,
    values: Sequence[TensorValue],
    result_types: Sequence[TensorType],
    numbers: Sequence[Number] | TensorValue = (),
    *,
    facts: Facts | None = None,
) -> list[TensorValue]:
    """Adds an op to the graph that is being built, as a call of a library function.

    Args:
        signature: what the function takes.
        function: what is called.
        values: the operands, all on one device.
        result_types: of the results.
        numbers: the call's, or a host tensor with their words (``Signature.encoded``) that the graph gets when it runs,
            which a launch list cannot have.
        facts: what passes have to know besides.

    Raises:
        ValueError: the operands, results or numbers are not what the signature says.
    """
    signature.check(result_types, values)
    device = values[0].device
    operands, known = list(values), numbers if isinstance(numbers, Sequence) else None
    if signature.takes_numbers:
        host = numbers
        if known is not None:
            words = np.array(signature.encoded(known), np.int64)
            host = ops.constant(words, DType.int64, device=DeviceRef.CPU())
        operands.insert(0, host)
    chosen = {"function": require_function(function)}
    results = [result.tensor for result in ops.custom(signature.name, device, operands, list(result_types), chosen)]
    notes().calls[key_of(results[0])] = NotedCall(function, signature, None if known is None else tuple(known), facts)
    return results
