"""The tables of interpolation against ATen in float64, on random problems."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kernels.interpolation.random_check import matrix_of
from torch_max_backend.custom_ops.interpolation import FORWARD
from torch_max_backend.problems.interpolation import InterpolationAxis, Mode, interpolation_axes

aten = torch.ops.aten
#: Ops of two axes: every mode. The last one is new in PyTorch 2.15.
OPS = {op: mode for op, mode in FORWARD.items() if "2d" in str(op)}
FACTORS = (None, 0.3, 0.5, 1.1, 1.5, 2.0, 2.1, 3.3)
SMOOTH = (Mode.CUBIC, Mode.LINEAR_ANTIALIASED, Mode.CUBIC_ANTIALIASED, Mode.LANCZOS_ANTIALIASED)


def drawn(chance: random.Random, mode: Mode) -> tuple[list[int], list[int], bool, list[float | None]]:
    """Extents before and after, align_corners and factors."""
    size = [chance.randint(1, 20) for _ in range(2)]
    factors = [chance.choice(FACTORS) for _ in range(2)] if chance.random() < 0.6 else [None, None]
    results = [max(1, int(s * f)) if f else chance.randint(1, 40) for s, f in zip(size, factors, strict=True)]
    corners = chance.random() < 0.4 and mode not in (Mode.NEAREST, Mode.NEAREST_EXACT)
    return size, results, corners, factors


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_atens_results_and_gradients(op: Any) -> None:
    mode, chance = OPS[op], random.Random(op.__name__)
    backward = getattr(aten, op.__name__.replace(".default", "_backward")).default
    for _ in range(300):
        size, results, corners, factors = drawn(chance, mode)
        rest = [*([] if mode in (Mode.NEAREST, Mode.NEAREST_EXACT) else [corners]), *factors]
        # ATen's antialiasing reads wrong elements of a contiguous tensor whose results have one column.
        x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
        rows, columns = (
            matrix_of(axis.table()) for axis in interpolation_axes(mode, size, results, corners, factors)[1:]
        )
        y = op(x, results, *rest)
        torch.testing.assert_close(rows @ x @ columns.t(), y, rtol=0, atol=3e-6)
        kept = any(s == r and f is not None for s, r, f in zip(size, results, factors, strict=True))
        if mode in SMOOTH and kept:
            # ATen's gradient does not belong to its result.
            continue
        dy = torch.randn_like(y)
        dx = backward(dy, results, list(x.shape), *rest)
        torch.testing.assert_close(rows.t() @ dy @ columns, dx, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", Mode)
def test_tables(mode: Mode) -> None:
    """Nothing lies outside, gradients' tables are transposed ones, spans cover what results read."""
    chance = random.Random(mode.value)
    for _ in range(100):
        size, results, corners, factors = drawn(chance, mode)
        for is_gpu, axis in itertools.product((False, True), range(2)):
            problem = interpolation_axes(mode, size, results, corners, factors, is_gpu=is_gpu)[1 + axis]
            table, gradient = problem.table(), problem.gradient_table()
            assert torch.equal(matrix_of(gradient), matrix_of(table).t())
            for each in (table, gradient):
                end = each.first + each.count
                assert each.first.min() >= 0 and each.count.min() >= 0 and end.max() <= each.extent
                assert each.count.max() <= each.most and (np.diff(each.first) >= 0).all()
                for log, span in enumerate(each.spans):
                    for begin in range(0, each.results, 2**log):
                        assert end[begin : begin + 2**log].max() - each.first[begin] <= span
                assert 2 ** (len(each.spans) - 1) >= each.results


def test_factors_that_aten_ignores() -> None:
    def factors(mode: Mode, size: tuple[int, ...], results: tuple[int, ...], is_gpu: bool) -> list[float | None]:
        return [axis.factor for axis in interpolation_axes(mode, size, results, False, (2.1, 1.3), is_gpu=is_gpu)[1:]]

    assert factors(Mode.NEAREST, (3, 3), (6, 3), False) == [None, None]
    assert factors(Mode.NEAREST, (3, 3), (6, 3), True) == [2.1, None]
    assert factors(Mode.LINEAR, (3, 3), (6, 3), False) == [2.1, None]
    assert factors(Mode.LINEAR, (3, 3), (6, 3), True) == [2.1, 1.3]
    assert factors(Mode.CUBIC, (3, 3), (3, 3), False) == [2.1, 1.3]
    assert factors(Mode.CUBIC, (3, 3), (3, 3), True) == [None, None]
    assert interpolation_axes(Mode.LINEAR, (3,), (4,), False, (-1.0,))[2].factor is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InterpolationAxis(Mode.LINEAR, 0, 3), "input=0: must be at least 1"),
        (lambda: InterpolationAxis(Mode.LINEAR, 3, 0), "output=0: must be at least 1"),
        (lambda: InterpolationAxis(Mode.LINEAR, 3, 4, False, -1.0), "factor=-1.0: must be greater than 0"),
        (lambda: interpolation_axes(Mode.LINEAR, (3, 4), (5,)), "must be one to three extents, as many in each"),
        (lambda: interpolation_axes(Mode.LINEAR, (), ()), "must be one to three extents"),
        (lambda: interpolation_axes(Mode.LINEAR, (3,), (5,), False, (1.0, 2.0)), "must be one to three extents"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("input", "output"), [(24, 48), (65, 129), (7, 14)])
def test_gradients_leave_out_weights_of_zero(input: int, output: int) -> None:
    gradient = InterpolationAxis(Mode.LINEAR, input, output).gradient_table()
    assert gradient.most == 4
    assert (gradient.weights[:, 0] != 0).all()
