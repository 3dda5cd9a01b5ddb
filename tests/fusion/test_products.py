"""Matrix products read operands and write results where these lie: no launch copies, and numbers are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fusion.test_reductions import digits
from tests.launched import launched_functions
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.mojo_ops.functions import LibraryFunction

Case = tuple[Callable[..., object], list[Tensor]]


def heads(x: Tensor) -> Tensor:
    """[B, N, 3 H d] to Q K^T V by heads, and back to [B, N, H d]: attention without its softmax."""
    b, n, c = x.shape
    q, k, v = x.view(b, n, 3, 3, c // 9).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q @ k.transpose(-2, -1)) @ v).transpose(1, 2).reshape(b, n, c // 3)


def windows(x: Tensor) -> Tensor:
    """Products over windows of a plane whose rows are no single stride apart."""
    b, h, w, c = x.shape
    parts = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    return parts @ parts.mT


CASES: dict[str, tuple[Case, int]] = {
    # What is compared, and how many launches it takes.
    "a transposed operand": ((lambda x, y: x @ y.mT, digits((3, 5, 4), (3, 6, 4))), 1),
    "a broadcast operand": ((lambda x, y: x @ y, digits((2, 3, 5, 4), (3, 4, 6))), 1),
    "one of many": ((lambda x, y: x[:, 1] @ y, digits((3, 2, 5, 4), (3, 4, 6))), 1),
    "a part": ((lambda x, y: x[:, 1:4, 2:] @ y, digits((3, 5, 6), (3, 4, 6))), 1),
    "an einsum": ((lambda x, y: torch.einsum("bhid,bjhd->bhij", x, y), digits((2, 3, 5, 4), (2, 6, 3, 4))), 1),
    "another order": ((lambda x, y: torch.einsum("bhid,bhjd->bijh", x, y), digits((2, 3, 5, 4), (2, 3, 6, 4))), 1),
    "heads": ((heads, digits((2, 5, 36))), 2),
    # The windows' copy: rows of a window are two digits, which a product's depth would have to count as well.
    "windows": ((windows, digits((2, 4, 6, 8))), 2),
    "a result that is kept": ((lambda x, y: (x @ y, (x @ y).mT.contiguous()), digits((3, 5, 4), (3, 4, 6))), 2),
    "an operand of one element": ((lambda x, y: x @ y, digits((3, 1, 1), (3, 1, 6))), 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Callable[[str], tuple[object, list[str]]]:
    def one(name: str) -> tuple[object, list[str]]:
        (function, inputs), _ = CASES[name]
        torch.compiler.reset()
        with recorded_graphs() as graphs:
            found = torch.compile(function, backend="max", options={"fallback": "error"})(*inputs)
        launched = launched_functions(graphs)
        return found, [each.entry if isinstance(each, LibraryFunction) else "program" for each in launched]

    return one


@pytest.mark.parametrize("name", CASES)
def test_products_read_and_write_in_place(run: Callable[[str], tuple[object, list[str]]], name: str) -> None:
    (function, inputs), launches = CASES[name]
    found, launched = run(name)
    torch.testing.assert_close(found, function(*inputs), rtol=0, atol=0)
    assert "matmul" in launched
    assert len(launched) == launches, launched
