"""Losses, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.harness import Batch, Case, batch_fixture, core, gradients, parametrize, randn, recipe
from tests.lowering.test_pointwise import channels_last

aten = torch.ops.aten
BF16, F16, F64, I64 = torch.bfloat16, torch.float16, torch.float64, torch.int64

Maker = Callable[[torch.Generator], torch.Tensor]


def classes(*shape: int, ignored: int | None = None) -> Maker:
    """A recipe for targets among 4 classes, some of them ``ignored``."""

    def make(generator: torch.Generator) -> torch.Tensor:
        target = torch.randint(0, 4, shape, generator=generator)
        if ignored is not None:
            target.view(-1)[::3] = ignored
        return target

    return make


def unit_interval(*shape: int) -> Maker:
    """A recipe for probabilities."""
    return lambda generator: torch.rand(*shape, generator=generator)


def positive(*shape: int, dtype: torch.dtype = torch.float32) -> Maker:
    """A recipe for class weights, far from zero."""
    return lambda generator: (0.5 + torch.rand(*shape, generator=generator)).to(dtype)


def cross_entropy(**options: object) -> Callable[..., object]:
    """Cross entropy with the gradient of its scores alone."""
    return gradients(lambda x, *rest: F.cross_entropy(x, *rest, **options), 1)


SEVERAL = [
    (f"{name}_{reduction}", function, reduction)
    for name, function in (
        ("mse", F.mse_loss),
        ("l1", F.l1_loss),
        ("smooth_l1", F.smooth_l1_loss),
        ("huber", F.huber_loss),
        ("bce_with_logits", F.binary_cross_entropy_with_logits),
    )
    for reduction in ("mean", "sum", "none")
    # One decomposition reduces all of them.
    if reduction == "mean" or name == "mse"
]

CASES = [
    *(
        Case(f"cross_entropy_{reduction}", cross_entropy(reduction=reduction), recipe(randn(6, 4), classes(6)), slack=2)
        for reduction in ("mean", "sum", "none")
    ),
    *(
        Case(
            f"cross_entropy_ignored_{reduction}",
            cross_entropy(reduction=reduction, ignore_index=-100),
            recipe(randn(6, 4), classes(6, ignored=-100), positive(4)),
            slack=2,
        )
        for reduction in ("mean", "none")
    ),
    Case("cross_entropy_ignores_a_class", cross_entropy(ignore_index=2), recipe(randn(6, 4), classes(6, ignored=2))),
    Case("cross_entropy_all_ignored", cross_entropy(), recipe(randn(1, 4), classes(1, ignored=-100))),
    Case("cross_entropy_one_sample", cross_entropy(), recipe(randn(4), classes())),
    Case("cross_entropy_smoothed", cross_entropy(label_smoothing=0.1), recipe(randn(6, 4), classes(6)), slack=2),
    Case(
        "cross_entropy_smoothed_weighted",
        cross_entropy(label_smoothing=0.1, ignore_index=-100),
        recipe(randn(6, 4), classes(6, ignored=-100), positive(4)),
        slack=2,
    ),
    Case("cross_entropy_2d", cross_entropy(), recipe(randn(2, 4, 3, 5), classes(2, 3, 5)), slack=2),
    Case(
        "cross_entropy_2d_channels_last",
        cross_entropy(reduction="none"),
        recipe(channels_last(2, 4, 3, 5), classes(2, 3, 5, ignored=-100), positive(4)),
        slack=2,
    ),
    Case("cross_entropy_3d", cross_entropy(), recipe(randn(2, 4, 2, 3, 2), classes(2, 2, 3, 2)), slack=2),
    Case("cross_entropy_bf16", cross_entropy(), recipe(randn(6, 4, dtype=BF16), classes(6))),
    Case("cross_entropy_f16", cross_entropy(), recipe(randn(6, 4, dtype=F16), classes(6), positive(4, dtype=F16))),
    Case("cross_entropy_f64", cross_entropy(), recipe(randn(6, 4, dtype=F64), classes(6)), slack=4),
    Case(
        "cross_entropy_probabilities",
        cross_entropy(),
        recipe(randn(6, 4), lambda g: torch.rand(6, 4, generator=g).softmax(1)),
        slack=2,
    ),
    Case(
        "nll_infinite_elsewhere",
        lambda x, t: F.nll_loss(x, t),
        recipe(lambda g: torch.tensor([[-1.0, -float("inf")], [-2.0, -3.0]]), lambda g: torch.tensor([0, 1])),
    ),
    *(
        Case(
            name,
            gradients(lambda x, t, f=function, r=reduction: f(x, t, reduction=r), 1),
            recipe(randn(5, 3), unit_interval(5, 3)),
            slack=2,
        )
        for name, function, reduction in SEVERAL
    ),
    Case(
        "bce",
        gradients(lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), 1),
        recipe(randn(5, 3), unit_interval(5, 3)),
        slack=4,
    ),
    # Far from zero, where a sigmoid less one has no digits left.
    Case(
        "soft_margin_far",
        gradients(lambda x: F.soft_margin_loss(x, torch.ones_like(x))),
        lambda generator: [8 + 4 * torch.randn(5, 3, generator=generator).abs()],
        slack=2,
    ),
    Case("mse_bf16", gradients(F.mse_loss), recipe(randn(5, 3, dtype=BF16), randn(5, 3, dtype=BF16))),
]


#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "cross_entropy_sum", "cross_entropy_ignored_none", "cross_entropy_ignores_a_class",
    "cross_entropy_smoothed", "cross_entropy_2d", "cross_entropy_3d", "cross_entropy_bf16", "cross_entropy_f64",
    "mse_sum", "mse_bf16",
    "cross_entropy_f16", "cross_entropy_one_sample",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="loss")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
