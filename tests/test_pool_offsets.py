"""The one-byte offsets that stand for max pooling's indices between forward and backward."""

from __future__ import annotations

import pytest
import torch

from torch_max_backend.graph.pool_offsets import max_pool_offsets, max_pool_offsets_backward

aten = torch.ops.aten

WINDOWS = [
    ((2, 3, 8, 9), ([2, 2], [2, 2], [0, 0], [1, 1]), False),
    ((2, 3, 11, 13), ([3, 3], [2, 2], [1, 1], [1, 1]), False),
    ((1, 2, 12, 9), ([2, 3], [2, 1], [1, 1], [3, 2]), True),
    ((1, 2, 6, 7, 8), ([2, 3, 3], [2, 2, 1], [1, 1, 0], [1, 1, 2]), False),
    ((1, 1, 20, 20), ([17, 17], [1, 1], [8, 8], [1, 1]), False),
]


@pytest.mark.parametrize(("shape", "window", "ceil_mode"), WINDOWS)
def test_offsets_agree_with_indices(shape: tuple[int, ...], window: tuple[list[int], ...], ceil_mode: bool) -> None:
    x = torch.randint(-5, 5, shape).float()
    forward = aten.max_pool2d_with_indices if len(shape) == 4 else aten.max_pool3d_with_indices
    backward = aten.max_pool2d_with_indices_backward if len(shape) == 4 else aten.max_pool3d_with_indices_backward
    y, indices = forward(x, *window, ceil_mode)
    ours, offsets = max_pool_offsets(x, *window, ceil_mode)
    taps = torch.tensor(window[0]).prod().item()
    assert offsets.dtype is (torch.uint8 if taps <= 255 else torch.int32)
    assert torch.equal(y, ours)
    gradient = torch.randint(-5, 5, y.shape).float()
    expected = backward(gradient, x, *window, ceil_mode, indices)
    assert torch.equal(max_pool_offsets_backward(gradient, x, *window, ceil_mode, offsets), expected)
