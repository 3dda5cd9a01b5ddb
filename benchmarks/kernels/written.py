"""Library functions whose entry stands beside a benchmark, not in the kernels' package."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from max.dtype import DType

from benchmarks import ROOT
from torch_max_backend.mojo_ops.sources import DIGITS, symbol_of

_DOCSTRING = re.compile(r'\A""".*?"""\n', re.DOTALL)
_IMPORT = re.compile(r"^from kernels\.([\w.]+) import (.+)\n", re.MULTILINE)


@dataclass(frozen=True)
class WrittenFunction:
    """A function of a Mojo file with its parameters bound: a ``Function`` as ``mojo_ops.functions`` has it.

    Attributes:
        path: of the file, from the project's root. It imports from ``kernels`` one line for each module.
        entry: the function's name.
        target: MAX's word for the kind of device.
        parameters: what stands between the function's brackets after the target: types, and names of constants.
    """

    path: str
    entry: str
    target: Literal["cpu", "gpu"]
    parameters: tuple[DType | str, ...]

    @cached_property
    def _text(self) -> str:
        return Path(ROOT, self.path).read_text()

    @property
    def symbol(self) -> str:
        """The name of the exported C function."""
        digest = hashlib.sha256(self._text.encode()).hexdigest()[:DIGITS]
        words = (each.name if isinstance(each, DType) else each for each in self.parameters)
        name = "_".join(("torch_max", self.entry, digest, *words, self.target))
        return symbol_of(name, (module for module, _ in self.imports))

    @property
    def expression(self) -> str:
        """The entry with its parameters, as Mojo writes it."""
        words = (f"DType.{each.name}" if isinstance(each, DType) else each for each in self.parameters)
        return f'{self.entry}["{self.target}", {", ".join(words)}]'

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """What the file takes from the kernels' package."""
        return frozenset((module, name) for module, names in _IMPORT.findall(self._text) for name in names.split(", "))

    @property
    def definition(self) -> str:
        """The rest of the file."""
        return _IMPORT.sub("", _DOCSTRING.sub("", self._text))

    @property
    def use(self) -> str:
        """Not in the package."""
        return "benchmarks"

    @property
    def seconds(self) -> float:
        """As a convolution's function for a GPU."""
        return 10.0
