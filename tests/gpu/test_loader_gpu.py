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


def test_a_stride_that_the_copy_engine_does_not_take() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(2, 32, 29, 29, device="cuda", dtype=torch.bfloat16).relu()
    w = torch.randn(16, 32, 3, 3, device="cuda", dtype=torch.bfloat16) / 17
    run = torch.compile(
        lambda x, w: torch.nn.functional.conv2d(x, w, padding=1, stride=9), backend="max", options={"fallback": "error"}
    )
    expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1, stride=9)
    for _ in range(2):
        torch.testing.assert_close(run(x, w).double(), expected, rtol=0.02, atol=0.02)
    rest = convolution_function("conv_fprop", "gpu", DType.bfloat16, Grouping.ONE).rest
    assert rest is not None and libraries.address(rest.symbol, x.device)
