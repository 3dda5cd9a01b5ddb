"""The positional arguments: their order, their defaults, and what is said of bad ones. Nothing is compiled."""

from __future__ import annotations

import pytest

from torch_max_backend.bench.arguments import (
    ArgumentError,
    RunControl,
    parse_control,
    parse_convolution,
    parse_pooling,
)
from torch_max_backend.bench.convolution import CK_DEFAULT, CK_GROUPED_DEFAULT
from torch_max_backend.bench.pooling import AVG_DEFAULT, MAX_DEFAULT


def _words(text: str) -> list[str]:
    return text.split()


CK_2D = "0 1 5 2 128 256 128 3 3 71 71 2 2 1 1 1 1 1 1"


def test_order_of_composable_kernel() -> None:
    control, problem = parse_convolution(CK_2D.split(), CK_GROUPED_DEFAULT)
    assert control == RunControl(False, 1, 5)
    assert problem == CK_DEFAULT
    assert (problem.n, problem.k, problem.c) == (128, 256, 128)
    assert problem.output_size == (1, 36, 36)
    # The document's own figures for this problem: 69.8734 TFlops and 179.037 GB/s at 1.40031 ms, fp16.
    assert problem.flops / 1.40031e-3 / 1e12 == pytest.approx(69.8734, rel=1e-5)
    assert problem.bytes(2) / 1.40031e-3 / 1e9 == pytest.approx(179.037, rel=1e-5)


def test_every_axis_has_its_place() -> None:
    texts = _words("1 2 3 3 2 4 6 1 2 3 7 8 9 1 2 3 4 5 6 0 6 8 0 7 8")
    control, problem = parse_convolution(texts, CK_DEFAULT)
    assert control == RunControl(True, 2, 3)
    assert (problem.n, problem.k, problem.c, problem.groups) == (2, 4, 6, 1)
    assert problem.filter_size == (1, 2, 3)
    assert problem.input_size == (7, 8, 9)
    assert problem.stride == (1, 2, 3)
    assert problem.dilation == (4, 5, 6)
    assert problem.padding == (0, 6, 8)
    assert problem.output_size == (7, (8 + 12 - 6) // 2 + 1, (9 + 16 - 13) // 3 + 1)


def test_one_axis() -> None:
    _, problem = parse_convolution(_words("0 2 1 1 2 4 6 3 10 2 1 1 0"), CK_DEFAULT)
    assert problem.spatial_rank == 1
    assert problem.output_size == (1, 1, 5)


def test_groups_stand_before_the_batch_and_channels_count_one_group() -> None:
    texts = _words("0 1 5 2 2 128 256 256 3 3 14 14 2 2 1 1 1 1 1 1")
    _, problem = parse_convolution(texts, CK_DEFAULT, grouped=True)
    assert problem == CK_GROUPED_DEFAULT
    assert (problem.groups, problem.n, problem.k, problem.c) == (2, 128, 512, 512)


def test_groups_option_counts_all_channels() -> None:
    _, problem = parse_convolution(_words("0 1 5 2 8 32 32 3 3 9 9 1 1 1 1 1 1 1 1"), CK_DEFAULT, groups=32)
    assert problem.groups == problem.c == 32


@pytest.mark.parametrize("texts", [[], ["1", "2", "7"]])
def test_without_sizes_the_default_problem(texts: list[str]) -> None:
    control, problem = parse_convolution(texts, CK_DEFAULT)
    assert problem is CK_DEFAULT
    assert control == (RunControl(True, 2, 7) if texts else RunControl())


BAD = [
    ("2", "verify = 2: expected an integer from 0 to 1"),
    ("yes 1 1", "verify = 'yes': expected an integer from 0 to 1"),
    ("0 3 1", "init = 3: expected an integer from 0 to 2"),
    ("0 1 -5", "time = -5: expected an integer from 0 to"),
    ("0 1", "time = (missing): expected 3 values: verify init time"),
    ("1 0 1", "init = 0: expected 1 or 2 where verify is 1"),
    ("0 1 1 4", "ndim = 4: expected an integer from 1 to 3"),
    ("0 1 1 2", "N = (missing): expected 19 values: verify init time ndim N K C Y X Hi Wi Sy Sx Dy Dx LeftPy"),
    (CK_2D.rsplit(" ", 1)[0], "RightPx = (missing): expected 19 values"),
    (CK_2D + " 7", "arguments = ... 7: expected no more than 19 values"),
    (CK_2D.replace("128 256 128", "0 256 128"), "N = 0: expected an integer from 1 to"),
    (CK_2D.replace("128 256 128", "128 256 1.5"), "C = '1.5': expected an integer from 1 to"),
    (CK_2D.replace("128 256 128", "99999999999 256 128"), "N = 99999999999: expected an integer from 1 to 2147483647"),
    ("0 1 1 2 1 4 4 3 3 8 8 0 1 1 1 1 1 1 1", "Sy = 0: expected an integer from 1 to"),
    ("0 1 1 2 1 4 4 3 3 8 8 1 1 1 -1 1 1 1 1", "Dx = -1: expected an integer from 1 to"),
    ("0 1 1 2 1 4 4 3 3 8 8 1 1 1 1 -1 1 1 1", "LeftPy = -1: expected an integer from 0 to"),
    ("0 1 1 2 1 4 4 3 3 8 8 1 1 1 1 1 1 2 1", "RightPy = 2: expected LeftPy = 1: PyTorch pads both sides alike"),
    ("0 1 1 2 1 4 4 9 3 6 8 1 1 1 1 1 1 1 1", "Hi = 6: expected at least 9 with its pads (the window's extent), not 8"),
]


@pytest.mark.parametrize(("texts", "message"), BAD)
def test_a_bad_argument_is_named(texts: str, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_convolution(texts.split(), CK_DEFAULT)
    assert message in str(raised.value)


def test_channels_divide_by_groups() -> None:
    with pytest.raises(ArgumentError, match=r"K = 6: expected a multiple of --groups = 4"):
        parse_convolution(_words("0 1 5 2 8 6 8 3 3 9 9 1 1 1 1 1 1 1 1"), CK_DEFAULT, groups=4)
    with pytest.raises(ArgumentError, match=r"--groups = 0: expected an integer of at least 1"):
        parse_convolution([], CK_DEFAULT, groups=0)
    with pytest.raises(ArgumentError, match=r"--groups = 2: expected the sizes with it"):
        parse_convolution([], CK_DEFAULT, groups=2)


def test_pooling_order() -> None:
    control, sizes = parse_pooling(
        _words("1 1 2 4 5 3 2 9 8 2 1 2 3 1 0 1 0"), MAX_DEFAULT, ndim=2, dilated=True, ceil_mode=True
    )
    problem = sizes.problem
    assert control == RunControl(True, 1, 2)
    assert (sizes.n, sizes.c) == (4, 5)
    assert problem.window == (1, 3, 2)
    assert problem.input == (1, 9, 8)
    assert problem.stride == (1, 2, 1)
    assert problem.dilation == (1, 2, 3)
    assert problem.padding == (0, 1, 0)
    assert problem.ceil_mode


def test_pooling_default_takes_the_modes() -> None:
    _, sizes = parse_pooling([], AVG_DEFAULT, ndim=3, dilated=False, count_include_pad=False, divisor_override=5)
    assert sizes.n == AVG_DEFAULT.n
    assert sizes.problem.window == AVG_DEFAULT.problem.window
    assert not sizes.problem.count_include_pad
    assert sizes.problem.divisor_override == 5


BAD_POOLING = [
    ("0 1 1 1 1 3 3 9 9 1 1 1 1 2 0 2 0", "LeftPy = 2: expected at most 1, half the window"),
    ("0 1 1 1 1 3 3 9 9 1 1 1 1 0 0 1 0", "RightPy = 1: expected LeftPy = 0: pooling pads both sides alike"),
    ("0 1 1 1 1 3 9 9 4 1 1 1 1 0 1 0 1", "Wi = 4: expected at least 9 with its pads"),
    ("0 1 1 1 1 3 3 9", "Wi = (missing): expected 17 values: verify init time N C Y X Hi Wi"),
]


@pytest.mark.parametrize(("texts", "message"), BAD_POOLING)
def test_a_bad_pooling_argument_is_named(texts: str, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_pooling(texts.split(), MAX_DEFAULT, ndim=2, dilated=True)
    assert message in str(raised.value)


def test_average_pooling_has_no_dilation() -> None:
    with pytest.raises(ArgumentError, match=r"Dz = 2: expected 1: average pooling has no dilation"):
        parse_pooling(_words("0 1 1 1 1 3 3 3 9 9 9 1 1 1 2 1 1 0 0 0 0 0 0"), AVG_DEFAULT, ndim=3, dilated=False)
    with pytest.raises(ArgumentError, match=r"--divisor = 0"):
        parse_pooling([], AVG_DEFAULT, ndim=3, dilated=False, divisor_override=0)


def test_control_alone() -> None:
    assert parse_control(["0", "1", "0"]) == RunControl(False, 1, 0)
