"""The numbers of a call: Mojo's structures have the fields, in the order, that signatures declare."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.kernels.programs import fixture_of, printed
from torch_max_backend.mojo_ops import (
    attention,
    convolution,
    detection,
    normalization,
    padding,
    pooling,
    sampling,
    windows,
)
from torch_max_backend.mojo_ops.signatures import Signature

program = fixture_of(Path(__file__).with_name("numbers.mojo"))

SIGNATURES: dict[str, Signature] = {
    "attention": attention.FAMILY["attention_fprop"],
    "convolution": convolution.FAMILY["conv_fprop"],
    "deformable": detection.FAMILY["deformable_columns"],
    "normalization": normalization.FAMILY["batch_norm_statistics"],
    "padding": padding.FAMILY["border_fprop"],
    "pooling": pooling.FAMILY["max_pool_fprop"],
    "regions": detection.FAMILY["roi_align_fprop"],
    "sampling": sampling.FAMILY["sample_fprop"],
    "windows": windows.FAMILY["lay_out_windows"],
}
#: Of arrays in a structure, the names that signatures have for the outer dimension.
TENSORS = {"axes": ("query", "key", "value", "output"), "steps": attention.STRIDED}


def declared(field: str, kind: str) -> Iterator[str]:
    """The names of the numbers that a field of this type takes."""
    if kind.endswith("EpilogueCallback"):
        yield from (field, f"{field}_context")
    elif "Array[" in kind:
        suffix = "_step" if field == "steps" else ""
        yield from (f"{name}_{axis}{suffix}" for name in TENSORS[field] for axis in ("batch", "heads", "rows"))
    elif count := re.search(r"IndexList\[(\d)", kind):
        axes = {2: "hw", 3: "dhw", 6: "dhw"}[int(count[1])]
        sides = ("low", "high") if count[1] == "6" else (field,)
        yield from (f"{side}_{axis}" for axis in axes for side in sides)
    else:
        axis, _, name = field.rpartition(".")
        yield f"{name}_{axis}" if axis else name


def test_structures_take_what_signatures_declare(program: Path) -> None:
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in printed(program, []).splitlines():
        family, field, kind = line.split(" ", 2)
        found[family] += [(name, kind) for name in declared(field, kind)]
    # One structure for each of two axes.
    found["windows"] = [(f"{name}_{axis}", kind) for axis in "hw" for name, kind in found["windows"]]
    assert found.keys() == SIGNATURES.keys()
    for family, signature in SIGNATURES.items():
        wanted = {name: kind is float for name, kind in signature.numbers.items()}
        assert {name: "float64" in kind for name, kind in found[family]} == wanted, family
        assert [name for name, _ in found[family]] == list(wanted), family
