"""Comparisons, predicates, logical and bitwise ops."""

from __future__ import annotations

import torch

from tests.harness import Batch, Case, batch_fixture, integers, parametrize, randn, recipe
from tests.lowering.test_pointwise import SPECIAL_A, SPECIAL_B, channels_last, flags, values

aten = torch.ops.aten
BF16, I64 = torch.bfloat16, torch.int64
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)

CASES = [
    Case("nan", lambda x, y: [f(x, y) for f in COMPARISONS], recipe(SPECIAL_A, SPECIAL_B), exact=True),
    Case("itself", lambda x: (x == x, x != x, x >= x, x < x), recipe(SPECIAL_A), exact=True),
    Case("number", lambda x: [f(x, 1) for f in COMPARISONS], recipe(SPECIAL_A), exact=True),
    Case(
        "integers",
        lambda x, y: [f(x, y) for f in COMPARISONS],
        recipe(integers(30, dtype=I64), integers(30, dtype=torch.int32)),
        exact=True,
    ),
    Case("bools", lambda x, y: [f(x, y) for f in COMPARISONS], recipe(flags(9), flags(9)), exact=True),
    Case("integer_fraction", lambda x: (x > 1.5, x == 1.5), recipe(integers(9, dtype=I64)), exact=True),
    Case("mixed", torch.gt, recipe(integers(3, 4, dtype=I64), randn(4)), exact=True),
    # 0.1 is rounded to bfloat16 before it is compared.
    Case("rounded_number", lambda x: x == 0.1, recipe(values(0.1, 0.2, dtype=BF16)), exact=True),
    Case("broadcast", torch.le, recipe(randn(3, 1), randn(4)), exact=True),
    Case("empty", torch.le, recipe(randn(0, 4), randn(4)), exact=True),
    Case("channels_last", lambda x: x > 0, recipe(channels_last(2, 3, 4, 5)), exact=True, strides=True),
    Case(
        "predicates",
        lambda x: (torch.isnan(x), torch.isinf(x), torch.isfinite(x), torch.signbit(torch.nan_to_num(x))),
        recipe(SPECIAL_A),
        exact=True,
    ),
    Case("predicates_integers", lambda x: (x.isnan(), x.isinf()), recipe(integers(5, dtype=I64)), exact=True),
    Case(
        "logical",
        lambda x, y: (
            torch.logical_and(x, y),
            torch.logical_or(x, y),
            torch.logical_xor(x, y),
            torch.logical_not(x),
        ),
        recipe(values(0.0, 1.0, float("nan"), 0.0), integers(4, low=0, high=2, dtype=I64)),
        exact=True,
    ),
    Case("bitwise_bools", lambda x, y: (x & y, x | y, x ^ y, ~x), recipe(flags(9), flags(9)), exact=True),
    Case(
        "bitwise_not",
        lambda x, y: (~x, ~y),
        recipe(integers(9, dtype=I64), integers(9, low=0, dtype=torch.uint8)),
        exact=True,
    ),
]

batch = batch_fixture(CASES, name="comparison")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
