"""Overloads that PyTorch's own functions seldom leave in a graph: each is called by its name."""

from __future__ import annotations

import torch

from tests.harness import Batch, Case, batch_fixture, integers, parametrize, randn, recipe

aten = torch.ops.aten
FLAGS = recipe(integers(3, 4, low=0, high=2, dtype=torch.bool))
NUMBERS = recipe(randn(3, 4))
HALVES = recipe(integers(3, 4, low=1, high=9))


def padded(op: str, dims: int, padding: list[int]) -> Case:
    """The gradient of a padding by reflection or of the edge."""
    size = (4, 5, 6)[3 - dims :]
    sums = [extent + padding[2 * i] + padding[2 * i + 1] for i, extent in enumerate(reversed(size))]
    function = getattr(aten, f"{op}_pad{dims}d_backward")
    return Case(
        f"{op}_pad{dims}d_backward",
        lambda dy, x: function(dy, x, padding),
        recipe(integers(2, 3, *reversed(sums)), randn(2, 3, *size)),
        exact=True,
    )


CASES = [
    Case("add_scalar", lambda x: aten.add.Scalar(x, 2.5, 2), NUMBERS),
    Case("sub_scalar", lambda x: aten.sub.Scalar(x, 2.5, 2), NUMBERS),
    Case("bitwise_and_scalar", lambda x: aten.bitwise_and.Scalar(x, True), FLAGS, exact=True),
    Case("bitwise_and_of_scalar", lambda x: aten.bitwise_and.Scalar_Tensor(True, x), FLAGS, exact=True),
    Case("bitwise_or_scalar", lambda x: aten.bitwise_or.Scalar(x, True), FLAGS, exact=True),
    Case("bitwise_or_of_scalar", lambda x: aten.bitwise_or.Scalar_Tensor(True, x), FLAGS, exact=True),
    Case("bitwise_xor_scalar", lambda x: aten.bitwise_xor.Scalar(x, True), FLAGS, exact=True),
    Case("bitwise_xor_of_scalar", lambda x: aten.bitwise_xor.Scalar_Tensor(True, x), FLAGS, exact=True),
    Case("copysign_scalar", lambda x: aten.copysign.Scalar(x, -1.0), NUMBERS, exact=True),
    Case("floor_divided_by_scalar", lambda x: aten.div.Scalar_mode(x, 2.0, rounding_mode="floor"), HALVES, exact=True),
    Case("remainder_of_scalar", lambda x: aten.remainder.Scalar_Tensor(7.0, x), HALVES, exact=True),
    Case("strided", lambda x: aten.as_strided(x, [4, 3], [1, 4]), NUMBERS, exact=True),
    Case(
        "strided_scatter",
        lambda x, y: aten.as_strided_scatter(x, y, [4, 3], [1, 4]),
        recipe(randn(3, 4), randn(4, 3)),
        exact=True,
    ),
    Case("lifted", aten.lift_fresh_copy, NUMBERS, exact=True),
    Case("element_type", lambda x: torch.ops.prims.convert_element_type(x, torch.float16), NUMBERS),
    Case("filled", lambda x: aten.empty_strided([3, 4], [4, 1], device=x.device).fill_(1) + x, NUMBERS),
    Case("filled_permuted", lambda x: aten.empty_permuted([3, 4], [1, 0], device=x.device).fill_(1) + x, NUMBERS),
    Case("filled_like", lambda x: aten.new_empty_strided(x, [3, 4], [4, 1]).fill_(1) + x, NUMBERS),
    Case(
        "normalized_without_statistics",
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
        recipe(randn(2, 3, 4, 5), randn(3), randn(3)),
        length=40,
    ),
    padded("reflection", 1, [2, 1]),
    padded("reflection", 3, [2, 1, 1, 1, 0, 2]),
    padded("replication", 1, [2, 1]),
    padded("replication", 3, [2, 1, 1, 1, 0, 2]),
]

batch = batch_fixture(CASES, name="overloads")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
