"""Pooling geometry: output extents as PyTorch has them, overlap by enumeration, messages that name the culprit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_max_backend.problems.pooling import AdaptivePoolingProblem, PoolingProblem


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_extent_and_overlap(size: int, window: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> None:
    reach = dilation * (window - 1) + 1
    assume(padding <= window // 2)
    x = torch.zeros(1, 1, 1, size)
    pool = torch.ops.aten.max_pool2d_with_indices  # max_pool1d itself knows no dilated padding
    try:
        y, _ = pool(x, [1, window], [1, stride], [0, padding], [1, dilation], ceil_mode)
        expected = y.shape[3]
    except RuntimeError:
        with pytest.raises(ValueError, match=r"too small|at least"):
            PoolingProblem.from_aten((size,), window, stride, padding, dilation, ceil_mode)
        return
    problem = PoolingProblem.from_aten((size,), window, stride, padding, dilation, ceil_mode)
    assert problem.output_spatial == (expected,)
    assert problem.has_empty_windows == bool(y.isinf().any())
    taps = [{o * stride + k * dilation for k in range(window)} for o in range(expected)]
    assert problem.overlaps == any(a & b for a, b in itertools.combinations(taps, 2))
    hulls = [range(o * stride - padding, o * stride - padding + reach) for o in range(expected)]
    assert problem.windows_above >= max(sum(i in hull for hull in hulls) for i in range(size))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_size": 0}, r"kernel_size=\(1, 0, 0\): every value must be at least 1"),
        ({"kernel_size": 2, "stride": 0}, r"stride=\(1, 0, 0\)"),
        ({"kernel_size": 2, "dilation": 0}, r"dilation=\(1, 0, 0\)"),
        ({"kernel_size": 2, "padding": -1}, r"padding=\(0, -1, -1\): every value must be at least 0"),
        ({"kernel_size": 2, "padding": 2}, r"padding=\(0, 2, 2\): on axis H it must be at most half of kernel_size, 1"),
        ({"kernel_size": 2, "divisor_override": 0}, r"divisor_override=0: must not be zero"),
        ({"kernel_size": 9}, r"input=\(1, 8, 8\): too small"),
        ({"kernel_size": (2, 2, 2)}, r"kernel_size=\(2, 2, 2\): must be one int or 2"),
    ],
)
def test_messages(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolingProblem.from_aten((8, 8), **arguments)


def test_zero_extent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input=\(1, 0, 4\)"):
        PoolingProblem.from_aten((0, 4), 1)


def test_adaptive_sizes() -> None:
    problem = AdaptivePoolingProblem.from_aten((8, 6), (None, 3))
    assert problem.output_spatial == (8, 3)
    assert AdaptivePoolingProblem.from_aten((8, 6), 2).output == (1, 2, 2)
    with pytest.raises(ValueError, match="output_size"):
        AdaptivePoolingProblem.from_aten((8, 6), (1, 2, 3))
    with pytest.raises(ValueError, match=r"output_size=\(1, 0, 2\): every value must be at least 1"):
        AdaptivePoolingProblem.from_aten((8, 6), (0, 2))
