"""gradcheck of convolutions through torch.compile in float64: derivatives of our own forward, by differences."""

from __future__ import annotations

import torch
from torch.nn import functional

SHAPES = {
    "a": (2, 2, 5, 4),
    "wa": (4, 1, 3, 2),
    "wb": (4, 3, 2, 2),
    "c": (1, 2, 6),
    "wc": (3, 2, 3),
    "d": (1, 2, 3, 2, 3),
    "wd": (2, 2, 2, 1, 2),
    "bias": (4,),
}


def network(
    a: torch.Tensor,
    wa: torch.Tensor,
    wb: torch.Tensor,
    c: torch.Tensor,
    wc: torch.Tensor,
    d: torch.Tensor,
    wd: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Grouped, strided and dilated; transposed with output padding; 1-D; 3-D; one graph each way for all of them."""
    y = functional.conv2d(a, wa, bias, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    z = functional.conv_transpose2d(y, wb, stride=2, padding=1, output_padding=1)
    return z, functional.conv1d(c, wc, padding=2, dilation=2), functional.conv3d(d, wd, stride=(1, 2, 1))


def test_gradcheck_of_convolutions() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(network, backend="max", fullgraph=True)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES.values()]
    # gradcheck runs a backward several times over one forward.
    with torch._functorch.config.patch(donated_buffer=False):
        for ours, eager in zip(compiled(*inputs), network(*inputs), strict=True):
            torch.testing.assert_close(ours, eager)
        assert torch.autograd.gradcheck(compiled, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)
