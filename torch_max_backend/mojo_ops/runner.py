"""The function that runs a launch list: every graph calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from max.dtype import DType

from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family

FAMILY = Family("runner", use="running graphs")


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    yield functions.LibraryFunction(FAMILY.folder, "walk", target, ())
