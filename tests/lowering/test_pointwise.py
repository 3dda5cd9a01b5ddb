"""Arithmetic: values, type promotion, NaN, integer division, broadcasting, memory orders."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe

aten = torch.ops.aten
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
I64, I32, I8, U8 = torch.int64, torch.int32, torch.int8, torch.uint8
NAN, INF = math.nan, math.inf

Maker = Callable[[torch.Generator], torch.Tensor]


def values(*numbers: float, dtype: torch.dtype = torch.float32) -> Maker:
    """A recipe for these very numbers."""
    return lambda generator: torch.tensor(numbers, dtype=dtype)


def channels_last(*shape: int) -> Maker:
    """A recipe for a channels-last tensor."""
    return lambda generator: torch.randn(*shape, generator=generator).to(memory_format=torch.channels_last)


def flags(*shape: int) -> Maker:
    """A recipe for bools."""
    return lambda generator: torch.randint(0, 2, shape, generator=generator).bool()


def nonzero(*shape: int, dtype: torch.dtype) -> Maker:
    """A recipe for whole numbers that may divide."""
    return lambda generator: (torch.randint(1, 5, shape, generator=generator) * (1 if dtype == U8 else -1)).to(dtype)


DIVIDENDS = values(7, -7, 7, -7, 0, 5, -8, 3, dtype=I64)
DIVISORS = values(2, 2, -2, -2, 3, -1, 3, 1, dtype=I64)
#: Quotients that rounding, signs and infinities make hard.
HARD_A = values(5.5, -5.5, 5.5, -5.5, 1.0, -1.0, 5.0, -5.0, 0.0, 6.0, INF, 3.0, NAN, 1.0, 0.3)
HARD_B = values(2.0, 2.0, -2.0, -2.0, 0.1, 0.1, INF, INF, 3.0, -3.0, 2.0, 0.0, 1.0, NAN, 0.1)
SPECIAL_A = values(NAN, 1.0, NAN, INF, -INF, 0.0, -2.0, 3.0)
SPECIAL_B = values(1.0, NAN, NAN, 1.0, 2.0, -1.0, -3.0, 3.0)
POW_BASES = values(2.0, -2.0, -2.0, 0.0, 0.0, 1.0, NAN, -1.0, 0.5, 3.3, -0.0, INF, -INF)
POW_EXPONENTS = values(0.5, 3.0, 0.5, 2.0, -1.0, NAN, 0.0, INF, -2.0, 7.7, 3.0, -1.0, 3.0)

CASES = [
    # Sums and products: dtypes, alpha, broadcasting, memory orders.
    Case("add_broadcast", lambda x, y: x + y, recipe(randn(3, 1, 5), randn(4, 1))),
    Case("add_alpha", lambda x, y: torch.add(x, y, alpha=0.5), recipe(randn(3, 4), randn(3, 4))),
    Case("add_zero_dim", lambda x, y: x + y, recipe(randn(3, 4), randn(()))),
    Case("add_empty", lambda x, y: x + y, recipe(randn(0, 4), randn(4))),
    Case(
        "add_channels_last",
        lambda x, y, b: x + y * b,
        recipe(channels_last(2, 3, 4, 5), randn(2, 3, 4, 5), randn(3, 1, 1)),
        strides=True,
    ),
    Case("add_transposed", lambda x, y: x.mT + y, recipe(randn(5, 4), randn(4, 5)), strides=True),
    Case("add_bf16", lambda x, y: x + y, recipe(randn(3, 4, dtype=BF16), randn(3, 4, dtype=BF16))),
    Case("add_f16_number", lambda x: x + 0.3, recipe(randn(3, 4, dtype=F16))),
    Case("add_f64", lambda x, y: x + y * 0.1, recipe(randn(3, 4, dtype=F64), randn(3, 4, dtype=F64))),
    Case("add_bools", lambda x, y: (x + y, x * y), recipe(flags(9), flags(9)), exact=True),
    Case("add_mixed", lambda x, y: x + y, recipe(randn(3, 4, dtype=BF16), integers(3, 4, dtype=I64))),
    Case("add_mixed_floats", lambda x, y: x + y, recipe(randn(3, 4, dtype=BF16), randn(3, 4))),
    Case("zero_dim_does_not_widen", lambda x, y: x + y, recipe(randn(3, 4, dtype=BF16), randn((), dtype=F64))),
    Case(
        "integers",
        lambda x, y: (x + 2 * y, x - y, x * y, x + 1.5),
        recipe(integers(3, 4, dtype=I32), integers(3, 4, dtype=I32)),
        exact=True,
    ),
    Case("uint8_wraps", lambda x: (x - 3, x * 100), recipe(integers(9, low=0, dtype=U8)), exact=True),
    Case("rsub", lambda x: 1 - x, recipe(randn(3, 4))),
    Case("sub_mul_backward", gradients(lambda x, y: (x - 2 * y) * y), recipe(randn(3, 4), randn(4))),
    # Quotients.
    Case("div", lambda x, y: x / y, recipe(randn(3, 4), randn(4))),
    Case("div_bf16", lambda x: x / 3, recipe(randn(3, 4, dtype=BF16))),
    Case("div_integers", lambda x, y: x / y, recipe(DIVIDENDS, DIVISORS)),
    Case(
        "div_rounded_integers",
        lambda x, y: (
            aten.div(x, y, rounding_mode="floor"),
            aten.div(x, y, rounding_mode="trunc"),
            x // 3,
            aten.div(x, -1, rounding_mode="trunc"),
        ),
        recipe(DIVIDENDS, DIVISORS),
        exact=True,
    ),
    Case("div_floor_uint8", lambda x, y: x // y, recipe(integers(9, low=0, dtype=U8), nonzero(9, dtype=U8))),
    Case("div_smallest", lambda x: x // -1, recipe(values(-128, 127, dtype=I8)), exact=True),
    Case(
        "div_rounded",
        lambda x, y: (aten.div(x, y, rounding_mode="floor"), aten.div(x, y, rounding_mode="trunc")),
        recipe(HARD_A, HARD_B),
        exact=True,
    ),
    Case("remainder", lambda x, y: (x % y, torch.fmod(x, y)), recipe(HARD_A, HARD_B), exact=True),
    Case("remainder_f16", lambda x: (x % 0.5, torch.fmod(x, 3)), recipe(randn(3, 4, dtype=F16))),
    Case(
        "remainder_integers",
        lambda x, y: (x % y, torch.fmod(x, y), x % 3),
        recipe(DIVIDENDS, DIVISORS),
        exact=True,
    ),
    Case("div_backward", gradients(lambda x, y: x / y), recipe(randn(3, 4), lambda g: 1 + torch.rand(4))),
    # Powers.
    Case("pow_whole", lambda x: (x**2, x**3, x**0, x**-1, x**7), recipe(randn(3, 4)), slack=4),
    Case("pow_half", lambda x: (x**0.5, x**-0.5, x**1.7), recipe(lambda g: 0.1 + torch.rand(12))),
    Case("pow_integers", lambda x: (x**2, x**5), recipe(integers(12, dtype=I64)), exact=True),
    Case(
        "pow_integer_tensors",
        lambda x, y: (x**y, 3 ** (y + 40), x.int() ** y.int(), x.abs().byte() ** y.byte()),
        recipe(integers(40, dtype=I64), integers(40, dtype=I64)),
        exact=True,
    ),
    Case("pow_tensors", lambda x, y: x**y, recipe(POW_BASES, POW_EXPONENTS)),
    Case("pow_of_number", lambda x: (2**x, 0.7**x), recipe(randn(3, 4))),
    Case("pow_bf16", lambda x: x**2, recipe(randn(3, 4, dtype=BF16))),
    Case("pow_f64", lambda x: x.abs() ** 1.3, recipe(randn(3, 4, dtype=F64))),
    Case("pow_backward", gradients(lambda x: x**3), recipe(randn(3, 4)), slack=4),
    # Extrema and selection.
    Case(
        "extrema_nan",
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y)),
        recipe(SPECIAL_A, SPECIAL_B),
        exact=True,
    ),
    Case(
        "extrema_integers",
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)),
        recipe(integers(9, dtype=I32), integers(9, dtype=I64)),
        exact=True,
    ),
    Case("extrema_backward", gradients(torch.maximum), recipe(randn(3, 4), randn(3, 4)), exact=True),
    Case(
        "clamp",
        lambda x: (x.clamp(-1, 1), x.clamp_min(0.5), x.clamp(max=2), torch.clamp(x, 2, 1)),
        recipe(SPECIAL_A),
        exact=True,
    ),
    Case("clamp_integers", lambda x: (x.clamp(-1, 2), x.clamp(min=0.5)), recipe(integers(9, dtype=I64))),
    Case("clamp_f16", lambda x: x.clamp(-0.3, 0.7), recipe(randn(3, 4, dtype=F16)), exact=True),
    Case("clamp_tensors", torch.clamp, recipe(randn(3, 4), randn(4), randn(3, 1)), exact=True),
    Case(
        "where",
        lambda c, x, y: (torch.where(c, x, y), torch.where(c, x, 2.0), x.masked_fill(c, -INF)),
        recipe(flags(4), randn(3, 4), randn(3, 1)),
        exact=True,
    ),
    Case(
        "where_mixed",
        lambda c, x, y: torch.where(c, x, y),
        recipe(flags(2, 3), integers(2, 3, dtype=I64), randn(3, dtype=BF16)),
        exact=True,
    ),
    Case(
        "where_backward",
        gradients(lambda x, y: torch.where(x > 0, x * y, y)),
        recipe(randn(3, 4), randn(4)),
    ),
    # The rest.
    Case("copysign", torch.copysign, recipe(randn(4), values(1.0, -1.0, 0.0, -0.0)), exact=True),
    Case("hypot", torch.hypot, recipe(randn(3, 4), randn(4))),
    Case(
        "atan2",
        torch.atan2,
        recipe(values(0.0, -0.0, 0.0, 1.0, -1.0, 2.0, -3.0, 1.0), values(1.0, 1.0, -1.0, 0.0, 0.0, 5.0, -2.0, INF)),
    ),
    Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.3), recipe(*[randn(3, 4)] * 3)),
    Case("addcdiv", lambda x, y: torch.addcdiv(x, y, x.abs() + 1, value=0.3), recipe(randn(4), randn(4))),
    Case(
        "addcmul_mixed",
        lambda x, y: (torch.addcmul(x, x, y, value=0.3), torch.addcmul(y, x, x), torch.addcdiv(x, y, x.abs() + 1)),
        recipe(randn(3, 4, dtype=BF16), randn(3, 4)),
    ),
    Case("lerp", lambda x, y, w: (torch.lerp(x, y, 0.3), torch.lerp(x, y, w)), recipe(*[randn(3, 4)] * 3)),
    Case("lerp_bf16", lambda x, y: torch.lerp(x, y, 0.9), recipe(*[randn(3, 4, dtype=BF16)] * 2)),
    Case("nan_to_num", lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0), recipe(SPECIAL_A), exact=True),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "add_bf16", "add_f16_number", "add_f64", "add_mixed_floats", "div_bf16", "remainder_f16", "pow_bf16",
    "pow_f64", "clamp_f16", "lerp_bf16", "extrema_integers",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="pointwise")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


def test_integer_division_by_zero_is_left_to_pytorch() -> None:
    refused = Case("by_zero", lambda x: aten.div(x, 0, rounding_mode="floor"), recipe(integers(3, dtype=I64)))
    outcome = Batch([refused]).outcomes["by_zero"]
    assert outcome.refusal is not None
    assert "division by zero" in outcome.refusal
