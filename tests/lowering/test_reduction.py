"""Reductions: dimensions, memory orders, dtypes, NaN, ties, empty tensors."""

from __future__ import annotations

import math

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe, trace
from tests.lowering.test_pointwise import channels_last, flags, values
from torch_max_backend import lowering
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.typed_graph.operations import Call

aten = torch.ops.aten
BF16, F16, F64, I64 = torch.bfloat16, torch.float16, torch.float64, torch.int64
NAN, INF = math.nan, math.inf
TIES = integers(4, 6, low=0, high=3)


def with_nan(generator: torch.Generator) -> torch.Tensor:
    """A matrix with a NaN, an infinity before a NaN, and an infinity alone."""
    x = torch.randn(4, 5, generator=generator)
    x[0, 2] = x[2, 3] = NAN
    x[2, 1] = x[3, 0] = INF
    return x


CASES = [
    # Sums: every way to name dimensions, every memory order.
    Case(
        "sum",
        lambda x: (x.sum(), x.sum(1), x.sum((0, 2)), x.sum((-1, 0, 1)), x.sum((1, 2), keepdim=True)),
        recipe(integers(3, 4, 5)),
        exact=True,
    ),
    Case(
        "sum_channels_last",
        lambda x: (x.sum((0, 2, 3)), x.sum((2, 3), keepdim=True), x.sum((1, 3))),
        recipe(lambda g: integers(2, 3, 4, 5)(g).contiguous(memory_format=torch.channels_last)),
        exact=True,
        strides=True,
    ),
    Case("sum_no_dims", lambda x: aten.sum.dim_IntList(x, []), recipe(integers(3, 4)), exact=True),
    Case("sum_zero_dim", lambda x: (x.sum(), x.sum(0)), recipe(randn(())), exact=True),
    Case(
        "sum_empty",
        lambda x, y: (x.sum(0), x.sum(1), x.sum(), y.mean(0), x.prod(0), x.any(0)),
        recipe(randn(0, 4), randn(0, 3)),
        exact=True,
    ),
    Case("sum_unit_dims", lambda x: x.sum((0, 2)), recipe(integers(1, 4, 1)), exact=True),
    Case("sum_long", lambda x: (x.sum(), x.sum(0), x.sum(1)), recipe(randn(300, 700)), length=700),
    Case("sum_bf16", lambda x: (x.sum(), x.sum(0)), recipe(lambda g: torch.rand(300, 9, generator=g).to(BF16))),
    Case("sum_f16_dtype", lambda x: x.sum(0, dtype=torch.float32), recipe(randn(30, 9, dtype=F16))),
    Case("sum_integers", lambda x, y: (x.sum(1), y.sum(0)), recipe(integers(3, 4, dtype=torch.int32), flags(7))),
    Case("sum_f64", lambda x: x.sum(0), recipe(randn(30, 9, dtype=F64))),
    Case("sum_backward", gradients(lambda x: x.sum(1) * 2), recipe(integers(3, 4)), exact=True),
    # Means and variances.
    Case("mean", lambda x: (x.mean(), x.mean(0), x.mean((0, 2), keepdim=True)), recipe(randn(3, 4, 5))),
    Case("mean_channels_last", lambda x: x.mean((2, 3)), recipe(channels_last(2, 3, 4, 5)), strides=True),
    Case("mean_bf16", lambda x: x.mean(0), recipe(lambda g: torch.rand(300, 9, generator=g).to(BF16))),
    Case("mean_backward", gradients(lambda x: x.mean((0, 2))), recipe(randn(3, 4, 5))),
    Case(
        "var",
        lambda x: (x.var(), x.std((0, 2), keepdim=True), *torch.var_mean(x, 1)),
        recipe(randn(3, 4, 5)),
        slack=4,
    ),
    Case("var_of_one", lambda x: (x.var(1), x.var(1, correction=0)), recipe(randn(3, 1))),
    Case("var_far_from_zero", lambda x: x.var(0), recipe(lambda g: 1000 + torch.randn(50, 3, generator=g))),
    Case("var_backward", gradients(lambda x: x.var((0, 2))), recipe(randn(3, 4, 5)), slack=4),
    # Extrema, with NaN and ties.
    Case("extrema", lambda x: (x.amax(0), x.amin((0, 1)), x.max(), x.min()), recipe(with_nan), exact=True),
    Case(
        "extrema_integers",
        lambda x, y: (x.amin(), y.amax(), x.max(0)),
        recipe(integers(3, 4, dtype=I64), flags(5)),
        exact=True,
    ),
    Case("extrema_f16", lambda x: (x.amax(0), x.max(1)), recipe(randn(3, 4, dtype=F16)), exact=True),
    Case("along_with_nan", lambda x: (*x.max(1), *x.min(0, keepdim=True)), recipe(with_nan), exact=True),
    Case(
        "index_of_ties",
        lambda x: (x.argmax(1), x.argmin(0, keepdim=True), x.argmax()),
        recipe(TIES),
        exact=True,
    ),
    Case(
        "index_channels_last",
        lambda x: (x.argmax(), x.argmax(1), x.argmax(3, keepdim=True)),
        recipe(channels_last(2, 3, 4, 5)),
        exact=True,
    ),
    Case("index_zero_dim", lambda x: (x.argmax(), x.max(0), x.amax()), recipe(randn(())), exact=True),
    Case("amax_backward", gradients(lambda x: x.amax(1)), recipe(TIES), exact=True),
    # Products, logic, norms, running sums.
    Case("prod", lambda x: (x.prod(), x.prod(0, keepdim=True)), recipe(randn(3, 4)), slack=4),
    Case("prod_integers", lambda x: x.prod(1), recipe(integers(3, 4, dtype=torch.int32)), exact=True),
    Case(
        "logic",
        lambda x, y: (x.any(), x.any(1), x.all(0), y.all((0, 1), keepdim=True)),
        recipe(flags(3, 2), integers(2, 3, 4, low=0, high=2)),
        exact=True,
    ),
    Case("logic_uint8", lambda x: (x.any(0), x.all()), recipe(integers(3, 4, low=0, high=2, dtype=torch.uint8))),
    Case(
        "norms",
        lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, dim=0), torch.linalg.vector_norm(x, INF, dim=1)),
        recipe(randn(3, 4)),
        slack=4,
    ),
    Case("norm_backward", gradients(lambda x: x.norm(dim=1)), recipe(randn(3, 4)), slack=4),
    Case("logsumexp", gradients(lambda x: torch.logsumexp(x, (0, 2))), recipe(randn(3, 4, 5)), slack=2),
    Case("logsumexp_infinite", lambda x: torch.logsumexp(x, 0), recipe(values(-INF, -INF))),
    Case(
        "cumsum",
        lambda x: (x.cumsum(0), x.cumsum(-1)),
        recipe(lambda g: integers(2, 3, 4, 5)(g).contiguous(memory_format=torch.channels_last)),
        exact=True,
    ),
    Case("cumsum_integers", lambda x: x.cumsum(1), recipe(integers(3, 4, dtype=torch.int32)), exact=True),
    Case("cumsum_bf16", lambda x: x.cumsum(0), recipe(randn(300, 2, dtype=BF16)), length=300),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "sum_bf16", "sum_f64", "sum_unit_dims", "mean_bf16", "mean_channels_last", "mean_backward", "var_backward",
    "extrema_f16", "prod_integers", "logic_uint8", "cumsum_integers", "sum_backward", "index_channels_last",
    "sum_f16_dtype",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="reduction")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


def test_neighbouring_axes_are_reduced_at_once() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    lowering.load_all()
    unit = CompilationUnit("merged")
    unit.add(trace(lambda x: x.sum((0, 2, 3)), [x]), "merged")
    typed = unit.graphs[0].typed
    assert typed is not None
    calls = [operation.function.symbol for operation in typed.operations if isinstance(operation, Call)]
    assert len(calls) == 1 and calls[0].startswith("torch_max_reduction"), calls
    assert not unit.graphs[0].layout_changes
