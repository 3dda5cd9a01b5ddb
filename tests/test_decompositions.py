"""Decompositions of our own against PyTorch's kernels."""

from __future__ import annotations

import pytest
import torch

from torch_max_backend.decompositions import weight_norm_backward

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward(dim: int) -> None:
    v, g = torch.randn(4, 3, 5), torch.rand([5 if axis == dim == 2 else 4 if axis == dim else 1 for axis in range(3)])
    weight, norms = aten._weight_norm_interface(v, g, dim)
    grad = torch.randn_like(weight)
    expected = aten._weight_norm_interface_backward(grad, v, g, norms, dim)
    for got, wanted in zip(weight_norm_backward(grad, v, g, norms, dim), expected, strict=True):
        torch.testing.assert_close(got, wanted)
