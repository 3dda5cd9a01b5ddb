"""Softmax and log-softmax, forward and backward."""

from __future__ import annotations

import math

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, parametrize, randn, recipe
from tests.lowering.test_pointwise import channels_last, values

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan

SOFTMAX, LOG_SOFTMAX = (torch.softmax,), (torch.log_softmax,)
BOTH = (*SOFTMAX, *LOG_SOFTMAX)
#: The two differ in their last step alone: memory orders and dtypes are posed to one of them.
CASES = [
    Case(
        f"{function.__name__}_{name}",
        gradients(lambda x, function=function, dim=dim: function(x, dim)),
        recipe(maker),
        slack=2,
    )
    for functions, name, dim, maker in (
        (BOTH, "last", -1, randn(5, 9)),
        (BOTH, "channels_last", 1, channels_last(2, 3, 4, 5)),
        (BOTH, "bf16", 1, randn(5, 9, dtype=BF16)),
        (BOTH, "huge", 0, values(1e4, 1e4 - 3, -1e4, 3e4)),
        (SOFTMAX, "first", 0, randn(5, 9)),
        (SOFTMAX, "f64", 1, randn(5, 9, dtype=F64)),
        (SOFTMAX, "zero_dim", 0, randn(())),
        (LOG_SOFTMAX, "channels_last_width", 3, channels_last(2, 3, 4, 5)),
        (LOG_SOFTMAX, "f16", 0, randn(5, 9, dtype=F16)),
    )
    for function in functions
] + [
    Case(
        "specials",
        lambda x: (x.softmax(1), x.log_softmax(1)),
        recipe(lambda g: torch.tensor([[1.0, -INF, 2.0], [-INF, -INF, -INF], [NAN, 1.0, 2.0], [INF, 1.0, 2.0]])),
    ),
    Case("empty", lambda x: (x.softmax(1), x.log_softmax(0)), recipe(randn(0, 3)), exact=True),
    Case(
        "wider_result",
        lambda x: (torch.softmax(x, 1, dtype=torch.float32), torch.log_softmax(x, 1, dtype=torch.float32)),
        recipe(randn(5, 9, dtype=BF16)),
    ),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "softmax_first", "softmax_zero_dim", "softmax_huge", "log_softmax_bf16", "log_softmax_channels_last_width",
    "softmax_f64", "log_softmax_f16",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="softmax")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
