"""Views, slices, padding, concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, recipe
from torch_max_backend.ir.layout import channels_last_order, contiguous_order
from torch_max_backend.lowering.shape import view_order

aten = torch.ops.aten
F = torch.nn.functional

Maker = Callable[[torch.Generator], torch.Tensor]


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Maker:
    """Small whole numbers, contiguous."""
    return integers(*shape, dtype=dtype)


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Maker:
    """Small whole numbers, channels-last."""
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return lambda generator: integers(*shape, dtype=dtype)(generator).contiguous(memory_format=form)


def swapped(*shape: int) -> Maker:
    """Small whole numbers whose last two dimensions lie swapped in memory."""
    return lambda generator: integers(*shape)(generator).mT.contiguous().mT


def gapped(*shape: int) -> Maker:
    """Every other column of a wider tensor: neither dense nor a permutation of a dense one."""
    return lambda generator: integers(*shape[:-1], 2 * shape[-1])(generator)[..., ::2]


def case(name: str, function: Callable[..., object], *makers: Maker) -> Case:
    return Case(name, function, recipe(*makers), exact=True)


def grad(name: str, function: Callable[..., object], *makers: Maker) -> Case:
    return Case(name, gradients(function), recipe(*makers), exact=True)


def patches_of_windows(windows: torch.Tensor) -> torch.Tensor:
    """An image of 2x2 windows, shifted; of 2x2 pixels one, as shifted windows and patch merging of Swin."""
    x = windows.view(2, 2, 2, 4, 4, 6).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, 6).roll((2, 2), (1, 2))
    return torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)


def unbound_stack(x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values that are computed with, in another order."""
    query, key, value = x.permute(2, 0, 3, 1, 4).unbind(0)
    return query.mT * key.sum(-1).unsqueeze(-2) + value.mT


VIEWS = [
    case("view_split_and_merge", lambda x: x.view(2, 12).view(6, 4), whole(4, 6)),
    grad("view_of_channels_last", lambda x: x.reshape(2, 3, 20), last(2, 3, 4, 5)),
    grad("view_across_channels_last", lambda x: x.reshape(2, 60), last(2, 3, 4, 5)),
    case("view_groups_of_channels", lambda x: x.view(2, 2, 3, 4, 5), last(2, 6, 4, 5)),
    case("view_drops_units", lambda x: x.view(2, 3), last(2, 3, 1, 1)),
    case("view_adds_units", lambda x: x.view(2, 3, 1, 1).expand(2, 3, 4, 5), whole(2, 3)),
    case("view_to_scalar", lambda x: x.view(()) * 2, whole(1, 1)),
    case("view_empty", lambda x: x.view(4, 0, 2), whole(0, 3)),
    case("view_bool", lambda x: x.view(6) > 0, whole(2, 3)),
    case("flatten_channels_last", lambda x: x.flatten(1), last(2, 3, 4, 5)),
    grad("flatten_of_permuted", lambda x: x.permute(0, 2, 3, 1).flatten(0, 2), last(2, 3, 4, 5)),
    case("flatten_of_permuted_copies", lambda x: x.permute(0, 2, 3, 1).flatten(0, 2), whole(2, 3, 4, 5)),
    case("reshape_of_swapped", lambda x: x.reshape(-1), swapped(3, 4)),
    case("reshape_of_gapped", lambda x: x.reshape(6, 2) * 2, gapped(3, 4)),
    case("unflatten", lambda x: x.unflatten(1, (2, 3)), whole(4, 6)),
    case("permute", lambda x: x.permute(2, 0, 1), whole(2, 3, 4)),
    case("permute_negative", lambda x: x.permute(-1, 0, 1) * 3, whole(2, 3, 4)),
    case("t", lambda x: x.t() + 1, whole(2, 3)),
    case("transpose", lambda x: x.transpose(-1, 1), whole(2, 3, 4)),
    case("movedim", lambda x: x.movedim(1, -1), last(2, 3, 4, 5)),
    case("expand", lambda x: x.expand(4, 3, 5), whole(3, 1)),
    case("expand_keeps_some", lambda x: x.expand(-1, 6, -1), whole(2, 1, 3)),
    case("expand_scalar", lambda x: x.expand(2, 3), whole()),
    grad("expand_pooled", lambda x: x.expand(2, 3, 4, 5), last(2, 3, 1, 1)),
    case("squeeze_all", lambda x: x.squeeze(), whole(1, 3, 1, 4)),
    case("squeeze_not_unit", lambda x: x.squeeze(0) * 2, whole(2, 1, 3)),
    grad("squeeze_several", lambda x: x.squeeze((-1, -2)), last(2, 3, 1, 1)),
    case("unsqueeze_front", lambda x: x.unsqueeze(0), last(2, 3, 4, 5)),
    case("unsqueeze_inside", lambda x: x[:, None] * x[:, :, None], whole(3, 4)),
    grad("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), last(2, 8, 3, 4)),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), whole(2, 2, 4, 6)),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 3), last(2, 6, 3, 4)),
    case("diagonal_below", lambda x: x.diagonal(-1), whole(4, 3)),
]

JOINED = [
    grad("cat_channels", lambda x, y: torch.cat([x, y], 1), last(2, 3, 4, 5), last(2, 2, 4, 5)),
    case("cat_mixed_orders", lambda x, y: torch.cat([x, y], -1), last(2, 3, 4, 5), whole(2, 3, 4, 2)),
    case("cat_legacy_empty", lambda x, y: torch.cat([x, y]), whole(0), whole(3, 4)),
    case("cat_all_empty", lambda x, y: torch.cat([x, y]), whole(0, 4), whole(0, 4)),
    case("cat_promotes", lambda x, y: torch.cat([x, y]), whole(3, dtype=torch.int64), whole(2)),
    case("cat_bool", lambda x, y: torch.cat([x > 0, y > 0]), whole(3), whole(2)),
    case("cat_bf16", lambda x, y: torch.cat([x, y], 1), *[whole(2, 3, dtype=torch.bfloat16)] * 2),
    case("stack", lambda x, y: torch.stack([x, y], 1), last(2, 3, 4, 5), whole(2, 3, 4, 5)),
    case("split", lambda x: torch.split(x, 2, 1), last(2, 5, 3, 4)),
    grad("split_sizes", lambda x: torch.split(x, [1, 4], 1)[1] * 2, whole(2, 5)),
    case("chunk", lambda x: torch.chunk(x, 3, 0), whole(7, 2)),
    case("unbind", lambda x: torch.unbind(x, 1), whole(2, 3, 4)),
    case("repeat", lambda x: x.repeat(2, 3), whole(3, 4)),
    case("repeat_adds_dimensions", lambda x: x.repeat(2, 1, 3), whole(2, 3)),
    case("repeat_channels_last", lambda x: x.repeat(2, 1, 2, 3), last(1, 2, 3, 2)),
    case("roll", lambda x: x.roll((1, -2), (0, 1)), whole(4, 5)),
    case("roll_flat", lambda x: x.roll(4), swapped(3, 4)),
    case("roll_channels_last", lambda x: x.roll(2, 2), last(2, 3, 4, 5)),
    grad("patches_of_windows", patches_of_windows, whole(8, 4, 4, 6)),
    grad("unbound_stack", unbound_stack, whole(2, 5, 3, 4, 6)),
    grad("flip", lambda x: x.flip(0, -1), last(2, 3, 4, 5)),
    case("flip_int", lambda x: x.flip(1), whole(2, 3, dtype=torch.int32)),
]

SLICES = [
    grad("slice", lambda x: x[:, 1:3], last(2, 4, 3, 5)),
    case("slice_negative", lambda x: x[-3:-1] * 2, whole(5, 2)),
    case("slice_beyond", lambda x: x[1:100, -100:2], whole(3, 4)),
    grad("slice_step", lambda x: x[1::2, ::3], whole(6, 7)),
    grad("slice_step_far", lambda x: x[5:-1:3, 2:3:4], whole(11, 9)),
    case("slice_step_channels_last", lambda x: x[..., ::2, 1::2], last(2, 3, 5, 6)),
    case("slice_empty", lambda x: x[2:1], whole(4, 3)),
    case("slice_bool", lambda x: (x > 0)[1:], whole(4, 3)),
    grad("select", lambda x: x[:, 1], last(2, 3, 4, 5)),
    case("select_last", lambda x: x[..., -1], last(2, 3, 4, 5)),
    case("select_vector", lambda x: x[1] * 2, whole(3)),
    grad("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 1, 3), last(2, 4, 3, 5), whole(2, 2, 3, 5)),
    case("slice_scatter_step", lambda x, y: x.slice_scatter(y, 0, 1, None, 2), whole(5, 3), whole(2, 3)),
    case("select_scatter", lambda x, y: x.select_scatter(y, 1, -2), whole(3, 4), whole(3)),
]

PADS = [
    grad("pad", lambda x: F.pad(x, (1, 2, 0, 3)), last(2, 3, 4, 5)),
    case("pad_value", lambda x: F.pad(x, (1, 1), value=2.5), whole(3, 4)),
    case("pad_channels", lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), last(2, 3, 4, 5)),
    grad("pad_negative", lambda x: F.pad(x, (-1, 2, 1, -2)), whole(4, 5)),
    case("pad_int", lambda x: F.pad(x, (1, 0), value=7), whole(2, 3, dtype=torch.int64)),
    case("pad_bool", lambda x: F.pad(x > 0, (1, 2), value=True), whole(2, 3)),
    case("pad_bf16", lambda x: F.pad(x, (1, 2), value=0.3), whole(2, 3, dtype=torch.bfloat16)),
    case("pad_empty", lambda x: F.pad(x[:, :0], (1, 2), value=0.5), whole(2, 3)),
    grad("slice_empty_grad", lambda x: x[:, :0].sum() + x * x, whole(2, 3)),
    case("pad_infinite", lambda x: F.pad(x, (1, 1), value=float("-inf")).amax(1), whole(2, 3)),
    case("pad_circular", lambda x: F.pad(x, (1, 2, 1, 0), mode="circular"), last(2, 3, 4, 5)),
]

CASES = [*VIEWS, *JOINED, *SLICES, *PADS]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "view_groups_of_channels", "view_bool", "flatten_of_permuted_copies", "permute_negative", "t", "transpose",
    "expand_keeps_some", "squeeze_not_unit", "unsqueeze_inside", "pixel_unshuffle", "channel_shuffle",
    "cat_bool", "cat_bf16", "chunk", "repeat_adds_dimensions", "repeat_channels_last", "roll_flat",
    "roll_channels_last", "flip_int", "slice_negative", "slice_bool", "select_last", "select_vector",
    "slice_scatter_step", "pad_channels", "pad_int", "pad_bool", "pad_bf16", "reshape_of_gapped",
    "view_split_and_merge", "movedim", "expand", "squeeze_all", "unsqueeze_front", "view_to_scalar", "pad_value",
    "flatten_channels_last", "reshape_of_swapped", "unflatten", "split", "slice_step_channels_last", "pad_infinite",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="shape")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


@pytest.mark.parametrize(
    ("old", "new", "order", "expected"),
    [
        ((2, 3, 4, 5), (2, 3, 20), channels_last_order(4), channels_last_order(3)),
        ((2, 3, 4, 5), (2, 60), channels_last_order(4), None),
        ((2, 3, 4, 5), (2, 60), contiguous_order(4), contiguous_order(2)),
        ((2, 3, 1, 1), (2, 3), channels_last_order(4), contiguous_order(2)),
        ((6, 5), (2, 3, 5), (1, 0), (2, 0, 1)),
        ((2, 3, 5), (6, 5), (2, 0, 1), (1, 0)),
        ((2, 6, 4, 5), (2, 2, 3, 4, 5), channels_last_order(4), (0, 3, 4, 1, 2)),
        ((4, 6), (6, 4), contiguous_order(2), contiguous_order(2)),
        ((4, 6), (6, 4), (1, 0), None),
        ((1, 1), (), contiguous_order(2), ()),
    ],
)
def test_a_view_keeps_the_memory_order_it_can(
    old: Sequence[int], new: Sequence[int], order: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert view_order(old, new, order) == expected
