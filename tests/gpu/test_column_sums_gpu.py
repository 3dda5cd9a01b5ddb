"""Batch normalization's reductions in the store of Hopper's convolutions: beside float64, beside the kernels that read
the result again, twice the same, and where the fast kernel cannot run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.test_convolutions import Branches
from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.fusion import rewrite
from torch_max_backend.launch_list import listing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper"
    ),
]

aten = torch.ops.aten
EPSILON, MOMENTUM = 1e-5, 0.1


@dataclass(frozen=True)
class Case:
    """A convolution, of which the result's channels are summed: k forward, c backward."""

    n: int
    h: int
    w: int
    c: int
    k: int
    filter: int = 1
    stride: int = 1
    offset: float = 0.0
    """Of the source's values: the result's mean is far from zero then."""
    d: int = 0
    """A third axis's extent, 0 for two axes."""

    @property
    def size(self) -> list[int]:
        return [*([self.d] if self.d else []), self.h, self.w]


CASES = {
    "narrow": Case(3, 29, 31, 64, 64, 3),
    "multiples of 8 alone": Case(5, 17, 19, 72, 72, 3),
    "one column tile of the narrow kernel's edge": Case(2, 30, 30, 64, 40),
    "column tiles of 96": Case(8, 28, 28, 160, 192, 3),
    "two column tiles": Case(4, 56, 56, 256, 256),
    "many tiles": Case(32, 56, 56, 64, 128),
    "the mean far from zero": Case(8, 28, 28, 64, 256, 1, 1, 8.0),
    "the mean far from zero, narrow": Case(8, 56, 56, 64, 64, 3, 1, 4.0),
    "column tiles change on the way": Case(32, 14, 14, 640, 640),
    "sixteen column tiles": Case(64, 7, 7, 2048, 2048),
    "fewer tiles than blocks": Case(1, 9, 9, 256, 512),
    "one row": Case(1, 1, 2, 128, 128),
    "strided": Case(4, 29, 27, 128, 256, 3, 2),
    "strided without filter": Case(4, 28, 28, 256, 512, 1, 2),
    "an image's channels": Case(5, 37, 64, 3, 32, 3, 2),
    "an image's channels, the mean far from zero": Case(3, 32, 40, 3, 64, 7, 2, 4.0),
    "few channels": Case(4, 29, 48, 16, 16, 3),
    "blocks of the narrow kernel": Case(4, 30, 56, 32, 32, 3),
    "rows that no block divides": Case(3, 23, 29, 8, 40, 5),
    "three axes": Case(3, 9, 14, 64, 64, 3, d=6),
    "three axes, two column tiles": Case(2, 7, 9, 40, 160, 3, d=5),
    "three axes, strided": Case(2, 10, 13, 64, 128, 3, 2, d=8),
    "three axes, strided to few channels": Case(2, 9, 12, 48, 40, 3, 2, d=7),
    "three axes, strided without filter": Case(2, 8, 10, 64, 128, 1, 2, d=6),
    "three axes, an image's channels": Case(2, 14, 24, 3, 64, 3, 2, d=6),
}


def _convolution(x: Tensor, w: Tensor, b: Tensor | None, stride: int, pad: int) -> Tensor:
    return (F.conv2d if x.dim() == 4 else F.conv3d)(x, w, b, stride, pad)


def _forward(x: Tensor, w: Tensor, mean: Tensor, variance: Tensor, stride: int, pad: int) -> tuple[Tensor, ...]:
    y = _convolution(x, w, None, stride, pad)
    found = aten._native_batch_norm_legit_functional(y, None, None, mean, variance, True, MOMENTUM, EPSILON)
    return (y, *found[1:])


def _biased(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, stride: int, pad: int) -> tuple[Any, ...]:
    y = _convolution(x, w, b, stride, pad)
    found = aten._native_batch_norm_legit_functional(y, None, None, mean, variance, True, MOMENTUM, EPSILON)
    return (y, *found[1:])


def _added(
    x: Tensor, w: Tensor, b: Tensor, skip: Tensor, mean: Tensor, variance: Tensor, stride: int, pad: int
) -> tuple[Any, ...]:
    """With a program that reads another tensor and needs many registers."""
    y = F.silu(_convolution(x, w, b, stride, pad)) + skip
    found = aten._native_batch_norm_legit_functional(y, None, None, mean, variance, True, MOMENTUM, EPSILON)
    return (y, *found[1:])


def _data_gradient(dy: Tensor, like: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    axes = dy.dim() - 2
    arguments = ([stride] * axes, [pad] * axes, [1] * axes, False, [0] * axes, 1, [True, False, False])
    return aten.convolution_backward(dy, like, w, None, *arguments)[0]


def _backward(
    dy: Tensor, like: Tensor, w: Tensor, active: Tensor, skip: Tensor, weight: Tensor, x: Tensor, mean: Tensor,
    invstd: Tensor, stride: int, pad: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Through a residual block's end: the gradient of what was added, and batch normalization's."""
    dx = _data_gradient(dy, like, w, stride, pad)
    dz = aten.threshold_backward(dx + skip, active, 0)
    found = aten.native_batch_norm_backward(dz, x, weight, None, None, mean, invstd, True, EPSILON, [True, True, True])
    return (dz, *found)


def _plain_backward(
    dy: Tensor, like: Tensor, w: Tensor, weight: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, stride: int, pad: int
) -> tuple[Tensor, ...]:
    dz = _data_gradient(dy, like, w, stride, pad)
    found = aten.native_batch_norm_backward(dz, x, weight, None, None, mean, invstd, True, EPSILON, [True, True, True])
    return (dz, *found)


def _random(seed: int, *shape: int, offset: float = 0.0, scale: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + offset
    made = made.to(torch.bfloat16)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return made.to(memory_format=formats.get(made.dim(), torch.contiguous_format)).cuda()


def _inputs(case: Case) -> list[list[Tensor]]:
    """Of the five functions above."""
    c, k, pad = case.c, case.k, case.filter // 2
    size = [(extent + 2 * pad - case.filter) // case.stride + 1 for extent in case.size]
    taps = [case.filter] * len(size)
    x = _random(1, case.n, c, *case.size, offset=case.offset)
    w = _random(2, k, c, *taps, offset=0.25 if case.offset else 0, scale=(c * math.prod(taps)) ** -0.5)
    bias, running = _random(3, k), [torch.randn(k, device="cuda"), torch.rand(k, device="cuda")]
    dy = _random(4, case.n, k, *size)
    active, skip = (_random(seed, case.n, c, *case.size) for seed in (5, 6))
    center = _by_channel(x.float()).mean(1)
    invstd = 1 / _by_channel(x.float()).std(1, unbiased=False).clamp(1e-3)
    return [
        [x, w, *running],
        [x, w, bias, *running],
        [x, w, bias, _random(7, case.n, k, *size), *running],
        [dy, x, w, active, skip, torch.ones_like(center), x, center, invstd],
        [dy, x, w, torch.ones_like(center), x, center, invstd],
    ]


FUNCTIONS = (_forward, _biased, _added, _backward, _plain_backward)


def _unfused() -> contextlib.AbstractContextManager[object]:
    """Graphs that are built meanwhile read a convolution's result for its sums."""
    return mock.patch.object(rewrite, "with_sums", lambda operations, groups, taken, device: (dict(taken), []))


def _compiled(fused: bool) -> Callable[..., list[list[tuple[Tensor, ...]]]]:
    """All cases as one graph."""

    def every(inputs: list[list[list[Tensor]]]) -> list[list[tuple[Tensor, ...]]]:
        return [
            [function(*each, case.stride, case.filter // 2) for function, each in zip(FUNCTIONS, of_case, strict=True)]
            for case, of_case in zip(CASES.values(), inputs, strict=True)
        ]

    torch.compiler.reset()
    compiled = torch.compile(every, backend="max", options={"fallback": "error"})

    def run(inputs: list[list[list[Tensor]]]) -> list[list[tuple[Tensor, ...]]]:
        with torch.no_grad():
            if fused:
                return compiled(inputs)
            with _unfused():
                return compiled(inputs)

    return run


@pytest.fixture(scope="module")
def inputs() -> list[list[list[Tensor]]]:
    return [_inputs(case) for case in CASES.values()]


@pytest.fixture(scope="module")
def found(inputs: list[list[list[Tensor]]]) -> list[list[tuple[Tensor, ...]]]:
    """With sums in the store, into memory that held NaN."""
    run = _compiled(True)
    with backend.recorded_graphs() as graphs:
        run([[[torch.full_like(x, float("nan")) for x in each] for each in of_case] for of_case in inputs])
    entries = {function.entry for function in launched_functions(graphs)}
    assert "conv_pointwise_sums" in entries, entries
    torch.cuda.synchronize()
    result = run(inputs)
    again = run(inputs)
    for name, first, second in zip(CASES, result, again, strict=True):
        for function, a, b in zip(FUNCTIONS, first, second, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True)), f"two runs differ: {name}, {function}"
    return result


@pytest.fixture(scope="module")
def apart(inputs: list[list[list[Tensor]]]) -> list[list[tuple[Tensor, ...]]]:
    """With the kernels that read what the convolution has stored."""
    return _compiled(False)(inputs)


def _by_channel(x: Tensor) -> Tensor:
    """A row for each channel."""
    return x.movedim(1, 0).flatten(1)


def _statistics(y: Tensor, running: list[Tensor]) -> list[Tensor]:
    wide = _by_channel(y.double())
    count = wide.shape[1]
    mean, variance = wide.mean(1), wide.var(1, unbiased=False)
    unbiased = variance * count / (count - 1)
    moved = [MOMENTUM * new + (1 - MOMENTUM) * old.double() for new, old in zip((mean, unbiased), running, strict=True)]
    return [mean, (variance + EPSILON).rsqrt(), *moved]


def _gradients(dz: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, absolute: bool = False) -> list[Tensor]:
    """Sums over the rows: of dz * xhat and dz, or of their absolute values."""
    normalized = (_by_channel(x.double()) - mean.double()[:, None]) * invstd.double()[:, None]
    wide = _by_channel(dz.double())
    addends = [wide * normalized, wide]
    return [(each.abs() if absolute else each).sum(1) for each in addends]


def _errors(results: list[tuple[Tensor, ...]], inputs: list[list[Tensor]]) -> dict[str, float]:
    """Of each reduction, over what the sizes of its addends make likely: beside float64, from the stored tensor."""
    errors: dict[str, float] = {}
    for name, (y, *own), given in zip(("plain", "bias", "added"), results[:3], inputs[:3], strict=True):
        wanted = _statistics(y, given[-2:])
        deviation = _by_channel(y.double()).std(1, unbiased=False)
        sizes = [deviation + wanted[0].abs(), wanted[1], *(1 + each.abs() for each in wanted[2:])]
        for what, a, b, size in zip(("mean", "invstd", "running", "variance"), own, wanted, sizes, strict=True):
            errors[f"{name} {what}"] = float(((a.double() - b) / size).abs().max())
    for name, (dz, dx, *own), given in zip(("program", "alone"), results[3:], inputs[3:], strict=True):
        x, mean, invstd = given[-3:]
        wanted = _gradients(dz, x, mean, invstd)
        sizes = [each + 1e-6 for each in _gradients(dz, x, mean, invstd, absolute=True)]
        for what, a, b, size in zip(("weight", "bias"), own, wanted, sizes, strict=True):
            errors[f"{name} {what}"] = float(((a.double() - b) / size).abs().max())
        assert bool(dx.isfinite().all()), name
    return errors


@pytest.mark.parametrize("name", CASES)
def test_sums_beside_float64(
    name: str,
    inputs: list[list[list[Tensor]]],
    found: list[list[tuple[Tensor, ...]]],
    apart: list[list[tuple[Tensor, ...]]],
) -> None:
    number = list(CASES).index(name)
    errors, others = (_errors(each[number], inputs[number]) for each in (found, apart))
    wrong = {what: (error, others[what]) for what, error in errors.items() if not error <= 2e-6 + 2 * others[what]}
    assert not wrong, f"error in the store, error apart: {wrong}; all: {errors}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored_stays(
    name: str, found: list[list[tuple[Tensor, ...]]], apart: list[list[tuple[Tensor, ...]]]
) -> None:
    """But for a tile's order of additions, which differs with its shape."""
    number = list(CASES).index(name)
    for function, a, b in zip(FUNCTIONS, found[number], apart[number], strict=True):
        scale = float(b[0].float().abs().max())
        torch.testing.assert_close(a[0].float(), b[0].float(), rtol=2**-6, atol=2**-8 * scale, msg=str(function))


def _moved(x: Tensor) -> Tensor:
    """The same values, one element behind a 16-byte boundary, in the same order."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    place = torch.as_strided(room, x.shape, x.stride(), 1)
    place.copy_(x)
    return place


def test_tensors_off_16_bytes(inputs: list[list[list[Tensor]]], found: list[list[tuple[Tensor, ...]]]) -> None:
    """Other kernels run then."""
    moved = [[[_moved(x) for x in each] for each in of_case] for of_case in inputs]
    results = _compiled(True)(moved)
    for name, result, given in zip(CASES, results, inputs, strict=True):
        errors = _errors(result, given)
        assert max(errors.values()) < 1e-5, (name, errors)


class _Block(nn.Module):
    """A bottleneck, and a shortcut with a convolution."""

    def __init__(self, c: int, inner: int, k: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, k, 1, bias=False), nn.BatchNorm2d(k),
        )  # fmt: skip
        self.short = nn.Identity()
        if c != k or stride != 1:
            self.short = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def _network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [_Block(64, 64, 256, 1), _Block(256, 64, 256, 1), _Block(256, 128, 512, 2), _Block(512, 128, 512, 1)]
    return nn.Sequential(*blocks).cuda().to(memory_format=torch.channels_last)


def _gradients_of(fused: bool, autocast: bool = True) -> dict[str, Tensor]:
    """Of a step, and the running statistics behind it; neither fused nor with autocast: eager float64."""
    network = _network()
    x = torch.randn(8, 64, 28, 28, generator=torch.Generator().manual_seed(1)).cuda()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(8, 512, 14, 14, generator=torch.Generator().manual_seed(2)).cuda()
    if not autocast:
        network, x, weight = network.double(), x.detach().double().requires_grad_(), weight.double()
        (network(x) * weight).sum().backward()
    else:
        torch.compiler.reset()
        patch = contextlib.nullcontext() if fused else _unfused()
        with patch, torch.autocast("cuda", torch.bfloat16):
            y = torch.compile(network, backend="max", options={"fallback": "error"})(x)
            (y.float() * weight).sum().backward()
    named = {name: each.grad for name, each in network.named_parameters()}
    return {**named, **dict(network.named_buffers()), "x": x.grad}


def test_a_residual_network_trains_alike() -> None:
    wanted, found, apart = _gradients_of(False, False), _gradients_of(True), _gradients_of(False)
    wrong = {}
    for name, value in wanted.items():
        if not value.is_floating_point():
            assert torch.equal(found[name], value)
            continue
        error, other = (float((each[name].double() - value).norm() / value.norm()) for each in (found, apart))
        if not error <= 1.2 * other + 1e-3:
            wrong[name] = (error, other)
    assert not wrong, f"relative error in the store, apart: {wrong}"


def test_results_over_operands_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are added up, also where the sum takes the place of what the kernel's store reads."""

    def gradients() -> tuple[int, list[Tensor]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Branches(128).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(8, 16, 57, 63, device="cuda").to(memory_format=torch.channels_last)
        with backend.recorded_graphs() as graphs, torch.autocast("cuda", dtype=torch.bfloat16):
            result = torch.compile(model, backend="max", options={"fallback": "error"})(x)
        result.float().square().mean().backward()
        memory = graphs[-1].executables[0].listing
        assert memory is not None
        return memory.workspace, [weight.grad for weight in model.parameters() if weight.grad is not None]

    less, over = gradients()
    monkeypatch.setattr(listing._Lister, "_may_replace", lambda *_: False)
    # Another graph in the cache.
    with torch.compiler.config.patch(cache_key_tag="apart"):
        more, apart = gradients()
    assert less < more and len(over) == len(apart) > 0 and all(map(torch.equal, over, apart))
