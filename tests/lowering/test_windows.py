"""Sliding windows through the backend against PyTorch: F.unfold, F.fold and Tensor.unfold, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.launched import launched_functions
from torch_max_backend import backend

Call = Callable[[torch.Tensor], torch.Tensor]
IMAGE, COLUMNS = (2, 3, 9, 10), (2, 3 * 6, 20)
CALLS: dict[str, tuple[tuple[int, ...], Call]] = {
    "unfold": (IMAGE, lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=2)),
    "unfold_unbatched": (IMAGE[1:], lambda x: F.unfold(x, 3)),
    "fold": (COLUMNS, lambda x: F.fold(x, (9, 10), (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 2))),
    "along_last": (IMAGE, lambda x: x.unfold(3, 4, 2)),
    "along_both": (IMAGE, lambda x: x.unfold(2, 3, 3).unfold(3, 4, 3)),
    "along_whole": (IMAGE, lambda x: x.unfold(-2, 3, 3)),
    "along_rows_left_over": (IMAGE, lambda x: x.unfold(2, 2, 4)),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_results_and_gradients(dtype: torch.dtype, last: bool, device: str) -> None:
    """All in one graph, on small whole numbers; nothing is indexed."""

    def prepared(name: str) -> torch.Tensor:
        x = torch.randint(-4, 5, CALLS[name][0]).to(device, dtype)
        return x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x

    inputs = [prepared(name).requires_grad_() for name in CALLS]

    def everything(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [call(x) for x, (_, call) in zip(inputs, CALLS.values(), strict=True)]

    wanted = everything(*inputs)
    weights = [torch.randint_like(y, -3, 4) for y in wanted]
    gradients = torch.autograd.grad(wanted, inputs, weights)
    torch._dynamo.reset()
    compiled = torch.compile(everything, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        results = compiled(*inputs)
        found = torch.autograd.grad(results, inputs, weights)
    for name, *pairs in zip(CALLS, wanted, results, gradients, found, strict=True):
        assert torch.equal(pairs[0], pairs[1]) and torch.equal(pairs[2], pairs[3]), name
    launched = {getattr(function, "entry", "") for function in launched_functions(graphs)}
    assert {"lay_out_windows", "add_up_windows"} <= launched
    assert not any("gather" in name or "scatter" in name for name in launched)


def test_whole_numbers() -> None:
    torch._dynamo.reset()
    x = torch.arange(24).reshape(4, 6)
    assert torch.equal(torch.compile(lambda x: x.unfold(1, 3, 2), backend="max")(x), x.unfold(1, 3, 2))


def test_symbolic_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.unfold(x, 3, padding=1), backend="max", dynamic=True)
    for size in (5, 8):
        x = torch.randn(2, 3, size, size + 1)
        assert torch.equal(compiled(x), F.unfold(x, 3, padding=1))
