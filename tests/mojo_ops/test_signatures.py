"""What entries of the kernel libraries take, and what is made of it."""

from __future__ import annotations

import re
import struct

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from torch_max_backend.mojo_ops import KERNELS_PATH, functions, sorting
from torch_max_backend.mojo_ops.registrations import registration_source
from torch_max_backend.mojo_ops.signatures import Signature, Tensor, declared, first_seconds, load_all

SCALED = Signature(
    "scaled",
    results=(Tensor("y", "dtype", 2),),
    operands=(Tensor("x", "dtype", 2), Tensor("index", DType.int64, 1)),
    numbers={"factor": float, "rounds": int},
    listed="places",
)


def test_words_are_numbers_then_tensors_with_their_extents() -> None:
    words = SCALED.words([0.5, True, 7, 9], [("y", (2, 3)), ("x", (4, 5)), ("index", (6,))])
    assert words == [struct.unpack("<q", struct.pack("<d", 0.5))[0], 1, 2, 7, 9, "y", 2, 3, "x", 4, 5, "index", 6]
    # A whole number that stands for a float is one.
    assert SCALED.encoded([2, 1]) == [0x4000000000000000, 1, 0]


def test_numbers_are_read_by_their_names() -> None:
    words = SCALED.words([0.1, 3, 7, 9], [("y", (2, 3)), ("x", (4, 5)), ("index", (6,))])
    numbers = [word for word in words if isinstance(word, int)]
    assert SCALED.named(numbers) == {"factor": 0.1, "rounds": 3, "places": (7, 9)}
    assert sorting.FAMILY["sort_rows"].named([]) == {}


def test_addresses_alone() -> None:
    signature = Signature("bare", (Tensor("y", "dtype", None),), (Tensor("x", "dtype", 1),))
    assert signature.words([], [("y", (2, 3)), ("x", (4,))]) == ["y", "x", 4]
    assert not signature.is_op and SCALED.is_op


def test_what_does_not_fit_is_named() -> None:
    given = [("y", (2, 3)), ("x", (4, 5)), ("index", (6,))]
    with pytest.raises(ValueError, match="scaled: 1 numbers are given: must be factor, rounds, places"):
        SCALED.words([1.0], given)
    with pytest.raises(ValueError, match="sort_rows: 1 numbers are given: must be none"):
        sorting.FAMILY["sort_rows"].encoded([1])
    with pytest.raises(ValueError, match="scaled: 2 tensors are given: must be 3"):
        SCALED.words([1.0, 2], given[:2])
    with pytest.raises(ValueError, match=r"scaled: x has shape \[4\]: must have rank 2"):
        SCALED.words([1.0, 2], [given[0], ("x", (4,)), given[2]])


def test_a_call_is_checked_before_it_is_in_the_graph() -> None:
    cpu = DeviceRef.CPU()
    kind, ranks = TensorType(DType.float32, (4, 5), cpu), TensorType(DType.float32, (4, 5, 6), cpu)
    function = functions.function_of(sorting.FAMILY, "sort_rows", "cpu", (DType.float32, False))
    places, signature = TensorType(DType.int64, (4, 2), cpu), sorting.FAMILY["sort_rows"]
    with Graph("refused", input_types=[kind, ranks]) as graph:
        x, deep = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match=r"sort_rows: x has shape .* must have rank 2"):
            functions.call(signature, function, [deep], [kind, places])
        with pytest.raises(ValueError, match=r"sort_rows: indices has dtype DType\.float32: must be DType\.int64"):
            functions.call(signature, function, [x], [kind, kind])
        with pytest.raises(ValueError, match="sort_rows: 2 tensors are given: must be 3"):
            functions.call(signature, function, [x], [kind])
        with pytest.raises(ValueError, match=r"sort_rows: x has dtype DType\.float32: must be DType\.int64"):
            functions.call(signature, function, [x], [places, places])


def test_every_entry_is_declared_where_kernels_have_it() -> None:
    """By its name in an entries module of the family's folder; and every op is registered once."""
    load_all()
    for folder, family in declared.items():
        modules = (KERNELS_PATH / folder).rglob("*entries.mojo")
        defined = {
            name
            for path in modules
            for name in re.findall(r"^(?:def|comptime) ([a-z]\w*)\[", path.read_text(), re.MULTILINE)
        }
        assert {each.name for each in family.signatures} <= defined, folder
    registered = re.findall(r'@extensibility\.register\("(\w+)"\)', registration_source())
    assert len(registered) == len(set(registered)) > 20


def test_families_tell_what_reading_them_costs() -> None:
    load_all()
    assert first_seconds("pooling.gpu") == declared["pooling"].first["gpu"] > 0
    assert first_seconds("attention") == declared["attention"].first[""] > 0
    assert first_seconds("sorting") == first_seconds("nowhere.at_all") == 0
