"""Results that are views of something larger have eager's strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], tuple[Tensor, ...]]


def _of_computed(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y.clone()[:, 1], (x + 1)[..., ::2], (x - 1).permute(1, 0, 2, 3)[1:]


def _with_the_whole(x: Tensor) -> tuple[Tensor, ...]:
    y = x.tanh()
    return y, y.clone()[:, 1], y[:, 1:3]


def _parts_of_an_argument(x: Tensor) -> tuple[Tensor, ...]:
    return *x.split([1, 3], 1), x.square().unbind(3)[1]


def _repeated(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum((2, 3)).unsqueeze(-1).expand(-1, -1, 7), (x * 2).unfold(3, 2, 1)


def _in_channels_last(x: Tensor) -> tuple[Tensor, ...]:
    return ((F.avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1) + 1)[:, 1:],)


def _of_views_that_were_updated(x: Tensor) -> tuple[Tensor, ...]:
    """A functional graph writes a view into its whole, and looks at that again."""
    results = []
    for view in (
        lambda whole: whole.diagonal(0, 0, 3),
        lambda whole: whole.diagonal(-1, 2, 1),
        lambda whole: whole.select(2, 1),
        lambda whole: whole[..., ::2],
        lambda whole: whole.transpose(1, 3)[1],
    ):
        for whole in x.clone(), x.permute(2, 0, 3, 1).clone(memory_format=torch.contiguous_format).permute(1, 3, 0, 2):
            part = view(whole)
            part.add_(1)
            results.append(torch.copysign(part, part))
    return tuple(results)


@pytest.mark.parametrize(
    "function",
    [
        _of_computed,
        _with_the_whole,
        _parts_of_an_argument,
        _repeated,
        _in_channels_last,
        _of_views_that_were_updated,
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_strides_of_results(function: Function, gradient: bool) -> None:
    torch.compiler.reset()
    # Small: the exponential of a sum makes a large sum's rounding an error of the gradient's.
    x = (torch.randn(2, 4, 5, 4, generator=torch.Generator().manual_seed(0)) / 4).requires_grad_(gradient)
    run = torch.compile(function, backend="max", options={"fallback": "error"})
    for _ in range(2):
        ours, eager = run(x), function(x)
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() and a.requires_grad == gradient
        if gradient:
            found = [torch.autograd.grad(sum(y.exp().sum() for y in each), x)[0] for each in (ours, eager)]
            torch.testing.assert_close(*found)


def test_a_result_that_is_a_view_can_be_written_to() -> None:
    """It has memory of its own in each call."""
    torch.compiler.reset()
    x = torch.randn(2, 4, requires_grad=True)
    run = torch.compile(lambda x: (x * 2)[:, 1:], backend="max", options={"fallback": "error"})
    first, second = run(x), run(x)
    wanted = second.detach().clone()
    first.mul_(0)
    torch.testing.assert_close(second, wanted)
    second.add_(1)
    (found,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(found, torch.tensor([[0.0, 2, 2, 2]] * 2))


def test_results_share_memory_as_in_eager_pytorch() -> None:
    """A value and views of it, views of a value that is no result, and values that have nothing in common."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two, three = x.relu() + 1, x.abs() - 1, x.neg() * 2
        return one, one[:, 1:], one.flatten(), two.t(), two[0], three, one.reshape(-1, 1) > 0

    with torch.no_grad():
        x = torch.randn(3, 4)
        ours, eager = torch.compile(function, backend="max")(x), function(x)
    for mine, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.stride() == other.stride() and mine.storage_offset() == other.storage_offset()
    shared = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in ours] for b in ours]
    assert shared == [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in eager] for b in eager]
    ours[0].zero_()
    assert not ours[1].any() and not ours[2].any()


def test_a_mask_for_no_elements_is_a_mask() -> None:
    """PyTorch draws one in the tensor's own dtype."""
    x = torch.randn(1, 0, 3, requires_grad=True)
    result = torch.compile(lambda x: F.dropout(x, 0.4), backend="max")(x)
    result.sum().backward()
    assert result.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
