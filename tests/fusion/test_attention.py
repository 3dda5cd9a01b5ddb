"""Attention reads queries, keys and values where a linear layer made them, and writes their gradients where the layer's
own gradient is read: no launch copies, and numbers are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.launched import launched_functions
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.fusion.program import Program
from torch_max_backend.mojo_ops.functions import LibraryFunction

HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE
Parts = tuple[Tensor, Tensor, Tensor]


def unbound(x: Tensor) -> Parts:
    """As timm's ViT takes them apart: [batch, rows, 3, heads, elements]."""
    q, k, v = x.view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def selected(x: Tensor) -> Parts:
    """As torchvision's Swin does: each part by its number."""
    whole = x.view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return whole[0], whole[1], whole[2]


def chunked(x: Tensor) -> Parts:
    """As many language models do: [batch, rows, 3 heads elements] in three."""
    q, k, v = (part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in x.chunk(3, dim=-1))
    return q, k, v


class Own(nn.Module):
    """Self-attention behind one linear layer."""

    def __init__(self, take: Callable[[Tensor], Parts], *, keep: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.take, self.keep = take, keep

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.take(self.qkv(x))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return (self.out(y), k) if self.keep else self.out(y)


class Crossed(nn.Module):
    """Keys and values of one linear layer, queries of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
        k, v = self.kv(x).view(*x.shape[:2], 2, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unbound": lambda: Own(unbound),
    "selected": lambda: Own(selected),
    "chunked": lambda: Own(chunked),
    "crossed": Crossed,
}


def compared(model: nn.Module, options: dict[str, object]) -> list[str]:
    """Compares a step with eager PyTorch's; the entries of what was launched, programs by what they compute."""
    torch.compiler.reset()
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    with recorded_graphs() as graphs:
        found = torch.compile(model, backend="max", options=options)(x)
        wanted = model(x)
        first = found[0] if isinstance(found, tuple) else found
        last = wanted[0] if isinstance(wanted, tuple) else wanted
        weights = torch.randn_like(last)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        inputs = [x, *model.parameters()]
        gradients = torch.autograd.grad((first * weights).sum(), inputs)
        expected = torch.autograd.grad((last * weights).sum(), inputs)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    names = []
    for function in launched_functions(graphs):
        entry = function.entry if isinstance(function, LibraryFunction | Program) else type(function).__name__
        names.append(f"{entry} {function.ops}".strip() if isinstance(function, Program) else str(entry))
    return names


@pytest.mark.parametrize("name", MODELS)
def test_attention_reads_and_writes_in_place(name: str) -> None:
    torch.manual_seed(0)
    launched = compared(MODELS[name](), {"fallback": "error"})
    assert "attention_fprop" in launched and "attention_dgrad" in launched
    moves = [each for each in launched if each in ("pointwise", "pointwise clone", "transpose", "concatenate")]
    moves += [each for each in launched if "stack" in each or "cat" in each or "select" in each]
    # A bias, and sums for the gradients of biases, are no copies.
    assert not moves, launched


def test_a_part_that_is_returned_too() -> None:
    torch.manual_seed(0)
    launched = compared(Own(unbound, keep=True), {"fallback": "error"})
    assert "attention_fprop" in launched and "attention_dgrad" in launched


@pytest.mark.parametrize(("shape", "batch"), [((SIZE,), 3), ((3, 1, 1, SIZE), 3), ((1, 1, 4, SIZE), 3), ((SIZE,), 1)])
def test_queries_that_are_repeated(shape: tuple[int, ...], batch: int) -> None:
    """One row for all batches, heads and queries; one for each batch; the same rows for every batch."""

    def pooled(token: Tensor, x: Tensor) -> Tensor:
        queries = token.expand(x.shape[0], 1, 4, SIZE)
        return functional.scaled_dot_product_attention(queries, x, x)

    torch.manual_seed(0)
    torch.compiler.reset()
    token, x = torch.randn(shape, requires_grad=True), torch.randn(batch, 1, 5, SIZE, requires_grad=True)
    found = torch.compile(pooled, backend="max", options={"fallback": "error"})(token, x)
    wanted = pooled(token, x)
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), [token, x])
    expected = torch.autograd.grad((wanted * weights).sum(), [token, x])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_aligned_are_copied() -> None:
    """A part that begins at an odd element."""

    def shifted(x: Tensor) -> Tensor:
        q, k, v = (x[:, :, n : n + SIZE].unsqueeze(1) for n in (0, SIZE + 1, 2 * SIZE + 3))
        return functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(0)
    torch.compiler.reset()
    x = torch.randn(2, 4, 3 * SIZE + 4)
    found = torch.compile(shifted, backend="max", options={"fallback": "error"})(x)
    torch.testing.assert_close(found, shifted(x), rtol=1e-5, atol=1e-5)
