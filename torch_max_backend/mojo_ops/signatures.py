"""Declares once what each entry of the kernel libraries takes.

A call of an entry is a list of 64-bit words (kernels/common/library.mojo): its numbers, then every result and every
operand as an address followed by extents. From a declaration come the words of a launch, and the op by which a graph
that MAX compiles makes the same call (``registrations.py``).
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from max.dtype import DType
from max.graph import TensorType, TensorValue

Number = int | float
Address = TypeVar("Address")


@dataclass(frozen=True)
class Tensor:
    """A result or an operand of an entry, contiguous in memory.

    Attributes:
        name: what Mojo calls it.
        dtype: of its elements; a name stands for a dtype that all tensors with that name share.
        rank: how many extents it has; None where a call has its address alone.
    """

    name: str
    dtype: DType | str
    rank: int | None

    @property
    def bare(self) -> Tensor:
        """The same without extents."""
        return replace(self, rank=None)


@dataclass(frozen=True)
class Cost:
    """CPU-seconds that a function adds to a library that has others of its family, about: for a CPU, for a GPU, and for
    Hopper where the entry has kernels of its own there."""

    cpu: float = 0.3
    gpu: float = 1.0
    hopper: float = 0.0


@dataclass(frozen=True, eq=False)
class Signature:
    """The numbers, results and operands of an entry.

    Attributes:
        name: the entry's, and that of the op in MAX's graphs.
        results: what it makes.
        operands: what it reads.
        numbers: plain numbers by name, each with its type; a flag is an int.
        listed: the name of further whole numbers, which follow the others with their count in front; "" for none.
        in_order: by a result's number, the operands of which an element is read for the element at its place alone.
        after: whether calls have further operands, of the first one's kind, that are made before and not read.
        reports: whether its kernels report an index outside its dimension (kernels/common/bounds.mojo).
        cost: of compiling it.
    """

    name: str
    results: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    numbers: Mapping[str, type[Number]] = field(default_factory=dict)
    listed: str = ""
    in_order: Mapping[int, frozenset[int]] = field(default_factory=dict)
    after: bool = False
    reports: bool = False
    cost: Cost = Cost()

    @property
    def is_op(self) -> bool:
        """Whether it is that of an op, too: without extents in the words, only the caller knows the shapes."""
        return all(tensor.rank is not None for tensor in (*self.results, *self.operands))

    @property
    def takes_numbers(self) -> bool:
        """Whether a call has any."""
        return bool(self.numbers or self.listed)

    def encoded(self, numbers: Sequence[Number]) -> list[int]:
        """The words of a call's numbers: whole ones as they are, others as the bits of a float64.

        Args:
            numbers: in the order of ``numbers``, then those that are ``listed``.

        Raises:
            ValueError: they are too few or too many.
        """
        fixed, rest = numbers[: len(self.numbers)], numbers[len(self.numbers) :]
        if len(fixed) < len(self.numbers) or (rest and not self.listed):
            names = ", ".join([*self.numbers, *([f"{self.listed}..."] if self.listed else [])])
            raise ValueError(f"{self.name}: {len(numbers)} numbers are given: must be {names or 'none'}")
        words = [
            bits(number) if kind is float else int(number)
            for number, kind in zip(fixed, self.numbers.values(), strict=True)
        ]
        return [*words, len(rest), *map(int, rest)] if self.listed else words

    def named(self, words: Sequence[int]) -> dict[str, Any]:
        """The numbers of a call by their names, those that are ``listed`` as a tuple: what ``encoded`` is given.

        Args:
            words: of the call, those in front of the first address at least.
        """
        found: dict[str, Any] = {
            name: _float_of(word) if kind is float else word
            for (name, kind), word in zip(self.numbers.items(), words, strict=False)
        }
        if self.listed:
            count, *rest = words[len(self.numbers) :]
            found[self.listed] = tuple(rest[:count])
        return found

    def words(self, numbers: Sequence[Number], tensors: Iterable[tuple[Address, Sequence[int]]]) -> list[int | Address]:
        """The words of a call.

        Args:
            numbers: as ``encoded`` takes them.
            tensors: results, then operands, each as what stands for its address, and its extents.

        Raises:
            ValueError: they are not what the entry takes.
        """
        words: list[int | Address] = [*self.encoded(numbers)]
        given = list(tensors)
        declared = (*self.results, *self.operands)
        if len(given) != len(declared):
            raise ValueError(f"{self.name}: {len(given)} tensors are given: must be {len(declared)}")
        for tensor, (address, extents) in zip(declared, given, strict=True):
            if tensor.rank is not None and len(extents) != tensor.rank:
                raise ValueError(f"{self.name}: {tensor.name} has shape {list(extents)}: must have rank {tensor.rank}")
            words += [address, *extents[: tensor.rank or 0]]
        return words

    def check(self, results: Sequence[TensorType], operands: Sequence[TensorValue]) -> None:
        """Raises ``ValueError`` unless these are results and operands of a call, by their number, ranks and dtypes."""
        wanted, given = (*self.results, *self.operands), (*results, *operands)
        extra = len(given) - len(wanted)
        if extra < 0 or (extra and not self.after):
            raise ValueError(f"{self.name}: {len(given)} tensors are given: must be {len(wanted)}")
        dtypes: dict[str, DType] = {}
        for tensor, value in zip(wanted, given, strict=False):
            if len(value.shape) != tensor.rank:
                shape = list(value.shape)
                raise ValueError(f"{self.name}: {tensor.name} has shape {shape}: must have rank {tensor.rank}")
            dtype = tensor.dtype
            dtype = dtype if isinstance(dtype, DType) else dtypes.setdefault(dtype, value.dtype)
            if value.dtype != dtype:
                raise ValueError(f"{self.name}: {tensor.name} has dtype {value.dtype}: must be {dtype}")


class Family:
    """A folder of kernels, and what its entries take; there is one for each folder.

    Args:
        folder: below ``kernels/``.
        signatures: of its entries.
        first: CPU-seconds that the first function of the family adds to a library, by the folder in the family that its
            entry stands in, "" for the family's own: its modules are read and checked once.
        use: what its kernels are for, where the folder's name does not say it.
    """

    def __init__(
        self, folder: str, *signatures: Signature, first: Mapping[str, float] | float = 0.0, use: str = ""
    ) -> None:
        self.folder = folder
        self.use = use or folder
        self.signatures = signatures
        self.first = {"": first} if isinstance(first, (int, float)) else dict(first)
        declared[folder] = self

    def __getitem__(self, name: str) -> Signature:
        """The signature of the entry of that name, if it is that of an op.

        Raises:
            KeyError: there is none.
        """
        for each in self.signatures:
            if each.name == name and each.is_op:
                return each
        raise KeyError(name)


declared: dict[str, Family] = {}
"""Families by their folders, as far as the modules that declare them have been imported."""


def load_all() -> None:
    """Imports every module of this package."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def first_seconds(package: str) -> float:
    """CPU-seconds that the first function whose entries stand in a package, such as "pooling.gpu", adds."""
    family, _, folder = package.partition(".")
    return declared[family].first.get(folder, 0.0) if family in declared else 0.0


def ints(*names: str) -> dict[str, type[Number]]:
    """Whole numbers of these names."""
    return dict.fromkeys(names, int)


def addresses(name: str, count: int) -> tuple[Tensor, ...]:
    """Tensors of any dtypes, which have ``name`` and a number for names; calls have their addresses alone."""
    return tuple(Tensor(f"{name}{number}", f"{name}{number}", None) for number in range(count))


def bits(number: float) -> int:
    """A float64 as the whole number of the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float_of(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
