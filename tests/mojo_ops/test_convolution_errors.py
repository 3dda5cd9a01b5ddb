"""Bad convolution arguments through torch.compile: an exception while compiling that names the argument, no abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

aten = torch.ops.aten

X, W = (2, 4, 8, 8), (6, 4, 3, 3)


def forward(**changes: Any) -> Callable[..., torch.Tensor]:
    geometry: dict[str, Any] = {
        "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
        "groups": 1,
    }  # fmt: skip
    values = list({**geometry, **changes}.values())
    return lambda x, w: aten.convolution(x, w, None, *values)


def backward(shape: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    return lambda x, w: aten.convolution_backward(
        x.new_zeros(shape), x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )[1]


#: What is wrong, the call, the operands' shapes or dtypes, and words that the message must have.
BAD: list[tuple[str, Callable[..., torch.Tensor], dict[str, Any], str]] = [
    ("input channels", forward(), {"x": (2, 5, 8, 8)}, r"5"),
    ("groups do not divide", forward(groups=4), {"x": (2, 8, 8, 8), "w": (6, 2, 3, 3)}, r"groups|divisible"),
    ("zero stride", forward(stride=[0, 1]), {}, r"stride|zero"),
    ("negative stride", forward(stride=[1, -2]), {}, r"stride"),
    ("zero dilation", forward(dilation=[1, 0]), {}, r"dilation"),
    ("negative dilation", forward(dilation=[-1, 1]), {}, r"dilation"),
    ("negative padding", forward(padding=[-1, 0]), {}, r"padding"),
    ("output_padding", forward(output_padding=[1, 0]), {}, r"output_padding"),
    ("window", forward(), {"x": (2, 4, 2, 8)}, r"[Kk]ernel|window"),
    ("grad_output", backward((2, 6, 5, 6)), {}, r"grad_output"),
    ("dtype", forward(), {"w_dtype": torch.bfloat16}, r"dtype|type"),
    ("device", forward(), {"w_device": "meta"}, r"device"),
]


@pytest.mark.parametrize(("call", "operands", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_arguments_raise_while_compiling(
    call: Callable[..., torch.Tensor], operands: dict[str, Any], words: str
) -> None:
    torch._dynamo.reset()
    x = torch.randn(operands.get("x", X))
    w = torch.randn(
        operands.get("w", W),
        dtype=operands.get("w_dtype", torch.float32),
        device="cpu",
    ).to(operands.get("w_device", "cpu"))
    with pytest.raises(Exception, match=words):
        torch.compile(call, backend="max", fullgraph=True)(x, w)
