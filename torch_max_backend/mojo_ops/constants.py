"""Constants that Python reads from the kernels' Mojo sources, so that none is defined twice."""

from __future__ import annotations

import functools
import re

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops import KERNELS_PATH


@beartype
@functools.cache
def kernel_constant(module: str, name: str) -> int:
    """The whole number that `comptime NAME = ...` names in a module of the kernels, such as "pooling.problem".

    Raises:
        LookupError: the module defines no number of that name.
    """
    path = KERNELS_PATH.joinpath(*module.split(".")).with_suffix(".mojo")
    found = re.search(rf"^comptime {re.escape(name)} = (\d+)$", path.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"name={name}: must be defined as a number in {path}")
    return int(found[1])
