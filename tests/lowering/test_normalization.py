"""Batch, group, layer and instance normalization."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, parametrize, randn, recipe

F = torch.nn.functional
aten = torch.ops.aten

Maker = Callable[[torch.Generator], torch.Tensor]


def spread(*shape: int, mean: float = 0.0, apart: float = 1.0, dtype: torch.dtype = torch.float32) -> Maker:
    """Normally distributed about a mean of its own for each channel, channels-last where there is such a format."""

    def make(generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator)
        x = x + mean + apart * torch.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2))
        x = x.to(dtype)
        if x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x.contiguous(memory_format=torch.channels_last_3d) if x.dim() == 5 else x

    return make


def planar(*shape: int) -> Maker:
    """The same, contiguous."""
    return lambda generator: spread(*shape)(generator).contiguous()


def backwards(*shape: int) -> Maker:
    """The same, with the first dimension innermost in memory."""
    turned = range(len(shape))[::-1]
    return lambda generator: planar(*shape)(generator).permute(*turned).contiguous().permute(*turned)


def operands(*shape: int, mean: float = 0.0, dtype: torch.dtype = torch.float32) -> list[Maker]:
    """An input, and a gradient about zero: the rounding of the input's mean, times the sum of the gradient, is an error
    that PyTorch's formula has as well."""
    return [spread(*shape, mean=mean, dtype=dtype), spread(*shape, apart=0, dtype=dtype)]


def variance(channels: int, dtype: torch.dtype = torch.float32) -> Maker:
    """Positive running variances."""
    return lambda generator: (torch.rand(channels, generator=generator) + 0.5).to(dtype)


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> list[Maker]:
    """Weight, bias, running mean and running variance."""
    return [*[randn(channels, dtype=dtype)] * 3, variance(channels, dtype)]


def training(momentum: float = 0.1, eps: float = 1e-5) -> Callable[..., object]:
    """A step's forward and backward: result, new running statistics, three gradients.

    The saved statistics are not compared: for a narrow float on the CPU PyTorch promises them in another dtype
    than it returns.
    """

    def both(
        x: torch.Tensor,
        grad: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
    ) -> list[torch.Tensor]:
        forward = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, momentum, eps)
        saved = forward[1:3]
        backward = aten.native_batch_norm_backward(grad, x, weight, mean, var, *saved, True, eps, [True, True, True])
        return [forward[0], *forward[3:], *backward]

    return both


evaluation = gradients(lambda x, weight, bias, mean, var: F.batch_norm(x, mean, var, weight, bias, False, 0.1, 1e-5), 3)


def affine_only(mask: list[bool]) -> Callable[..., object]:
    """Gradients that only some are asked of."""

    def backward(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> list[torch.Tensor]:
        saved = [x.double().mean((0, 2, 3)).to(mean.dtype), torch.ones_like(var)]
        results = aten.native_batch_norm_backward(grad, x, weight, mean, var, *saved, mask[0], 1e-5, mask)
        return [result for result, wanted in zip(results, mask, strict=True) if wanted]

    return backward


BATCH_NORM = [
    Case("train", training(), recipe(*operands(4, 32, 5, 6), *parameters(32)), length=120),
    Case("train_far_mean", training(), recipe(*operands(4, 32, 5, 6, mean=3000), *parameters(32)), length=120),
    Case("train_few_channels", training(0.3, 1e-3), recipe(*operands(5, 3, 7, 9), *parameters(3)), length=315),
    Case("train_one_channel", training(), recipe(*[planar(3, 1, 21, 19)] * 2, *parameters(1)), length=1197),
    Case("train_odd_channels", training(), recipe(*operands(2, 37, 9, 5), *parameters(37)), length=90),
    Case("train_many_rows", training(), recipe(*operands(6, 16, 64, 65), *parameters(16)), length=24960),
    Case("train_two_rows", training(), recipe(*operands(2, 20, 1, 1), *parameters(20)), length=2, slack=8),
    Case("train_1d", training(), recipe(*[randn(50, 24)] * 2, *parameters(24)), length=50),
    Case("train_1d_length", training(), recipe(*[randn(5, 24, 11)] * 2, *parameters(24)), length=55),
    Case("train_3d", training(), recipe(*operands(2, 8, 3, 4, 5), *parameters(8)), length=120),
    Case("train_bf16", training(), recipe(*operands(4, 24, 5, 6, dtype=torch.bfloat16), *parameters(24)), length=120),
    Case("train_f16", training(), recipe(*operands(4, 24, 5, 6, dtype=torch.float16), *parameters(24)), length=120),
    Case(
        "train_f64",
        training(),
        recipe(*operands(4, 12, 5, 6, dtype=torch.float64), *parameters(12, torch.float64)),
        length=120,
    ),
    Case("eval", evaluation, recipe(spread(3, 20, 4, 5), *parameters(20)), length=60),
    Case(
        "eval_bf16",
        evaluation,
        recipe(spread(3, 20, 4, 5, dtype=torch.bfloat16), *parameters(20)),
        length=60,
    ),
    Case(
        "weight_gradient_alone",
        affine_only([False, True, True]),
        recipe(*reversed(operands(3, 20, 4, 5)), *parameters(20)[1:]),
        length=60,
    ),
    Case(
        "no_affine",
        gradients(lambda x, mean, var: F.batch_norm(x, mean, var, None, None, False), 1),
        recipe(spread(3, 20, 4, 5), randn(20), variance(20)),
    ),
    Case(
        "no_running_statistics",
        gradients(lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True)),
        recipe(spread(3, 20, 4, 5), randn(20), randn(20)),
        length=60,
        slack=4,
    ),
    Case(
        "instance_norm",
        gradients(lambda x, weight, bias: F.instance_norm(x, None, None, weight, bias)),
        recipe(spread(3, 6, 7, 5), randn(6), randn(6)),
        length=105,
        slack=4,
    ),
]

OTHERS = [
    Case(
        "layer_norm",
        gradients(lambda x, weight, bias: F.layer_norm(x, (7,), weight, bias)),
        recipe(randn(4, 5, 7), randn(7), randn(7)),
        length=20,
        slack=4,
    ),
    Case(
        "layer_norm_channels_last",
        gradients(lambda x, weight, bias: F.layer_norm(x, (6, 4, 5), weight, bias)),
        recipe(spread(2, 6, 4, 5), randn(6, 4, 5), randn(6, 4, 5)),
        length=120,
        slack=4,
    ),
    Case("layer_norm_bf16", lambda x: F.layer_norm(x, (9,)), recipe(randn(4, 9, dtype=torch.bfloat16))),
    Case(
        "group_norm",
        gradients(lambda x, weight, bias: F.group_norm(x, 3, weight, bias)),
        recipe(spread(2, 6, 4, 5), randn(6), randn(6)),
        length=60,
        slack=4,
    ),
    Case("group_norm_planar", lambda x: F.group_norm(x, 2), recipe(planar(2, 6, 4, 5)), length=60),
    Case(
        "group_norm_backwards",
        gradients(lambda x, weight, bias: F.group_norm(x, 2, weight, bias)),
        recipe(backwards(4, 6, 5), randn(6), randn(6)),
        length=15,
        slack=4,
    ),
    Case(
        "batch_norm_of_filters",
        gradients(lambda w, gain, bias: F.batch_norm(w.reshape(1, 6, -1), None, None, gain, bias, True, 0.0)),
        recipe(spread(6, 4, 3, 2), randn(6), randn(6)),
        length=24,
        slack=4,
    ),
    Case(
        "batch_norm_of_one_image",
        gradients(lambda x: F.batch_norm(x, None, None, training=True)),
        recipe(planar(1, 6, 4, 5)),
        length=20,
        slack=4,
    ),
    Case("group_norm_rows", lambda x, w: F.group_norm(x, 2, w), recipe(randn(3, 8), randn(8)), length=4),
]

CASES = [*BATCH_NORM, *OTHERS]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "train_few_channels", "train_one_channel", "train_1d_length", "train_f16", "eval_bf16", "group_norm_planar",
    "group_norm_rows", "batch_norm_of_one_image",
    "train_3d", "layer_norm_bf16", "train_1d", "layer_norm_channels_last",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="normalization")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
