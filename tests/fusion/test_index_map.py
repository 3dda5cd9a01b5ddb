"""Index maps against NumPy's views."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_max_backend.fusion.index_map import IndexMap, broadcast, identity, permutation, refined

EXTENTS = st.sampled_from([1, 2, 3, 4, 6])


def offsets(each: IndexMap) -> np.ndarray:
    found = np.zeros(1, np.int64)
    for extent, stride in each.digits:
        found = (found[:, None] + np.arange(extent) * stride).ravel()
    return found


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, IndexMap | None]:
    """A view of 0, 1, 2, ... and the map that should make it; None where a composition had none."""
    view = np.arange(math.prod(shape := draw(st.lists(EXTENTS, max_size=4)))).reshape(shape)
    found: IndexMap | None = identity(view.size)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["broadcast", "permute", "reshape"]))
        if kind == "broadcast":
            result = [extent if extent > 1 else draw(EXTENTS) for extent in view.shape]
            if math.prod(result) > 4096:
                continue
            step, new = broadcast(view.shape, result), np.broadcast_to(view, result)
        elif kind == "permute":
            axes = draw(st.permutations(range(view.ndim)))
            step, new = permutation(view.shape, axes), np.transpose(view, axes)
        else:
            extents, rest = [], view.size
            while rest > 1 and draw(st.booleans()):
                extents.append(draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0])))
                rest //= extents[-1]
            step, new = identity(view.size), view.reshape([*extents, rest])
        view = np.ascontiguousarray(new)
        found = None if found is None else step.then(found)
    return view, found


@given(views())
def test_compositions_read_what_the_view_holds(case: tuple[np.ndarray, IndexMap | None]) -> None:
    view, found = case
    if found is not None:
        assert offsets(found).tolist() == view.ravel().tolist()


@given(views())
def test_common_digits_read_the_same(case: tuple[np.ndarray, IndexMap | None]) -> None:
    view, found = case
    if found is None:
        return
    common = refined([found, identity(view.size)])
    if common is not None:
        extents, strides = common
        for each, own in zip((found, identity(view.size)), strides, strict=True):
            assert offsets(IndexMap(tuple(zip(extents, own, strict=True)))).tolist() == offsets(each).tolist()


def test_a_channel_of_channels_last_memory_has_two_digits() -> None:
    assert broadcast([64], [8, 7, 7, 64]).digits == ((392, 0), (64, 1))


def test_a_broadcast_of_a_reshaped_broadcast_is_one_map() -> None:
    first = broadcast([4, 1], [4, 6])
    assert broadcast([2, 2, 6], [3, 2, 2, 6]).then(first) == IndexMap(((3, 0), (4, 1), (6, 0)))


def test_a_digit_that_would_carry_has_no_map() -> None:
    # Every third of six elements, read through two rows of four.
    assert IndexMap(((3, 3),)).then(IndexMap(((2, 10), (4, 1)))) is None


def test_places_that_do_not_divide_each_other_have_no_common_digits() -> None:
    assert refined([IndexMap(((2, 0), (3, 1))), IndexMap(((3, 0), (2, 1)))]) is None
