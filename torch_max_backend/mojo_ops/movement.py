"""Kernels that move memory: permuted copies and concatenation, which passes over the typed graph choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from max.dtype import DType

from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Signature, addresses

FAMILY = Family("movement", use="copies")
ENTRIES: tuple[Literal["transpose", "concatenate"], ...] = ("transpose", "concatenate")
_WORDS = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint64}


def movement_function(
    entry: Literal["transpose", "concatenate"], target: functions.Target, dtype: DType
) -> functions.LibraryFunction:
    """The library function that moves elements of ``dtype``: as whole numbers that are as wide."""
    return functions.LibraryFunction(FAMILY.folder, entry, target, (_WORDS[dtype.size_in_bytes],))


def movement_signature(entry: Literal["transpose", "concatenate"], parts: int = 1) -> Signature:
    """What a call takes: a geometry (kernels/movement/entries.mojo), the result, and as many operands as ``parts``."""
    return Signature(entry, addresses("y", 1), addresses("x", parts), listed="geometry")


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in ENTRIES:
        for dtype in (*dtypes, DType.bool, DType.int64):
            yield movement_function(entry, target, dtype)
