"""What a graph updates, keeps for its backward pass and returns, in every pair; and random draws, which are kept."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_max_backend import backend

LENGTH = 6


def _halved(b: Tensor, x: Tensor) -> Tensor:
    new = b * 0.5 + x
    b.copy_(new)
    return new


def _in_a_view(b: Tensor, x: Tensor) -> Tensor:
    b.view(2, -1)[1].mul_(0.5).add_(x[3:])
    return b


def _by_its_own_values(b: Tensor, x: Tensor) -> Tensor:
    """As power iterations do: the next one begins with what this one gave."""
    new = F.normalize(b * x, dim=0)
    b.copy_(new)
    return new


UPDATES = (_halved, _in_a_view, _by_its_own_values)

#: What the gradient needs: of the buffer before the update, of the new value, and of the buffer behind it.
SAVED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "old": lambda old, new, b: old,
    "of_old": lambda old, new, b: old * 2,
    "view_of_old": lambda old, new, b: old.view(2, -1)[1],
    "new": lambda old, new, b: new.clone(),
    "of_new": lambda old, new, b: new.exp(),
    "view_of_new": lambda old, new, b: new.clone()[3:],
}
RETURNED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "view_of_old": lambda old, saved, b: old.view(2, -1)[1],
    "saved": lambda old, saved, b: saved.detach(),
    "view_of_copy": lambda old, saved, b: b.clone()[1:4],
    "buffer": lambda old, saved, b: b,
    "view_of_buffer": lambda old, saved, b: b[2:5],
}
PAIRS = list(itertools.product(SAVED, RETURNED))


def every_pair(update: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    """A buffer for each pair, in one graph."""

    def function(buffers: list[Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
        results = []
        for b, (saved, returned) in zip(buffers, PAIRS, strict=True):
            old = b.clone()
            value = SAVED[saved](old, update(b, x), b)
            results += [w * value, RETURNED[returned](old, value, b)]
        return results

    return function


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__.strip("_"))
def test_updated_saved_and_returned(update: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Called twice before one backward pass."""
    torch.compiler.reset()
    plain = every_pair(update)
    start = [torch.rand(LENGTH) + 0.5 for _ in PAIRS]
    xs, w = [torch.rand(LENGTH) + 0.5 for _ in range(2)], torch.randn(1, requires_grad=True)
    found = []
    for function in (plain, torch.compile(plain, backend="max", options={"fallback": "error"})):
        buffers = [b.clone() for b in start]
        first, second = (function(buffers, x, w) for x in xs)
        losses = [r.sum() for r in (*first[::2], *second[::2])]
        gradients = [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses]
        shared = [[number for number, b in enumerate(buffers) if _memory(b) == _memory(r)] for r in first]
        found.append((buffers, first, second, gradients, torch.autograd.grad(sum(losses), w), shared))
    names = [f"{saved}, {returned}" for saved, returned in PAIRS]
    (buffers, first, second, gradients, total, shared), wanted = found[1], found[0]
    for kind, ours, theirs in (
        ("buffer", buffers, wanted[0]),
        ("first", first, wanted[1]),
        ("second", second, wanted[2]),
        ("gradient", gradients, wanted[3]),
    ):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            pair = names[number // (2 if kind in ("first", "second") else 1) % len(names)]
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5, msg=lambda text, at=f"{kind} {pair}": f"{at}: {text}"
            )
            assert a.stride() == b.stride(), (kind, pair)
    torch.testing.assert_close(total, wanted[4], rtol=1e-5, atol=1e-4)
    assert shared == wanted[5]


def test_spectral_norm_called_twice() -> None:
    """A power iteration of one row updates its vector in place and needs the old one for its gradient."""
    torch.manual_seed(0)
    plain = nn.utils.spectral_norm(nn.Conv2d(8, 1, 3))
    ours = copy.deepcopy(plain)
    a, b = torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
    for function in (plain, torch.compile(ours, backend="max", options={"fallback": "error"})):
        (function(a).relu().mean() - function(b).mean()).backward()
    torch.testing.assert_close(ours.weight_orig.grad, plain.weight_orig.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.weight_u, plain.weight_u)


def _dropped(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kept = F.dropout(torch.tanh(F.conv1d(x, w, padding=1)), 0.5)
    return F.silu(F.conv1d(kept, v, padding=1)), kept


def _checkpointed(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = checkpoint(_dropped, x, w, v, use_reentrant=False)
    return result


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("function", [_dropped, _checkpointed], ids=["plain", "checkpointed"])
def test_dropout_that_is_computed_again(function: Callable[..., Any], budget: float) -> None:
    """The gradient is that of the mask which the forward pass used, whatever is computed again."""
    torch.compiler.reset()
    x, w, v = (torch.randn(shape, requires_grad=True) for shape in ((4, 3, 16), (8, 3, 3), (8, 8, 3)))
    with functorch_config.patch(activation_memory_budget=budget):
        y, kept = torch.compile(function, backend="max")(x, w, v)
        found = torch.autograd.grad(y.square().sum(), (x, w, v))
    mask = (kept.detach() != 0) * 2.0
    wanted = F.silu(F.conv1d(torch.tanh(F.conv1d(x, w, padding=1)) * mask, v, padding=1))
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), (x, w, v)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("slope", [0.2, 0.0, -0.5])
def test_a_leaky_relu_keeps_no_mask_beside_its_result(slope: float) -> None:
    """Also of zeros, infinities and NaNs, whose gradients are eager's."""
    torch.compiler.reset()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1.0])
    x = torch.cat([special, torch.randn(4 * 3 * 16 - 8)]).reshape(4, 3, 16)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        # The result, not the argument, is kept for the square's gradient.
        y = F.leaky_relu(torch.erf(w) + x, slope)
        return y * y, y

    w = torch.zeros(3, 16, requires_grad=True)
    compiled = torch.compile(function, backend="max", options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        found = torch.autograd.grad(compiled(x, w)[0].sum(), w)
    torch.testing.assert_close(found, torch.autograd.grad(function(x, w)[0].sum(), w), equal_nan=True)
    memory = graphs[0].memory
    assert memory is not None
    masks = [tensor for tensor in memory.saved if tensor.dtype == torch.bool]
    assert bool(masks) == (slope < 0)
