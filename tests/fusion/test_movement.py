"""Slices, padding, concatenation and broadcasts read by generated programs: exactly PyTorch's results, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fusion.test_groups import calls, fused, remaining
from tests.fusion.test_reductions import digits
from torch_max_backend import explain

Case = tuple[Callable[..., object], list[Tensor]]


def thirds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the gradient of a packed projection is: every part padded to the whole, and all added up."""
    return torch.stack([q * 2, k, v + 1]).sum((1,))


def windows(x: Tensor) -> Tensor:
    """Swin's windows: padded, rolled, cut into windows."""
    padded = torch.roll(F.pad(x, (0, 0, 0, 3, 0, 3)), (-3, -3), (1, 2))
    n, h, w, c = padded.shape
    return padded.view(n, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)


def crossed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Sums whose addends no common digits count."""
    total = x.view(2, 3, 5, 2, 3).permute(4, 0, 3, 1, 2).reshape(180) * 3 + y.view(3, 2, 5, 3, 2).permute(
        2, 1, 4, 3, 0
    ).reshape(180)
    return total, total.sum(), (total * total).view(18, 10).sum(0)


def merged_heads(x: Tensor, y: Tensor) -> Tensor:
    """HaloNet's windows put together: seven digits."""
    heads = (x + y.transpose(2, 3)).view(2, 2, 2, 4, 4, 2, 8)
    return heads.permute(0, 5, 6, 1, 3, 2, 4).reshape(2, 16, 8, 8)


def in_turns(x: Tensor, w: Tensor) -> Tensor:
    """A channel of the one half after one of the other, as ShuffleNet has them."""
    left, right = x.chunk(2, 1)
    return torch.stack((left, torch.relu(right - w)), 2).flatten(1)


def turned_pairs(x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    """Rotary position embedding of neighbouring channels."""
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cosine + turned * sine


CASES: dict[str, Case] = {
    "slices": (lambda x: (x[:, 2:5], x[1:], x[:, :, ::3], x[2, 1:, 5], x[:, 1::2, 3:9:2]), digits((5, 7, 24))),
    "slices of vectors' length": (lambda x: (x[:, 16:48] * 2, x[:, 3:51] * 2), digits((40, 64))),
    "a slice of an expression": (lambda x, y: (x * y)[:, 3:] + 1, digits((40, 33), (33,))),
    "padding": (lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 3, 1), value=7.5)), digits((6, 40))),
    "padding that crops": (lambda x: (F.pad(x, (0, 0, -1, 2)), F.pad(x, (-3, -5))), digits((6, 40))),
    "padding of both": (lambda x: F.pad(x * 2, (3, 5, 1, 1), value=-1) + 1, digits((6, 40))),
    "padding of bool": (lambda x: F.pad(x > 0, (1, 1), value=True), digits((6, 40))),
    "padding of int64": (lambda x: F.pad(x, (1, 1), value=-3), digits((6, 40), dtype=torch.int64)),
    "concatenation": (lambda x, y: (torch.cat([x, y]), torch.cat([x, x * 2, y, x], 1)), digits((6, 40), (6, 40))),
    "of unequal parts": (lambda *x: torch.cat(x, 1), digits((6, 3), (6, 40), (6, 0), (6, 1), (6, 17))),
    "of many parts": (lambda *x: torch.cat(x, 1), digits(*[(6, n) for n in range(1, 20)])),
    "of more parts than a launch takes": (lambda *x: torch.cat(x, 1), digits(*[(6, n % 9) for n in range(150)])),
    "of many parts, in vectors": (lambda *x: torch.cat(x, 1), digits(*[(600, 16 * n) for n in range(1, 14)])),
    "of many parts, bool": (lambda *x: torch.cat([each > 0 for each in x]), digits(*[(n,) for n in range(1, 14)])),
    "of nine parts": (lambda *x: torch.cat(x, 1) + 1, digits(*[(6, n) for n in range(1, 10)])),
    "of eight padded parts": (lambda *x: torch.cat([F.pad(each, (1, 1)) for each in x], 1), digits(*[(6, 7)] * 8)),
    "padded numbers": (lambda x: F.pad(torch.ones_like(x), (1, 2)) + F.pad(x, (2, 1)), digits((6, 40))),
    "of bfloat16": (lambda *x: torch.cat(x, 1) * 2, digits((6, 32), (6, 16), dtype=torch.bfloat16)),
    "a slice of a concatenation": (lambda x, y: torch.cat([x, y], 1)[:, 30:50] + 1, digits((6, 40), (6, 40))),
    "a slice beside a padded part": (lambda x: F.pad(x, (8, 8), value=2)[:, :5], digits((6, 40))),
    "packed gradients": (thirds, digits((6, 40), (6, 40), (6, 40))),
    "windows": (windows, digits((2, 4, 4, 24))),
    "digits that cross": (crossed, digits((180,), (180,))),
    "seven digits": (merged_heads, digits((2, 4, 16, 16), (2, 4, 16, 16))),
    "reduced": (lambda x, y: (torch.cat([x, y]).sum(0), F.pad(x, (1, 2)).sum(0)), digits((9, 40), (6, 40))),
    "a slice, reduced": (lambda x: (x[:, 3:].sum(1), x[:, 8:].sum(0), x[3:].sum()), digits((9, 40))),
    "numbers alone": (lambda x: (torch.ones(3, 40_000), F.pad(x, (2, 2))), digits((6, 40))),
    "tiles": (lambda x: x.transpose(0, 1).contiguous(), digits((300, 257))),
    "tiles of bfloat16": (lambda x: x.transpose(1, 2).contiguous(), digits((3, 300, 264), dtype=torch.bfloat16)),
    "tiles of int64": (lambda x: x.permute(2, 1, 0).contiguous(), digits((100, 9, 80), dtype=torch.int64)),
    "tiles of bool": (lambda x: (x > 0).permute(2, 0, 3, 1).contiguous(), digits((10, 33, 20, 40))),
    "tiles of few columns": (lambda x: x.permute(0, 2, 3, 1).contiguous(), digits((4, 3, 130, 131))),
    "tiles of few rows": (lambda x: x.permute(0, 3, 1, 2).contiguous(), digits((4, 130, 131, 3), dtype=torch.bfloat16)),
    "channels in turns": (in_turns, digits((40, 58), (29,), dtype=torch.bfloat16)),
    "channels in turns, in vectors": (in_turns, digits((40, 232), (116,), dtype=torch.bfloat16)),
    "channels of four in turns": (lambda *x: torch.stack(x, -1).flatten(1) + 1, digits(*[(40, 24)] * 4)),
    "pairs turned": (turned_pairs, digits((3, 40, 64), (40, 64), (40, 64))),
    "rows of few": (lambda x, y: (x.view(30, 8, 4) * y).sum(0), digits((30, 32), (4,))),
    "parts that no vector divides": (lambda x, y: torch.cat([x * 2, y], 1) - 1, digits((60, 14), (60, 18))),
    "slices transposed": (lambda x: x[:, 2:, 1:].transpose(0, 2) + 1, digits((5, 7, 24))),
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    """One compilation for all cases."""

    def every(inputs: list[list[Tensor]]) -> list[object]:
        return [function(*each) for (function, _), each in zip(CASES.values(), inputs, strict=True)]

    torch.compiler.reset()
    compiled = torch.compile(every, backend="max", options={"fallback": "error"})
    return dict(zip(CASES, compiled([case[1] for case in CASES.values()]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_moved_elements_are_pytorchs(results: dict[str, object], name: str) -> None:
    function, inputs = CASES[name]
    torch.testing.assert_close(results[name], function(*inputs), rtol=0, atol=0)


def test_packed_gradients_are_one_call() -> None:
    """Nothing is padded in memory, nothing added to zeros."""

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        zeros = F.pad(q, (0, 0, 0, 0, 0, 2)) + F.pad(k, (0, 0, 0, 0, 1, 1))
        return zeros + F.pad(v, (0, 0, 0, 0, 2, 0))

    graph = fused(packed, *[(1, 8, 24)] * 3)
    assert calls(graph) == ["program"]
    assert not remaining(graph)


def test_windows_are_one_call() -> None:
    graph = fused(windows, (2, 4, 4, 24))
    assert len(calls(graph)) <= 2
    assert not remaining(graph)


def test_a_slice_is_read_where_it_lies() -> None:
    graph = fused(lambda x: (torch.tanh(x[:, 2:5]), x[3:].sum(0)), (8, 24))
    assert len(calls(graph)) == 2
    assert not remaining(graph)


def test_crossed_digits_are_not_left_to_max() -> None:
    for name in ("digits that cross", "seven digits"):
        function, inputs = CASES[name]
        (graph,) = explain(function, *inputs, quiet=True, compile=False).graphs
        assert graph.launches and not graph.refusals
