"""The one-byte offsets that stand for max pooling's indices between forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.custom_ops.pool_offsets import max_pool_offsets, max_pool_offsets_backward
from torch_max_backend.graph.passes.pool_offsets import keep_small_offsets

aten = torch.ops.aten

WINDOWS = [
    ((2, 3, 8, 9), ([2, 2], [2, 2], [0, 0], [1, 1]), False),
    ((2, 3, 11, 13), ([3, 3], [2, 2], [1, 1], [1, 1]), False),
    ((1, 2, 12, 9), ([2, 3], [2, 1], [1, 1], [3, 2]), True),
    ((1, 2, 6, 7, 8), ([2, 3, 3], [2, 2, 1], [1, 1, 0], [1, 1, 2]), False),
    ((1, 1, 20, 20), ([15, 17], [1, 1], [7, 8], [1, 1]), False),
]


@pytest.mark.parametrize(("shape", "window", "ceil_mode"), WINDOWS)
def test_offsets_agree_with_indices(shape: tuple[int, ...], window: tuple[list[int], ...], ceil_mode: bool) -> None:
    x = torch.randint(-5, 5, shape).float()
    forward = aten.max_pool2d_with_indices if len(shape) == 4 else aten.max_pool3d_with_indices
    backward = aten.max_pool2d_with_indices_backward if len(shape) == 4 else aten.max_pool3d_with_indices_backward
    y, indices = forward(x, *window, ceil_mode)
    ours, offsets = max_pool_offsets(x, *window, ceil_mode)
    assert offsets.dtype is torch.uint8
    assert torch.equal(y, ours)
    gradient = torch.randint(-5, 5, y.shape).float()
    expected = backward(gradient, x, *window, ceil_mode, indices)
    assert torch.equal(max_pool_offsets_backward(gradient, shape, *window, ceil_mode, offsets), expected)


@pytest.mark.parametrize(("shape", "dilation", "kept"), [((1, 2, 1, 6), 2, False), ((1, 2, 5, 6), 2, True)])
def test_indices_stay_where_a_window_lies_wholly_in_padding(shape: tuple[int, ...], dilation: int, kept: bool) -> None:
    """aten's gradient of such a window lands on a pixel that is not under it."""
    window = ([2, 2], [1, 1], [1, 1], [dilation, 1])

    def step(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        y, indices = aten.max_pool2d_with_indices(x, *window)
        return aten.max_pool2d_with_indices_backward(gradient * y, x, *window, False, indices)

    x = torch.randn(shape)
    y, _ = aten.max_pool2d_with_indices(x, *window)
    joint = keep_small_offsets(make_fx(step, tracing_mode="fake")(x, torch.randn(y.shape)))
    targets = {node.target for node in joint.graph.nodes}
    assert (torch.ops.torch_max_backend.max_pool_offsets.default in targets) is kept
    assert (aten.max_pool2d_with_indices.default in targets) is not kept


def test_indices_stay_where_a_byte_does_not_count_the_taps() -> None:
    def step(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        y, indices = aten.max_pool2d_with_indices(x, [16, 16], [1, 1])
        return aten.max_pool2d_with_indices_backward(gradient * y, x, [16, 16], [1, 1], [0, 0], [1, 1], False, indices)

    x = torch.randn(1, 1, 18, 18)
    joint = keep_small_offsets(make_fx(step, tracing_mode="fake")(x, torch.randn(1, 1, 3, 3)))
    assert aten.max_pool2d_with_indices.default in {node.target for node in joint.graph.nodes}
