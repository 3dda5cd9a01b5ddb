"""Index maps against NumPy's views."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_max_backend.fusion.index_map import (
    IndexMap,
    ReadsOnlyPadding,
    broadcast,
    identity,
    padding,
    part,
    permutation,
    refined,
)

EXTENTS = st.sampled_from([1, 2, 3, 4, 6])


OUTSIDE = -1


def offsets(each: IndexMap) -> np.ndarray:
    """What the map reads, ``OUTSIDE`` where a guard keeps it from reading."""
    found = np.full(1, each.constant)
    for extent, stride, *_ in each.digits:
        found = (found[:, None] + np.arange(extent) * stride).ravel()
    for guard in each.guards:
        place = offsets(guard.place)
        found[(place < guard.start) | (place >= guard.start + guard.count)] = OUTSIDE
    return found


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, IndexMap | None]:
    """A view of 0, 1, 2, ... and the map that should make it; None where a composition had none."""
    view = np.arange(math.prod(shape := draw(st.lists(EXTENTS, max_size=4)))).reshape(shape)
    found: IndexMap | None = identity(view.size)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["broadcast", "permute", "reshape", "slice", "pad"]))
        if kind == "broadcast":
            result = [extent if extent > 1 else draw(EXTENTS) for extent in view.shape]
            if math.prod(result) > 4096:
                continue
            step, new = broadcast(view.shape, result), np.broadcast_to(view, result)
        elif kind == "permute":
            axes = draw(st.permutations(range(view.ndim)))
            step, new = permutation(view.shape, axes), np.transpose(view, axes)
        elif kind == "slice":
            starts = [draw(st.integers(0, extent - 1)) for extent in view.shape]
            steps = [draw(st.integers(1, 3)) for _ in view.shape]
            new = view[tuple(slice(start, None, step) for start, step in zip(starts, steps, strict=True))]
            step = part(view.shape, starts, steps, new.shape)
        elif kind == "pad":
            margins = [draw(st.sampled_from([(0, 0), (1, 0), (0, 2), (3, 1)])) for _ in view.shape]
            new = np.pad(view, margins, constant_values=OUTSIDE) if margins else view
            if new.size > 4096:
                continue
            step = padding(view.shape, [before for before, _ in margins], new.shape)
        else:
            extents, rest = [], view.size
            while rest > 1 and draw(st.booleans()):
                extents.append(draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0])))
                rest //= extents[-1]
            step, new = identity(view.size), view.reshape([*extents, rest])
        view = np.ascontiguousarray(new)
        try:
            found = None if found is None else step.then(found)
        except ReadsOnlyPadding:
            assert (view == OUTSIDE).all()
            return view, None
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
    maps = [found.plain, identity(view.size), *(guard.place for guard in found.guards)]
    common = refined(maps)
    if common is not None:
        extents, strides = common
        for each, own in zip(maps, strides, strict=True):
            assert offsets(IndexMap(tuple(zip(extents, own, strict=True)))).tolist() == offsets(each).tolist()


def test_a_channel_of_channels_last_memory_has_two_digits() -> None:
    assert broadcast([64], [8, 7, 7, 64]).digits == ((392, 0), (64, 1))


def test_a_broadcast_of_a_reshaped_broadcast_is_one_map() -> None:
    first = broadcast([4, 1], [4, 6])
    assert broadcast([2, 2, 6], [3, 2, 2, 6]).then(first) == IndexMap(((3, 0), (4, 1), (6, 0)))


def test_a_slice_of_a_padded_axis_is_guarded_by_what_is_left() -> None:
    """Two before and one behind four elements; of these seven the last five."""
    found = part([7], [2], [1], [5]).then(padding([4], [2], [7]))
    assert found == IndexMap(((5, 1, 0, 4),))
    assert offsets(found).tolist() == [0, 1, 2, 3, OUTSIDE]


def test_a_slice_beside_what_was_padded_reads_nothing() -> None:
    with pytest.raises(ReadsOnlyPadding):
        part([9], [6], [1], [3]).then(padding([4], [2], [9]))


def test_a_stack_of_blocks_is_guarded_by_the_blocks_number() -> None:
    """Blocks of rows, some of them padding, in any order of blocks, rows and columns: `torch.stack` is so."""
    for blocks, rows, before, behind in itertools.product((1, 2, 3), (1, 2, 4), (0, 1, 2), (0, 1, 3)):
        margins = before * rows, behind * rows
        view = np.pad(np.arange(blocks * rows * 5).reshape(-1, 5), (margins, (0, 0)), constant_values=OUTSIDE)
        padded = padding([blocks * rows, 5], [margins[0], 0], view.shape)
        stack = before + blocks + behind, rows, 5
        for axes in itertools.permutations(range(3)):
            found = permutation(stack, axes).then(padded)
            assert found is not None
            assert offsets(found).tolist() == view.reshape(stack).transpose(axes).ravel().tolist()


def test_one_place_inside_adds_nothing() -> None:
    """Read behind it or not: the stride of a digit that is guarded so says nothing."""
    first = padding([4, 1, 3], [0, 1, 0], [4, 2, 3])
    assert first.digits == ((4, 3), (2, 0, 1, 1), (3, 1))
    assert first.then(identity(12)) == first


def test_a_guard_that_ends_within_a_block_has_no_map() -> None:
    """One row of padding in front of three rows, read as two blocks of two in the other order."""
    assert permutation([2, 2], [1, 0]).then(padding([3], [1], [4])) is None


def test_a_digit_that_would_carry_has_no_map() -> None:
    # Every third of six elements, read through two rows of four.
    assert IndexMap(((3, 3),)).then(IndexMap(((2, 10), (4, 1)))) is None


def test_places_that_do_not_divide_each_other_have_no_common_digits() -> None:
    assert refined([IndexMap(((2, 0), (3, 1))), IndexMap(((3, 0), (2, 1)))]) is None
