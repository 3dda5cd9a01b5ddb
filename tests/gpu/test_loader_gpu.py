"""Convolutions that Hopper's kernels do not take go to those for any GPU, which are built when they are called."""

from __future__ import annotations

import pytest
import torch
from max.dtype import DType

from torch_max_backend.mojo_ops.convolution import Grouping, convolution_function
from torch_max_backend.runtime.building import libraries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind a 16-byte boundary."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def test_operands_at_odd_addresses() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(2, 9, 9, 32, device="cuda", dtype=torch.bfloat16).relu()
    w = torch.randn(16, 32, 3, 3, device="cuda", dtype=torch.bfloat16) / 17
    run = torch.compile(
        lambda x, w: torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w, padding=1),
        backend="max",
        options={"fallback": "error"},
    )
    expected = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2).double(), w.double(), padding=1)
    for own in (x, _apart(x), x):
        torch.testing.assert_close(run(own, w).double(), expected, rtol=0.02, atol=0.02)
    rest = convolution_function("conv_fprop", "gpu", DType.bfloat16, Grouping.ONE).rest
    assert rest is not None and libraries.address(rest.symbol, x.device)
