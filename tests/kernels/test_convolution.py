"""The convolution kernels, by calls of their library functions: a table of cases.

Two checks for each pass of each case: small whole numbers must come out exactly, and normal ones close to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from torch.nn import functional

from benchmarks.kernels.library import Guarded, LibraryCalls
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.convolution import (
    DEFAULT_WORKSPACE_LIMIT,
    FAMILY,
    Geometry,
    Grouping,
    conv_dgrad,
    conv_fprop,
    conv_wgrad,
    convolution_function,
)
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class ConvolutionCase:
    """One problem; `outputs` gives the output extents where right and left paddings differ, `taps_inside` the filter's
    order in memory (mojo_ops.convolution.Geometry)."""

    id: str
    n: int
    c: int
    k: int
    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    outputs: tuple[int, ...] | None = None
    dtype: torch.dtype = F32
    workspace_limit: int = DEFAULT_WORKSPACE_LIMIT
    taps_inside: bool = False
    problem: ConvolutionProblem = field(init=False)

    def __post_init__(self) -> None:
        problem = ConvolutionProblem.from_sizes(
            self.n,
            self.c,
            self.k,
            self.size,
            self.filter,
            stride=self.stride,
            dilation=self.dilation,
            padding=self.padding,
            # Wide enough for any filter here: `outputs` may ask for more windows than symmetric padding gives.
            right_padding=None if self.outputs is None else tuple(64 for _ in self.size),
            groups=self.groups,
        )
        if self.outputs is not None:
            outputs = (1,) * (3 - len(self.outputs)) + self.outputs
            problem = ConvolutionProblem(
                problem.n,
                problem.c,
                problem.k,
                problem.groups,
                problem.input_size,
                problem.filter_size,
                outputs,
                problem.stride,
                problem.dilation,
                problem.padding,
                problem.spatial_rank,
            )
        object.__setattr__(self, "problem", problem)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """x, w and y, channels last."""
        p = self.problem
        return (
            (p.n, *p.input_size, p.c),
            (p.k, *p.filter_size, p.c // p.groups),
            (p.n, *p.output_size, p.k),
        )

    def inputs(self, make: Callable[[tuple[int, ...]], torch.Tensor]) -> list[torch.Tensor]:
        return [make(shape).to(self.dtype) for shape in self.shapes]

    def reference(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All three results in float64: pad or crop x by hand, then convolve without padding."""
        p = self.problem
        x, w, dy = (tensor.double().movedim(-1, 1) for tensor in tensors)
        x.requires_grad_()
        w.requires_grad_()
        pads = [value for pair in zip(p.padding, p.right_padding, strict=True) for value in pair]
        width, height, depth = pads[4:6], pads[2:4], pads[0:2]
        # Cropping after padding: what the right side crops may be padding of the left one.
        around = [*width, *height, *depth]
        padded = functional.pad(x, [max(0, value) for value in around])
        padded = functional.pad(padded, [min(0, value) for value in around])
        y = functional.conv3d(padded, w, None, p.stride, 0, p.dilation, p.groups)
        assert y.shape == dy.shape
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        results = {"fprop": y, "dgrad": dx, "wgrad": dw}
        return {name: value.detach().movedim(1, -1) for name, value in results.items()}

    def reduction(self, op: str) -> int:
        """How many products the longest sum of the op has."""
        p = self.problem
        return {
            "fprop": p.taps * p.c // p.groups,
            "dgrad": p.taps * p.k // p.groups,
            "wgrad": p.output_pixels,
        }[op]


C = ConvolutionCase
GEOMETRIES = [
    C("1d", 3, 5, 7, (23,), (3,), padding=(1,)),
    C("1d_stride_3_dilation_2", 2, 16, 32, (41,), (4,), stride=(3,), padding=(2,), dilation=(2,)),
    C("2d_3x3", 3, 16, 32, (9, 11), (3, 3), padding=(1,)),
    C("2d_many_rows_and_panels", 2, 48, 136, (31, 29), (3, 3), padding=(1,)),
    C("2d_odd_channels", 2, 37, 29, (8, 7), (3, 3), padding=(1,)),
    C("2d_one_channel", 2, 1, 1, (8, 7), (3, 3), padding=(1,)),
    C("2d_stem", 2, 3, 64, (33, 35), (7, 7), stride=(2,), padding=(3,)),
    C("2d_1x1", 2, 40, 96, (14, 14), (1, 1)),
    C("2d_1x1_stride_2", 2, 40, 24, (13, 14), (1, 1), stride=(2,)),
    C("2d_stride_2", 2, 32, 48, (15, 14), (3, 3), stride=(2,), padding=(1,)),
    C("2d_stride_exceeds_filter", 1, 8, 8, (17, 19), (2, 2), stride=(5, 4)),
    C("2d_stride_and_dilation_share_a_factor", 2, 8, 8, (21, 22), (3, 3), (4, 2), (4, 3), (2, 6)),
    C("2d_dilation_beyond_the_input", 1, 16, 16, (9, 9), (3, 3), padding=(12,), dilation=(12,)),
    C("2d_padding_beyond_the_filter", 1, 4, 6, (3, 3), (2, 2), padding=(5,)),
    C("2d_wide_row", 1, 8, 8, (1, 203), (1, 9), padding=(0, 4)),
    C("2d_truncated_input", 1, 8, 16, (12, 13), (3, 3), (3,), (0,), outputs=(2, 3)),
    C("2d_larger_right_padding", 2, 8, 16, (7, 8), (3, 3), (2,), (0,), outputs=(4, 4)),
    C("2d_right_padding_only", 1, 5, 8, (6, 6), (2, 2), outputs=(6, 7)),
    C("2d_groups_3", 2, 12, 18, (9, 9), (3, 3), padding=(1,), groups=3),
    C("2d_groups_of_four_channels", 2, 64, 64, (10, 9), (3, 3), padding=(1,), groups=16),
    C("2d_groups_of_eight_channels", 2, 48, 48, (13, 12), (5, 3), (2, 1), (2, 1), groups=6),
    C("2d_groups_of_four_and_eight", 2, 16, 32, (11, 14), (3, 4), (2, 1), (1, 2), (1, 2), groups=4),
    C("2d_groups_of_sixteen_channels", 2, 128, 96, (9, 8), (3, 2), (2, 1), (1, 2), (1, 2), groups=8),
    C("2d_groups_of_sixteen_on_small_planes", 6, 96, 96, (7, 7), (3, 3), padding=(1,), groups=6),
    C("2d_groups_of_twenty_four_channels", 3, 72, 72, (15, 24), (3, 3), (2,), (1,), groups=3),
    C("2d_groups_of_thirty_two_to_sixty_four", 2, 64, 128, (20, 19), (3, 2), (1,), (1, 2), (1, 2), groups=2),
    C("2d_groups_of_fifty_six_to_eight", 1, 112, 16, (12, 37), (3, 5), (1, 3), (1, 2), groups=2),
    C("2d_groups_of_112_to_120_channels", 2, 224, 240, (9, 10), (3, 3), padding=(1,), groups=2),
    C("2d_groups_of_64_channels_stride_2", 1, 320, 320, (9, 8), (3, 3), (2,), (1,), groups=5),
    # So large that Hopper takes several groups as one.
    C("2d_four_channels_together", 16, 128, 128, (33, 32), (3, 3), padding=(1,), groups=32),
    C("2d_sixteen_channels_together_stride_2", 32, 64, 64, (34, 33), (3, 3), (2,), (1,), groups=4),
    C("3d_groups_of_thirty_two_channels", 1, 256, 40, (3, 5, 4), (2, 3, 1), padding=(1, 1, 0), groups=8),
    C("2d_depthwise", 2, 37, 37, (14, 13), (3, 3), padding=(1,), groups=37),
    C("2d_depthwise_stride_2", 2, 48, 48, (15, 16), (5, 5), (2,), (2,), groups=48),
    C("2d_depthwise_dilated", 1, 16, 16, (19, 20), (3, 3), padding=(3,), dilation=(3,), groups=16),
    C("2d_depthwise_truncated", 1, 20, 20, (12, 13), (2, 2), (4,), (0,), groups=20, outputs=(2, 3)),
    # No pixel of a row has all of its taps inside: rows are shorter than their padding.
    C("1d_depthwise_in_the_padding", 2, 16, 16, (1,), (3,), padding=(4,), dilation=(3,), groups=16),
    C("2d_depthwise_multiplier_3", 2, 10, 30, (9, 9), (3, 3), padding=(1,), groups=10),
    C("3d", 2, 16, 24, (5, 9, 8), (3, 3, 3), padding=(1,)),
    C("3d_all_different", 1, 6, 8, (7, 9, 11), (2, 3, 4), (1, 2, 3), (1, 0, 2), (3, 2, 1), groups=2),
    C("3d_wide_tiles", 2, 160, 200, (3, 5, 6), (2, 2, 2), (1, 1, 2), (1, 0, 1)),
    C("3d_few_channels", 2, 3, 8, (5, 7, 8), (3, 3, 3), (1, 2, 2), padding=(1,)),
    # One image's products of tap and pixel take 29 kB: two images at a time fit, then one.
    C("2d_stem_in_pieces", 3, 3, 8, (18, 21), (5, 5), (2,), (2,), workspace_limit=64 * 1024),
    C("2d_few_channels_dilated", 2, 4, 12, (13, 11), (3, 2), (2, 4), (2, 1), (2, 3)),
    C("3d_depthwise", 1, 32, 32, (6, 7, 8), (3, 3, 3), (2, 1, 1), (1,), groups=32),
    # Those that another problem with fewer axes or taps stands for: rewrite.mojo.
    C("2d_patches", 2, 3, 40, (12, 20), (4, 4), (4,)),
    C("2d_patches_in_16_rows", 1, 3, 24, (32, 48), (16, 16), (16,)),
    C("2d_patches_cut_off_below", 2, 5, 8, (11, 12), (3, 2), (3, 2)),
    C("2d_patches_cut_off_right", 2, 5, 8, (9, 13), (3, 2), (3, 2)),
    C("2d_patches_along_one_axis", 2, 8, 16, (9, 12), (3, 4), (1, 4), (1, 0)),
    C("3d_patches", 2, 3, 16, (4, 8, 8), (2, 4, 4), (2, 4, 4)),
    C("3d_window_of_one_plane", 2, 16, 24, (5, 9, 8), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    C("3d_window_along_depth", 2, 16, 24, (9, 5, 6), (3, 1, 1), (2, 1, 1), (1, 0, 0)),
    C("3d_depthwise_along_depth", 2, 16, 16, (9, 5, 6), (3, 1, 1), (1, 1, 1), (2, 0, 0), (2, 1, 1), groups=16),
    C("2d_depthwise_7", 2, 24, 24, (17, 19), (7, 7), padding=(3,), groups=24),
    C("2d_depthwise_5_on_small_planes", 2, 40, 40, (7, 6), (5, 5), padding=(2,), groups=40),
    C("2d_depthwise_9", 1, 24, 24, (12, 13), (9, 9), padding=(4,), groups=24),
    C("2d_depthwise_5_stride_2", 2, 12, 12, (17, 19), (5, 5), (2,), (2,), groups=12),
    C("2d_depthwise_7_stride_2", 1, 20, 20, (18, 21), (7, 7), (2,), (3,), groups=20),
    C("2d_depthwise_9_by_11", 1, 8, 8, (14, 20), (9, 11), padding=(4, 5), groups=8),
    C("2d_depthwise_7_dilated", 1, 8, 8, (23, 25), (7, 7), padding=(9,), dilation=(3,), groups=8),
    C("2d_depthwise_different_steps", 1, 8, 8, (14, 20), (3, 4), (2, 1), (1, 3), (1, 2), groups=8),
    # Mostly edges, and filters that no cache holds: by position, and tile by tile.
    C("2d_small_planes", 5, 144, 264, (2, 3), (3, 3), padding=(1,)),
    C("2d_small_planes_stride_2", 4, 160, 256, (4, 3), (3, 3), (2,), (1,)),
    C("2d_large_filter_odd_channels", 1, 130, 250, (13, 11), (3, 3), padding=(1,)),
    C("2d_large_filter_groups_2", 6, 144, 256, (3, 2), (3, 4), (1, 2), (1, 2), groups=2),
    C("empty_batch", 0, 8, 16, (9, 9), (3, 3), padding=(1,)),
    C("no_workspace", 2, 8, 16, (9, 10), (3, 3), (2,), (1,), workspace_limit=0),
    C("no_workspace_depthwise", 2, 8, 8, (9, 10), (3, 3), (2,), (1,), groups=8, workspace_limit=0),
]
NARROW = [
    case
    for case in GEOMETRIES
    if case.id
    in (
        "2d_3x3",
        "2d_odd_channels",
        "2d_one_channel",
        "2d_stem",
        "2d_stride_2",
        "2d_groups_3",
        "2d_groups_of_four_channels",
        "2d_groups_of_eight_channels",
        "2d_groups_of_sixteen_channels",
        "2d_groups_of_sixteen_on_small_planes",
        "2d_groups_of_twenty_four_channels",
        "2d_groups_of_thirty_two_to_sixty_four",
        "2d_groups_of_fifty_six_to_eight",
        "2d_groups_of_112_to_120_channels",
        "2d_groups_of_64_channels_stride_2",
        "2d_four_channels_together",
        "2d_sixteen_channels_together_stride_2",
        "2d_depthwise",
        "2d_depthwise_7",
        "2d_depthwise_5_on_small_planes",
        "2d_depthwise_5_stride_2",
        "2d_depthwise_different_steps",
        "2d_patches_in_16_rows",
        "3d_window_along_depth",
        "3d",
        "3d_wide_tiles",
        "2d_small_planes",
        "2d_small_planes_stride_2",
        "2d_large_filter_odd_channels",
        "no_workspace",
    )
]


def _changed(case: ConvolutionCase, name: str, **changes: Any) -> ConvolutionCase:
    names = [item for item in ConvolutionCase.__dataclass_fields__ if item not in ("id", "problem")]
    return ConvolutionCase(f"{case.id}_{name}", **({item: getattr(case, item) for item in names} | changes))


def _of_dtype(dtype: torch.dtype, name: str) -> list[ConvolutionCase]:
    return [_changed(case, name, dtype=dtype) for case in NARROW]


CASES = [*GEOMETRIES, *_of_dtype(BF16, "bf16"), *_of_dtype(F16, "f16"), *_of_dtype(F64, "f64")]
CASES += [_changed(case, "taps_inside", taps_inside=True) for case in [*GEOMETRIES, *_of_dtype(BF16, "bf16")]]
OPS = ("fprop", "dgrad", "wgrad")


def dtypes_on(device: str) -> list[torch.dtype]:
    # float16 takes the paths of bfloat16; one of the two is enough where compiling is slow.
    return [F32, BF16, F64] if device == "cpu" else [F32, BF16, F16]


class Convolutions(LibraryCalls):
    """The library functions of the three passes on one device, each for any problem of a dtype."""

    family = FAMILY

    def __init__(self, device: str) -> None:
        self.dtypes = dtypes_on(device)
        self.cases = [case for case in CASES if case.dtype in self.dtypes]
        if device != "cpu":
            self.cases = [case for case in self.cases if not case.taps_inside]
        super().__init__(torch.device(device), self.dtypes)

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for which in Pass:
            yield from (self._function(which, dtype) for dtype in dtypes)

    def _function(self, which: Pass, dtype: torch.dtype) -> LibraryFunction:
        return convolution_function(which.value, self.target, TORCH_TO_MAX[dtype], Grouping.ANY, deep=True)

    @staticmethod
    def geometry(case: ConvolutionCase) -> list[int]:
        p = case.problem
        return Geometry(
            p.stride, p.padding, p.dilation, p.groups, case.workspace_limit, taps_inside=case.taps_inside
        ).numbers()

    def one(
        self, case: ConvolutionCase, tensors: list[torch.Tensor], geometry: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """The three results of one case, filters with their channels inside."""
        if case.taps_inside:
            x, w, dy = tensors
            tensors = [x, w.movedim(-1, 1).contiguous(), dy]
        results = self.run_tensors(tensors, self.geometry(case) if geometry is None else geometry)
        if case.taps_inside:
            results[2] = results[2].movedim(1, -1)
        return results

    def run_tensors(
        self, tensors: list[torch.Tensor], geometry: Sequence[int], keep: bool = False
    ) -> list[torch.Tensor]:
        """The three results of x, w and dy; on the host, or with `keep` where the kernels run."""
        x, w, dy = (tensor.to(self.device) for tensor in tensors)
        results = []
        for which, like, *operands in ((Pass.FPROP, dy, x, w), (Pass.DGRAD, x, dy, w), (Pass.WGRAD, w, x, dy)):
            result = Guarded(like.shape, like.dtype, self.device)
            self.bind(self._function(which, like.dtype), result.tensor, *operands, numbers=geometry)()
            assert result.is_intact(), f"{which.value} wrote outside its result"
            results.append(result.tensor if keep else result.tensor.cpu())
        return results

    def run(
        self, make: Callable[[tuple[int, ...]], torch.Tensor]
    ) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
        """(result, float64 reference) by case and op, on fresh inputs."""
        pairs = {}
        for case in self.cases:
            tensors = case.inputs(make)
            reference = case.reference(tensors)
            for op, result in zip(OPS, self.one(case, tensors), strict=True):
                pairs[case.id, op] = result, reference[op]
        return pairs


@pytest.fixture(scope="module")
def whole_numbers(convolutions: Convolutions) -> dict:
    return convolutions.run(lambda shape: torch.randint(-2, 3, shape))


@pytest.fixture(scope="module")
def normal_numbers(convolutions: Convolutions) -> dict:
    return convolutions.run(torch.randn)


def test_operands_that_do_not_fit_are_refused(convolutions: Convolutions) -> None:
    """Shapes are checked before memory is touched."""
    case = next(case for case in CASES if case.id == "2d_groups_3")
    x, w, dy = case.inputs(torch.randn)
    with pytest.raises(RuntimeError, match="4 channels in each of 3 groups, x has 11 channels"):
        convolutions.one(case, [x[..., :-1].contiguous(), w, dy])
    geometry = convolutions.geometry(case)
    for index, value, message in ((0, 0, "stride_d = 0"), (4, -1, "dilation_h = -1"), (8, -2, "pad_w = -2")):
        wrong = geometry.copy()
        wrong[index] = value
        with pytest.raises(RuntimeError, match=message):
            convolutions.one(case, [x, w, dy], wrong)


def _skip_if_absent(convolutions: Convolutions, case: ConvolutionCase) -> None:
    if case not in convolutions.cases:
        pytest.skip(f"{case.dtype}, taps_inside={case.taps_inside} does not run on {convolutions.device}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_whole_numbers_are_exact(
    convolutions: Convolutions, whole_numbers: dict, case: ConvolutionCase, op: str
) -> None:
    _skip_if_absent(convolutions, case)
    result, reference = whole_numbers[case.id, op]
    assert result.dtype == case.dtype
    assert torch.equal(result, reference.to(case.dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_normal_numbers_are_near_float64(
    convolutions: Convolutions, normal_numbers: dict, case: ConvolutionCase, op: str
) -> None:
    _skip_if_absent(convolutions, case)
    result, reference = normal_numbers[case.id, op]
    narrow = torch.finfo(case.dtype).eps
    wide = torch.finfo(F64 if case.dtype == F64 else F32).eps
    # One rounding of the result, and a sum in the accumulator's precision: partial sums grow like the root of the
    # length, and so does the walk of their rounding errors; an extreme result had extreme partial sums.
    length = case.reduction(op) + 4
    bound = (narrow + wide * length**0.5) * reference.abs() + 2 * wide * length
    assert ((result.double() - reference).abs() <= bound).all()


def test_the_same_input_gives_the_same_bits(convolutions: Convolutions) -> None:
    fixed: dict[tuple[int, ...], torch.Tensor] = {}

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return fixed.setdefault(shape, torch.randn(shape))

    first, second = convolutions.run(make), convolutions.run(make)
    assert all(torch.equal(first[key][0], second[key][0]) for key in first)


@pytest.mark.parametrize("operand", ["x", "dy"])
@pytest.mark.parametrize("name", ["2d_depthwise_7_bf16", "2d_depthwise_5_stride_2_bf16"])
def test_what_is_not_finite_stays_in_its_windows(convolutions: Convolutions, name: str, operand: str) -> None:
    """Zeros that a kernel adds to a window, or to the pixels of its tile, must not meet it. A GPU's weight gradient in
    registers (stride 2) multiplies them: what is not finite reaches all taps of its channel, and no other channel."""
    case = next(case for case in CASES if case.id == name)
    x, w, dy = case.inputs(lambda shape: torch.randint(1, 3, shape))
    tensor = x if operand == "x" else dy
    # Far enough from the edges: the reference multiplies its padding.
    tensor[0, 0, 4, 5, 1] = float("inf")
    tensor[0, 0, 5, 4, 5] = -float("inf")
    reference = case.reference([x, w, dy])
    results = dict(zip(OPS, convolutions.one(case, [x, w, dy]), strict=True))
    for op in ("fprop", "wgrad") if operand == "x" else ("dgrad", "wgrad"):
        result, expected = results[op], reference[op].to(case.dtype)
        if op == "wgrad" and "stride_2" in name and convolutions.device.type != "cpu":
            assert not result[~expected.isfinite()].isfinite().any()
            finite = expected.flatten(1).isfinite().all(1)
            result, expected = result[finite], expected[finite]
            assert 0 < len(result) < case.k
        else:
            assert 0 < int(result.isinf().sum()) < result.numel() // 2
        assert torch.equal(result, expected)


def _type(*shape: int | str, dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, shape, DeviceRef.CPU())


X, W = _type("n", 1, 8, 8, 6), _type(4, 1, 3, 3, 3)
BAD = [
    ("stride", [X, W], lambda x, w: conv_fprop(x, w, Geometry(groups=2, stride=(1, 0, 1))), r"stride = \(1, 0, 1\)"),
    ("dilation", [X, W], lambda x, w: conv_fprop(x, w, Geometry(groups=2, dilation=(1, 1, -1))), "dilation"),
    ("padding", [X, W], lambda x, w: conv_fprop(x, w, Geometry(groups=2, padding=(0, -1, 0))), "padding"),
    ("groups", [X, W], lambda x, w: conv_fprop(x, w, Geometry(groups=0)), "groups = 0"),
    ("channels", [X, W], lambda x, w: conv_fprop(x, w), "3 channels in each of 1 groups"),
    ("indivisible", [X, W], lambda x, w: conv_fprop(x, w, Geometry(groups=4)), "C = 6"),
    ("window", [_type(1, 1, 2, 2, 3), W], lambda x, w: conv_fprop(x, w), "extent H = 2"),
    ("rank", [_type(1, 8, 8, 3), W], lambda x, w: conv_fprop(x, w), "x has rank 4"),
    ("dtype", [_type(1, 1, 8, 8, 3, dtype=DType.bfloat16), W], lambda x, w: conv_fprop(x, w), "bfloat16"),
    ("integers", [_type(1, 1, 8, 8, 3, dtype=DType.int32), W], lambda x, w: conv_fprop(x, w), "int32"),
    ("dy", [_type(1, 1, 8, 8, 5), W], lambda y, w: conv_dgrad(y, w, input_size=(1, 8, 8)), "dy has 5"),
    ("size", [_type(1, 1, 8, 8, 4), W], lambda y, w: conv_dgrad(y, w, input_size=(8, 8)), "input_size has 2"),
    (
        "order",
        [X, _type(4, 3, 1, 3, 3)],
        lambda x, w: conv_fprop(x, w, Geometry(taps_inside=True)),
        "3 channels in each of 1",
    ),
    ("taps", [X, X], lambda x, y: conv_wgrad(x, y, filter_size=(1, 0, 3)), "filter_size"),
]


@pytest.mark.parametrize(("types", "call", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_arguments_are_named(types: list[TensorType], call: Callable[..., Any], message: str) -> None:
    with (
        Graph("bad", input_types=types) as graph,
        pytest.raises(ValueError, match=message),
    ):
        call(*(value.tensor for value in graph.inputs))


GROUPED = [case for case in CASES if "groups_of" in case.id and not case.taps_inside]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.id)
def test_an_infinity_stays_in_its_group(convolutions: Convolutions, case: ConvolutionCase) -> None:
    """No zero stands for another group: times infinity it would be NaN."""
    _skip_if_absent(convolutions, case)
    x, w, dy = case.inputs(lambda shape: torch.randint(-2, 3, shape))
    reference = case.reference([x, w, dy])
    mine, theirs = x.shape[-1] // case.groups, dy.shape[-1] // case.groups
    x[..., :mine], dy[..., :theirs] = torch.inf, -torch.inf
    y, dx, dw = convolutions.one(case, [x, w, dy])
    assert torch.equal(y[..., theirs:], reference["fprop"][..., theirs:].to(case.dtype))
    assert torch.equal(dx[..., mine:], reference["dgrad"][..., mine:].to(case.dtype))
    assert torch.equal(dw[theirs:], reference["wgrad"][theirs:].to(case.dtype))


def test_an_infinity_stays_in_the_groups_that_are_taken_together(convolutions: Convolutions) -> None:
    """Hopper's kernels take groups of few channels together, 64 channels at most, where there are many pixels."""
    case = C("", 16, 128, 128, (33, 32), (3, 3), padding=(1,), groups=32, dtype=BF16)
    assert case.dtype in convolutions.dtypes
    x, w, dy = case.inputs(lambda shape: torch.randint(-2, 3, shape))
    reference = case.reference([x, w, dy])
    x[..., :4], dy[..., :4] = torch.inf, -torch.inf
    y, dx, dw = convolutions.one(case, [x, w, dy])
    assert torch.equal(y[..., 64:], reference["fprop"][..., 64:].to(case.dtype))
    assert torch.equal(dx[..., 64:], reference["dgrad"][..., 64:].to(case.dtype))
    assert torch.equal(dw[4:], reference["wgrad"][4:].to(case.dtype))


@pytest.mark.parametrize(("c", "k"), [(3, 32), (16, 16), (64, 3), (32, 32)])
def test_an_infinity_stays_near_its_windows(convolutions: Convolutions, c: int, k: int) -> None:
    """Where Hopper's kernels take few channels in blocks of pixels, zeros of their filters meet 16 pixels beside."""
    case = C("", 2, c, k, (9, 64), (3, 3), (1,), padding=(1,), dtype=BF16)
    assert case.dtype in convolutions.dtypes
    x, w, dy = case.inputs(lambda shape: torch.randint(-2, 3, shape))
    reference = case.reference([x, w, dy])
    x[0, 0, 4, 30], dy[0, 0, 4, 30] = torch.inf, torch.inf
    results = dict(zip(OPS, convolutions.one(case, [x, w, dy]), strict=True))
    for op in ("fprop", "dgrad"):
        result, wanted = results[op], reference[op].to(case.dtype)
        assert not result[0, 0, 3:6, 29:32].isfinite().any()
        wanted[0, 0, 3:6, 13:48] = result[0, 0, 3:6, 13:48]
        assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(wanted))


@pytest.mark.parametrize("channels", [58, 20])
def test_an_infinity_under_a_1x1_filter_stays_in_its_image(convolutions: Convolutions, channels: int) -> None:
    """Hopper's kernels take odd channels in blocks of pixels, which have no pixels of two images."""
    case = C("", 2, channels, channels, (6, 6), (1, 1), (1,), dtype=BF16)
    assert case.dtype in convolutions.dtypes
    x, w, dy = case.inputs(lambda shape: torch.randint(-2, 3, shape))
    reference = case.reference([x, w, dy])
    x[0, :, -1, -1], dy[1, :, 0, 0] = torch.inf, torch.inf
    results = dict(zip(OPS, convolutions.one(case, [x, w, dy]), strict=True))
    assert torch.equal(results["fprop"][1], reference["fprop"][1].to(BF16))
    assert torch.equal(results["dgrad"][0], reference["dgrad"][0].to(BF16))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("channels", "groups"), [(8, 2), (32, 4), (128, 16), (64, 1)])
def test_a_pixel_that_no_window_covers_is_not_read(
    convolutions: Convolutions, channels: int, groups: int, dtype: torch.dtype
) -> None:
    case = C("", 3, channels, channels, (8, 10), (3, 3), (2,), groups=groups, dtype=dtype)
    if dtype not in convolutions.dtypes:
        pytest.skip(f"{dtype} does not run on {convolutions.device}")
    tensors = case.inputs(lambda shape: torch.randint(-2, 3, shape))
    reference = case.reference(tensors)
    tensors[0][:, :, -1], tensors[0][:, :, :, -1] = torch.inf, torch.inf
    for op, result in zip(OPS, convolutions.one(case, tensors), strict=True):
        assert torch.equal(result, reference[op].to(dtype))
