"""Functions of one tensor: accuracy against float64, special values, dtypes, activations and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.harness import Batch, Case, batch_fixture, gradients, integers, parametrize, randn, recipe

aten = torch.ops.aten
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
NAN, INF = math.nan, math.inf

Maker = Callable[[torch.Generator], torch.Tensor]


def uniform(low: float, high: float, dtype: torch.dtype = torch.float32) -> Maker:
    """A recipe for 60 numbers between ``low`` and ``high``."""
    return lambda generator: (low + (high - low) * torch.rand(60, generator=generator, dtype=F64)).to(dtype)


def special(dtype: torch.dtype = torch.float32) -> Maker:
    """A recipe for the numbers that go wrong most easily."""
    numbers = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 200.0, -200.0]
    return lambda generator: torch.tensor(numbers, dtype=dtype)


def both(low: float, high: float) -> Maker:
    """A recipe for numbers between ``low`` and ``high``, then the special ones."""
    return lambda generator: torch.cat([uniform(low, high)(generator), special()(generator)])


#: Function, and where its interesting arguments lie.
FUNCTIONS: dict[Callable[..., torch.Tensor], tuple[float, float]] = {
    torch.exp: (-20, 5),
    torch.exp2: (-20, 5),
    torch.expm1: (-3, 3),
    torch.log: (0.01, 9),
    torch.log2: (0.01, 9),
    torch.log10: (0.01, 9),
    torch.log1p: (-0.9, 3),
    torch.sqrt: (0, 9),
    torch.rsqrt: (0.01, 9),
    torch.reciprocal: (0.1, 9),
    torch.sin: (-9, 9),
    torch.cos: (-9, 9),
    torch.tan: (-1.4, 1.4),
    torch.asin: (-1, 1),
    torch.acos: (-1, 1),
    torch.atan: (-9, 9),
    torch.sinh: (-5, 5),
    torch.cosh: (-5, 5),
    torch.tanh: (-3, 3),
    torch.asinh: (-9, 9),
    torch.acosh: (1, 9),
    torch.atanh: (-0.99, 0.99),
    torch.erf: (-3, 3),
    torch.sigmoid: (-9, 9),
}
ROUNDING = (torch.floor, torch.ceil, torch.round, torch.trunc, torch.frac, torch.sign, torch.abs, torch.neg)
#: Rounded results at specials: NaN and infinities must come out as in PyTorch, the rest to a few digits.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "logsigmoid": F.logsigmoid,
}

CASES = [
    *(Case(f.__name__, f, recipe(both(*span)), slack=2) for f, span in FUNCTIONS.items()),
    *(
        Case(f"{f.__name__}_f64", f, recipe(uniform(*FUNCTIONS[f], dtype=F64)), slack=4)
        for f in (torch.exp, torch.log, torch.tanh, torch.erf, torch.sigmoid, torch.sqrt, torch.atan)
    ),
    *(
        Case(f"{f.__name__}_bf16", f, recipe(uniform(*FUNCTIONS[f], dtype=BF16)))
        for f in (torch.exp, torch.rsqrt, torch.tanh, torch.sin)
    ),
    Case("exp_f16", torch.exp, recipe(uniform(-9, 9, dtype=F16))),
    Case("exp_f64_special", torch.exp, recipe(special(F64))),
    Case("exp_integers", lambda x: (x.exp(), x.sqrt()), recipe(integers(3, 4, low=0, dtype=torch.int64))),
    Case("rounding", lambda x: [f(x) for f in ROUNDING], recipe(special()), exact=True),
    Case("rounding_f16", lambda x: [f(x) for f in ROUNDING], recipe(uniform(-9, 9, dtype=F16)), exact=True),
    Case(
        "rounding_integers",
        lambda x: (x.floor(), x.round(), x.sign(), x.abs(), x.neg(), x.relu()),
        recipe(integers(12, dtype=torch.int32)),
        exact=True,
    ),
    Case("abs_uint8", lambda x: (x.abs(), x.sign(), x.neg()), recipe(integers(9, low=0, dtype=torch.uint8))),
    # Casts.
    Case(
        "cast_float",
        lambda x: [x.to(t) for t in (torch.int64, torch.int8, BF16, F16, F64)],
        recipe(uniform(-99, 99)),
        exact=True,
    ),
    Case("cast_bool", lambda x: (x.bool(), x.bool().float()), recipe(special()), exact=True),
    Case(
        "cast_integer",
        lambda x: [x.to(t) for t in (torch.bool, torch.float32, torch.int8, torch.uint8)],
        recipe(integers(12, low=-300, high=300, dtype=torch.int64)),
        exact=True,
    ),
    Case("cast_bf16_nan", lambda x: x.to(BF16), recipe(special()), exact=True),
    Case(
        "cast_channels_last",
        lambda x: x.to(BF16, memory_format=torch.channels_last),
        recipe(randn(2, 3, 4, 5)),
        exact=True,
        strides=True,
    ),
    Case("cast_backward", gradients(lambda x: x.to(BF16) * 2), recipe(randn(3, 4)), slack=0.1),
    # Activations, with gradients.
    *(Case(f"{name}_backward", gradients(f), recipe(randn(30)), slack=2) for name, f in ACTIVATIONS.items()),
    *(
        Case(f"{name}_backward_bf16", gradients(ACTIVATIONS[name]), recipe(randn(30, dtype=BF16)))
        for name in ("relu", "gelu", "silu", "hardswish")
    ),
    Case("relu_nan", lambda x: (F.relu(x), F.relu6(x), F.leaky_relu(x)), recipe(special())),
]

batch = batch_fixture(CASES, name="unary")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


@pytest.mark.parametrize("function", [torch.erfc, torch.lgamma, torch.digamma])
def test_functions_without_a_lowering_are_reported(function: Callable[..., torch.Tensor]) -> None:
    refused = Case("refused", function, recipe(randn(3)))
    assert "no lowering" in str(Batch([refused]).outcomes["refused"].refusal)
