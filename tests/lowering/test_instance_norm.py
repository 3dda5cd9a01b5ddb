"""Instance normalization, which is traced as group normalization, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_max_backend import backend

Maker = Callable[..., Tensor]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def compiled(function: Callable[..., Tensor], dynamic: bool | None = None) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(function, backend="max", options={"fallback": "error"}, dynamic=dynamic)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    """Channels-last where there is such a format."""
    x = (torch.randn(*shape, dtype=torch.float64) + mean).to(dtype)
    return x.contiguous(memory_format=LAST.get(x.dim(), torch.contiguous_format)).requires_grad_()


def distance(found: Tensor, true: Tensor) -> float:
    return float((found.detach().double() - true.detach()).norm() / true.norm().detach())


@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 6, 17), torch.float32), ((2, 8, 5, 7), torch.float32), ((2, 4, 3, 4, 5), torch.float64),
        ((2, 8, 6, 4), torch.bfloat16), ((1, 5, 4, 4), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_result_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    x = drawn(*shape, dtype=dtype)
    parameters = [torch.randn(shape[1], dtype=dtype, requires_grad=True) for _ in range(2)] if affine else []

    def normalize(x: Tensor, *affine: Tensor) -> Tensor:
        return F.instance_norm(x, None, None, *affine)

    y, wanted = compiled(normalize)(x, *parameters), normalize(x, *parameters)
    assert y.stride() == wanted.stride()
    true = normalize(x.double(), *(each.double() for each in parameters))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert distance(y, true) < tolerance
    dy = torch.randn_like(wanted)
    operands = [x, *parameters]
    found = torch.autograd.grad(y, operands, dy)
    references = torch.autograd.grad(true, operands, dy.double())
    for gradient, reference in zip(found, references, strict=True):
        assert distance(gradient, reference) < 4 * tolerance


def test_channels_that_lie_far_from_zero() -> None:
    """The gradients' sums are of standardized values: nothing is lost to the mean, by which eager's group norm loses
    digits."""
    x = drawn(2, 8, 16, 16, mean=1000.0)
    dy = torch.randn_like(x)
    for groups in (2, 8):
        weight = torch.randn(8, requires_grad=True)

        def normalize(x: Tensor, weight: Tensor, groups: int = groups) -> Tensor:
            return F.group_norm(x, groups, weight)

        true = torch.autograd.grad(normalize(x.double(), weight.double()), [x, weight], dy.double())
        eager = torch.autograd.grad(normalize(x, weight), [x, weight], dy)
        found = torch.autograd.grad(compiled(normalize)(x, weight), [x, weight], dy)
        for ours, theirs, reference in zip(found, eager, true, strict=True):
            assert distance(ours, reference) < max(distance(theirs, reference), 1e-4)


def test_a_batch_that_grows() -> None:
    norm = nn.InstanceNorm2d(6, affine=True)
    run = compiled(norm, dynamic=True)
    for batch in (2, 3, 5):
        x = drawn(batch, 6, 5, 4)
        y, wanted = run(x), norm(x)
        torch.testing.assert_close(y, wanted)
        found, true = (torch.autograd.grad(each.square().sum(), norm.parameters()) for each in (y, wanted))
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_running_statistics(training: bool) -> None:
    ours, eager = (nn.InstanceNorm2d(6, affine=True, track_running_stats=True).train(training) for _ in range(2))
    for _ in range(2):
        x = drawn(3, 6, 5, 4, mean=2.0)
        y, wanted = compiled(ours)(x), eager(x)
        torch.testing.assert_close(y, wanted)
        assert y.stride() == wanted.stride()
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (4, 6)], ids=str)
def test_shapes_at_the_edge(shape: tuple[int, ...]) -> None:
    """An empty batch, and a tensor without places, which has no deviation."""

    def normalize(x: Tensor) -> Tensor:
        return torch.instance_norm(x, None, None, None, None, True, 0.0, 1e-5, False)

    x = torch.randn(shape)
    try:
        wanted = normalize(x)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(Exception, match=str(error).splitlines()[0][:20]):
            compiled(normalize)(x)
        return
    # One element less its mean, over the root of eps.
    torch.testing.assert_close(compiled(normalize)(x), wanted, rtol=1e-5, atol=1e-4)


def test_autocast_keeps_the_dtype() -> None:
    """It is no op of autocast's lists: the result has the dtype of what is normalized."""
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True))
    x = drawn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = compiled(layers)(x), layers(x)
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)


def test_a_network_in_channels_last_is_not_transposed() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    layers.to(memory_format=torch.channels_last)
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        torch.compile(layers, backend=backend.list_only)(drawn(2, 4, 16, 16))
    listings = [executable.listing for graph in graphs for executable in graph.executables]
    launches = [launch.function for listing in listings if listing is not None for launch in listing.launches]
    assert launches and not any("transpose" in function for function in launches)
