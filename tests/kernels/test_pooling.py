"""The pooling kernels, by calls of their library functions: a table of cases, each checked against PyTorch in float64.

Each case runs contiguous ([N * C, D, H, W, 1]) and channels-last ([N, D, H, W, C]). Inputs of small whole numbers must
come out exactly, and they tie often, which is where maxima go wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from torch.nn import functional

from benchmarks.kernels.library import LAYOUTS, Guarded, LibraryCalls, shown
from benchmarks.kernels.listed import ListedGraph
from torch_max_backend.dtypes import TORCH_TO_MAX, device_ref
from torch_max_backend.mojo_ops import pooling
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.problems.pooling import AdaptivePoolingProblem, PoolingProblem
from torch_max_backend.runtime.engine import session

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, U8 = torch.int64, torch.uint8


@dataclass(frozen=True)
class Window:
    """One max or average problem; arguments as PyTorch takes them."""

    id: str
    n: int
    c: int
    size: tuple[int, ...]
    kernel: int | tuple[int, ...]
    stride: int | tuple[int, ...] | None = None
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None

    def problem(self, pass_: str) -> PoolingProblem:
        averages = pass_ == "avg"
        return PoolingProblem.from_aten(
            self.size,
            self.kernel,
            self.stride,
            self.padding,
            1 if averages else self.dilation,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


WINDOWS = (
    Window("2d_2_2", 2, 3, (8, 8), 2),
    Window("2d_3_2_1", 2, 5, (9, 11), 3, 2, 1),
    Window("2d_3_2_1_wide", 1, 2, (6, 75), 3, 2, 1),
    Window("2d_3_1_1", 2, 16, (7, 7), 3, 1, 1),
    Window("2d_3_1_1_c17", 2, 17, (5, 40), 3, 1, 1),
    Window("2d_2_1", 1, 33, (6, 6), 2, 1),
    Window("2d_ceil", 2, 4, (7, 10), 3, 2, 0, ceil_mode=True),
    Window("2d_ceil_pad", 2, 4, (6, 6), 3, 2, 1, ceil_mode=True),
    Window("2d_ceil_pad_real", 2, 4, (6, 6), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    Window("2d_ceil_overhang", 1, 3, (5, 8), 2, 3, 1, ceil_mode=True),
    Window("2d_dilated_overlap", 2, 3, (9, 9), 2, 2, 0, dilation=2),
    Window("2d_dilated_pad", 2, 8, (11, 13), 3, 2, 1, dilation=2),
    Window("2d_dilated_empty", 2, 3, (1, 5), 2, 1, 1, dilation=2),
    Window("2d_dilated_apart", 1, 4, (10, 10), 2, 2, 1, dilation=3),
    Window("2d_uneven", 2, 6, (13, 10), (5, 3), (3, 2), (2, 1)),
    Window("2d_gaps", 2, 3, (11, 14), 2, 3),
    Window("2d_large", 1, 4, (15, 15), 11, 1, 5),
    Window("2d_17x16_window", 1, 2, (17, 16), (17, 16)),
    Window("2d_global_7", 3, 5, (7, 7), 7),
    Window("2d_override_negative", 2, 3, (6, 7), 3, 2, 1, divisor_override=-4),
    Window("2d_override_one", 2, 8, (6, 7), 2, 1, divisor_override=1),
    Window("2d_one_pixel", 2, 3, (1, 1), 1),
    Window("2d_long_rows", 1, 1, (3, 150), 5, 2, 2),
    Window("2d_empty_batch", 0, 3, (8, 8), 3, 2, 1),
    Window("1d_2", 2, 3, (20,), 2),
    Window("1d_3_1_1", 2, 3, (37,), 3, 1, 1),
    Window("1d_4_3_ceil", 2, 16, (23,), 4, 3, 2, ceil_mode=True),
    Window("3d_2", 2, 3, (4, 6, 8), 2),
    Window("3d_3_1_1", 1, 4, (5, 6, 7), 3, 1, 1),
    Window("3d_3_2_1", 2, 3, (5, 7, 9), 3, 2, 1),
    Window("3d_uneven", 1, 20, (7, 6, 9), (1, 2, 3), (1, 2, 2), (0, 1, 1), ceil_mode=True),
    Window("3d_real_pad", 1, 2, (6, 5, 4), 3, 2, 1, count_include_pad=False),
    Window("3d_dilated", 1, 2, (7, 8, 9), 2, 1, 1, dilation=(2, 3, 2)),
    Window("3d_many_slabs", 1, 1, (40, 20, 24), 3, 2, 1),
    Window("2d_rows_of_a_plane", 1, 1, (130, 128), 3, 2, 1),
    Window("2d_4_4_c32", 2, 32, (8, 12), 4),
    Window("2d_3_2_1_c70", 1, 70, (7, 9), 3, 2, 1),
    Window("2d_7_3_3_c12", 2, 12, (20, 23), 7, 3, 3),
    Window("1d_4", 3, 4, (32,), 4),
    Window("3d_3_1_1_c8", 2, 8, (5, 6, 8), 3, 1, 1),
    Window("3d_3_1_1_real", 1, 4, (3, 5, 8), 3, 1, 1, count_include_pad=False),
    Window("2d_3_1_1_rows_of_8", 1, 4, (9, 16), 3, 1, 1),
    Window("2d_5_1_2_rows_of_4", 2, 4, (11, 12), 5, 1, 2),
    Window("2d_7_3_3_rows_of_12", 1, 6, (14, 24), 7, 3, 3),
    Window("2d_dilated_rows_of_8", 2, 4, (9, 16), 2, 2, 1, dilation=2),
    Window("2d_2_2_rows_of_10", 2, 3, (7, 10), 2),
    Window("2d_2_2_odd", 3, 5, (7, 9), 2),
    Window("2d_4_4_rows_of_12", 2, 3, (9, 12), 4),
    Window("2d_8_8_odd", 3, 3, (17, 23), 8),
    Window("2d_8_8", 2, 3, (16, 40), 8),
    Window("2d_8_8_pad", 1, 3, (21, 35), 8, 8, (3, 0), count_include_pad=False),
    Window("3d_2x16x8", 1, 3, (5, 16, 17), (2, 16, 8)),
    Window("2d_dilated_c18", 1, 18, (7, 9), 2, 2, 1, dilation=2),
    Window("2d_dilated_empty_c16", 2, 16, (1, 5), 2, 1, 1, dilation=2),
    Window("3d_2_c16", 2, 16, (5, 4, 7), 2),
    Window("3d_3_2_1_c32", 1, 32, (5, 6, 7), 3, 2, 1),
    Window("2d_3_2_1_odd_rows", 3, 7, (30, 27), 3, 2, 1),
    Window("2d_3_2_odd_rows", 2, 5, (25, 29), 3, 2, 0),
    Window("2d_3_1_1_odd_rows", 2, 3, (13, 35), 3, 1, 1, count_include_pad=False),
    Window("2d_3_1_1_strips", 2, 9, (33, 28), 3, 1, 1),
    Window("2d_2_1_rows_of_28", 3, 5, (21, 28), 2, 1),
    Window("2d_2_1_odd_rows", 2, 3, (9, 31), 2, 1),
    Window("2d_3_1_1_teams", 1, 2, (5, 268), 3, 1, 1),
    Window("2d_3_1_1_teams_c12", 1, 12, (4, 41), 3, 1, 1),
    Window("2d_3_2_1_teams_c4", 2, 4, (9, 50), 3, 2, 1),
    Window("2d_8_8_odd_rows", 2, 3, (33, 31), 8),
    Window("2d_dilated_c8", 2, 8, (10, 37), 2, 2, 1, dilation=2),
    Window("3d_3_1_1_rows_of_8", 1, 5, (5, 9, 8), 3, 1, 1),
    Window("3d_3_2_1_rows_of_8", 2, 5, (7, 9, 16), 3, 2, 1),
    Window("2d_5_1_2_pieces", 5, 7, (20, 20), 5, 1, 2),
    Window("2d_7_3_3_strips", 1, 2, (131, 92), 7, 3, 3),
    Window("2d_5x3_pieces", 3, 11, (31, 43), (5, 3), (3, 2), (2, 1)),
    Window("2d_4_1_2", 3, 5, (10, 9), 4, 1, 2),
    Window("2d_6_1_rows_of_7", 3, 5, (9, 12), 6, 1),
    Window("2d_narrow", 3, 5, (9, 2), 3, 1, 1),
    Window("2d_2_2_small", 41, 5, (7, 7), 2),
    Window("2d_many_planes", 250, 256, (7, 7), 3, 1, 1),
    Window("2d_3_1_1_bands", 1, 2, (61, 113), 3, 1, 1),
    Window("2d_2_1_bands", 1, 2, (75, 96), 2, 1),
    Window("2d_2_1_2_dilated_bands", 2, 1, (64, 70), 2, 1, 1, dilation=2),
    Window("1d_3_1_1_long", 2, 3, (3100,), 3, 1, 1),
    Window("1d_9_1_4_long", 1, 2, (700,), 9, 1, 4),
    Window("3d_2_1_runs", 1, 2, (4, 20, 26), 2, 1),
    Window("3d_2x2x2_stride_2x1x1", 1, 2, (5, 20, 26), 2, (2, 1, 1)),
    Window("2d_2x3_stride_2x1", 2, 3, (9, 33), (2, 3), (2, 1), (0, 1)),
    Window("2d_2_2_c6", 40, 6, (9, 11), 2),
    Window("2d_2_2_c12_ceil", 3, 12, (8, 13), 2, ceil_mode=True),
    Window("2d_2_2_c70", 1, 70, (6, 7), 2),
    Window("2d_2_2_c64_long", 1, 64, (5, 41), 2),
    Window("1d_2_c6_short", 700, 6, (2,), 2),
    Window("1d_2_c9_shorter", 2000, 9, (1,), 1),
    Window("3d_2_c32_ceil", 2, 32, (5, 4, 7), 2, ceil_mode=True),
    Window("3d_1x2x2_c7", 3, 7, (5, 6, 9), (1, 2, 2)),
    Window("3d_1x3x3", 1, 5, (3, 9, 12), (1, 3, 3), (1, 1, 1), (0, 1, 1)),
    Window("2d_3_1_1_box_odd_rows", 2, 8, (3, 35), 3, 1, 1),
    Window("2d_3_1_1_box_one_row", 2, 16, (1, 19), 3, 1, 1),
    Window("2d_3_1_1_box_two_rows", 3, 8, (2, 24), 3, 1, 1),
    Window("2d_3_1_1_box_warps", 2, 4, (40, 52), 3, 1, 1),
    Window("2d_3_1_1_c24_tall", 2, 24, (21, 5), 3, 1, 1),
    Window("3d_3_1_1_box_strips", 1, 4, (19, 5, 16), 3, 1, 1),
    Window("2d_2_2_c10_tall", 2, 10, (35, 4), 2),
    Window("2d_2_2_rows_of_48", 3, 20, (18, 48), 2),
    Window("2d_3_2_1_c32_tall", 1, 32, (40, 9), 3, 2, 1),
    Window("2d_2_1_c16_tall", 1, 16, (37, 6), 2, 1),
    Window("2d_3_1_1_blocks", 2, 32, (23, 29), 3, 1, 1),
    Window("2d_5_1_2_blocks", 1, 64, (20, 21), 5, 1, 2),
    Window("2d_4x3_1_blocks", 2, 32, (31, 17), (4, 3), 1, (2, 0)),
    Window("2d_3x5_1_blocks", 1, 32, (9, 64), (3, 5), 1, (1, 2)),
    Window("2d_4x5_1_blocks", 1, 32, (13, 29), (4, 5), 1, 2),
    Window("2d_3_1_1_c20", 2, 20, (9, 41), 3, 1, 1),
    Window("3d_3_1_1_c20_tall", 1, 20, (4, 53, 17), 3, 1, 1),
    Window("3d_3_2_1_c12_teams", 2, 12, (5, 9, 81), 3, 2, 1),
    Window("3d_3_2_1_c24", 1, 24, (4, 27, 10), 3, 2, 1),
    Window("3d_3_2_1_c64_real", 1, 64, (3, 9, 21), 3, 2, 1, count_include_pad=False),
)


@dataclass(frozen=True)
class Adaptive:
    id: str
    n: int
    c: int
    size: tuple[int, ...]
    output: tuple[int, ...]


ADAPTIVES = (
    Adaptive("2d_1", 2, 5, (7, 7), (1, 1)),
    Adaptive("2d_divides", 2, 16, (8, 12), (4, 3)),
    Adaptive("2d_uneven", 2, 3, (7, 11), (3, 5)),
    Adaptive("2d_grows", 2, 3, (3, 4), (7, 5)),
    Adaptive("2d_same", 1, 18, (5, 6), (5, 6)),
    Adaptive("1d", 2, 4, (13,), (5,)),
    Adaptive("3d", 2, 3, (5, 7, 6), (2, 3, 4)),
    Adaptive("2d_empty_batch", 0, 3, (8, 8), (2, 2)),
)


def to_logical(t: torch.Tensor, shape: torch.Size, layout: str) -> torch.Tensor:
    if layout == "channels_last":
        t = t.permute(0, 4, 1, 2, 3)
    return t.reshape(shape)


def dtypes_on(device: str) -> tuple[torch.dtype, ...]:
    # float16 takes the paths of bfloat16; one of the two is enough where compiling is slow.
    return (F32, F64, BF16) if device == "cpu" else (F32, BF16, F16)


class Maxima(NamedTuple):
    """What the kernels of maxima make of one problem; None what an offset of one byte cannot say.

    ``foreign`` indices are not those of the maxima.
    """

    y: torch.Tensor
    indices: torch.Tensor
    y_of_offsets: torch.Tensor | None
    dx: torch.Tensor
    dx_of_offsets: torch.Tensor | None
    scattered: torch.Tensor
    dx_foreign: torch.Tensor
    scattered_foreign: torch.Tensor
    unpooled_foreign: torch.Tensor
    taken_foreign: torch.Tensor

    @property
    def repeatable(self) -> list[torch.Tensor]:
        """Those without atomic additions and racing stores."""
        found = (self.y, self.indices, self.y_of_offsets, self.dx, self.dx_of_offsets, self.dx_foreign)
        return [each for each in (*found, self.taken_foreign) if each is not None]


class Pools(LibraryCalls):
    """The library functions of pooling on one device, each for any problem of a dtype."""

    family = pooling.FAMILY

    def __init__(self, device: str) -> None:
        self.dtypes = dtypes_on(device)
        super().__init__(torch.device(device), self.dtypes)

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        plain = "avg_pool_fprop", "avg_pool_dgrad", "max_pool_dgrad_scatter", "max_unpool_fprop", "max_unpool_dgrad"
        for dtype in dtypes:
            for entry, kept in itertools.product(("max_pool_fprop", "max_pool_dgrad"), (I64, U8)):
                yield self._function(entry, dtype, kept, False)
            for entry in ("max_pool_fprop", "max_pool_dgrad"):
                yield self._function(entry, dtype, I64, True)
            yield from (self._function(entry, dtype, None, False) for entry in plain)

    def _function(self, entry: str, dtype: torch.dtype, kept: torch.dtype | None, adaptive: bool) -> LibraryFunction:
        return pooling.pool_function(entry, self.target, TORCH_TO_MAX[dtype], kept and TORCH_TO_MAX[kept], adaptive)

    def call(
        self,
        entry: str,
        results: Sequence[tuple[torch.Size, torch.dtype]],
        operands: Sequence[torch.Tensor],
        problem: PoolingProblem | AdaptivePoolingProblem,
    ) -> list[torch.Tensor]:
        """Results of these shapes and dtypes on the kernels' tensors, all on the device."""
        kept = {"max_pool_fprop": results[-1][1], "max_pool_dgrad": operands[-1].dtype}.get(entry)
        adaptive = kept is not None and isinstance(problem, AdaptivePoolingProblem)
        function = self._function(entry, operands[0].dtype, kept, adaptive)
        made = [Guarded(shape, dtype, self.device) for shape, dtype in results]
        numbers = problem.numbers() if self.family[entry].takes_numbers else []
        self.bind(function, *(each.tensor for each in made), *operands, numbers=numbers)()
        assert all(each.is_intact() for each in made), f"{entry} wrote outside its results"
        return [each.tensor for each in made]

    def maxima(
        self, x: torch.Tensor, dy: torch.Tensor, foreign: torch.Tensor, problem: PoolingProblem, layout: str
    ) -> Maxima:
        """All that is made of logical tensors, as logical tensors on the CPU."""
        own_x, own_dy, own_foreign = (shown(each, layout).to(self.device) for each in (x, dy, foreign))
        large, small = (own_x.shape, x.dtype), (own_dy.shape, x.dtype)

        def gradient(entry: str, argmaxes: torch.Tensor) -> torch.Tensor:
            (result,) = self.call(entry, [large], [own_dy, argmaxes], problem)
            return to_logical(result.cpu(), x.shape, layout)

        y, indices = self.call("max_pool_fprop", [small, (own_dy.shape, I64)], [own_x], problem)
        y_of_offsets = dx_of_offsets = None
        if problem.has_byte_offsets:
            same, offsets = self.call("max_pool_fprop", [small, (own_dy.shape, U8)], [own_x], problem)
            y_of_offsets = to_logical(same.cpu(), dy.shape, layout)
            dx_of_offsets = gradient("max_pool_dgrad", offsets)
        (taken,) = self.call("max_unpool_dgrad", [small], [own_x, own_foreign], problem)
        return Maxima(
            to_logical(y.cpu(), dy.shape, layout),
            to_logical(indices.cpu(), dy.shape, layout),
            y_of_offsets,
            gradient("max_pool_dgrad", indices),
            dx_of_offsets,
            gradient("max_pool_dgrad_scatter", indices),
            gradient("max_pool_dgrad", own_foreign),
            gradient("max_pool_dgrad_scatter", own_foreign),
            gradient("max_unpool_fprop", own_foreign),
            to_logical(taken.cpu(), dy.shape, layout),
        )

    def averages(
        self, x: torch.Tensor, dy: torch.Tensor, problem: PoolingProblem, layout: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Averages of ``x``, and their gradient."""
        own_x, own_dy = (shown(each, layout).to(self.device) for each in (x, dy))
        (y,) = self.call("avg_pool_fprop", [(own_dy.shape, x.dtype)], [own_x], problem)
        (dx,) = self.call("avg_pool_dgrad", [(own_x.shape, x.dtype)], [own_dy], problem)
        return to_logical(y.cpu(), dy.shape, layout), to_logical(dx.cpu(), x.shape, layout)

    def adaptive_maxima(
        self, x: torch.Tensor, dy: torch.Tensor, problem: AdaptivePoolingProblem, layout: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maxima of ``x`` over adaptive windows, their indices, and their gradient."""
        own_x, own_dy = (shown(each, layout).to(self.device) for each in (x, dy))
        results = [(own_dy.shape, x.dtype), (own_dy.shape, I64)]
        y, indices = self.call("max_pool_fprop", results, [own_x], problem)
        (dx,) = self.call("max_pool_dgrad", [(own_x.shape, x.dtype)], [own_dy, indices], problem)
        small = [to_logical(each.cpu(), dy.shape, layout) for each in (y, indices)]
        return small[0], small[1], to_logical(dx.cpu(), x.shape, layout)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}[dtype]


def assert_close(got: torch.Tensor, wanted: torch.Tensor, length: int) -> None:
    """Within the rounding of the result's dtype; sums of `length` addends of size one are kept in float32."""
    assert got.shape == wanted.shape
    rtol = tolerance(got.dtype)
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol * 0.5 * math.sqrt(length))


def seeded(case_id: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, case_id)))


def max_reference(x: torch.Tensor, case: Window) -> tuple[torch.Tensor, torch.Tensor]:
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(case.size) - 1]
    if x.shape[0] == 0:
        shape = (0, case.c, *case.problem("max").output_spatial)
        return x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64)
    return pool(
        x.double(),
        case.kernel,
        case.stride,
        case.padding,
        case.dilation,
        case.ceil_mode,
        return_indices=True,
    )


def scatter_reference(dy: torch.Tensor, indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Adds dy at the indices, flat in each plane; those outside the plane are left out."""
    plane = math.prod(shape[2:])
    inside = (indices >= 0) & (indices < plane)
    total = torch.zeros(*shape[:2], plane, dtype=F64)
    total.scatter_add_(2, (indices * inside).flatten(2), (dy.double() * inside).flatten(2))
    return total.view(shape)


def spoil(indices: torch.Tensor, plane: int) -> torch.Tensor:
    """A third of the indices replaced by ones outside the plane, some of them absurdly far."""
    outside = torch.tensor([-1, plane, plane + 7, 2**40, -(2**62), -plane])
    flat = indices.clone().flatten()
    flat[::3] = outside[torch.arange(flat[::3].numel()) % len(outside)]
    return flat.view(indices.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_max(pools: Pools, case: Window, layout: str) -> None:
    problem = case.problem("max")
    for dtype in pools.dtypes:
        generator = seeded(case.id)
        x = whole_numbers((case.n, case.c, *case.size), dtype, generator)
        y, indices = max_reference(x, case)
        dy = whole_numbers(tuple(y.shape), dtype, generator)
        plane = math.prod(case.size)
        foreign = spoil(indices, plane)
        if not problem.has_byte_offsets:
            own_x, own_y = (shown(each, layout).to(pools.device) for each in (x, dy))
            with pytest.raises(RuntimeError, match="one byte"):
                pools.call("max_pool_fprop", [(own_y.shape, dtype), (own_y.shape, U8)], [own_x], problem)
        got = pools.maxima(x, dy, foreign, problem, layout)
        again = pools.maxima(x, dy, foreign, problem, layout)
        dx = scatter_reference(dy, indices, x.shape)
        assert torch.equal(got.indices, indices)
        for result, wanted in ((got.y, y), (got.y_of_offsets, y), (got.dx, dx), (got.dx_of_offsets, dx)):
            assert result is None or torch.equal(result.double(), wanted.double())
        assert torch.equal(got.scattered.double(), dx)
        dx_foreign = scatter_reference(dy, foreign, x.shape)
        for result in (got.dx_foreign, got.scattered_foreign):
            assert torch.equal(result.double(), dx_foreign)
        inside = (foreign >= 0) & (foreign < plane)
        if problem.overlaps:  # which of several values stays is not defined
            reached = scatter_reference(torch.ones_like(dy), foreign, x.shape) > 0
            assert not got.unpooled_foreign[~reached].any()
        else:
            assert torch.equal(got.unpooled_foreign.double(), dx_foreign)
        taken = x.flatten(2).gather(2, (foreign * inside).flatten(2)).view(y.shape) * inside
        assert torch.equal(got.taken_foreign, taken)
        pairs = zip(got.repeatable, again.repeatable, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), "differs from run to run"
        if pools.device.type == "cpu":
            for one, other in zip(got, again, strict=True):
                assert one is other or torch.equal(one, other), "differs from run to run"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [c for c in WINDOWS if c.n], ids=lambda case: case.id)
def test_max_nan_and_infinity(pools: Pools, case: Window, layout: str) -> None:
    problem = case.problem("max")
    for dtype in pools.dtypes:
        generator = seeded(case.id)
        x = torch.randn((case.n, case.c, *case.size), generator=generator).to(dtype)
        kind = torch.randint(0, 8, x.shape, generator=generator)
        x = x.masked_fill(kind == 0, math.nan).masked_fill(kind == 1, math.inf)
        x = x.masked_fill((kind == 2) | (torch.arange(case.size[-1]) < 4), -math.inf)
        y, indices = max_reference(x, case)
        dy = torch.randn(y.shape, generator=generator).to(dtype)
        got = pools.maxima(x, dy, indices, problem, layout)
        assert torch.equal(got.indices, indices)
        assert torch.equal(got.y.isnan(), y.isnan())
        assert torch.equal(got.y.double().nan_to_num(), y.nan_to_num())
        dx = scatter_reference(dy, indices, x.shape)
        for result in (got.dx, got.dx_of_offsets, got.scattered, got.scattered_foreign):
            if result is not None:
                assert_close(result, dx, problem.windows_above)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_avg(pools: Pools, case: Window, layout: str) -> None:
    problem = case.problem("avg")
    rank = len(case.size)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    override = () if rank == 1 else (case.divisor_override,)
    for dtype in pools.dtypes:
        generator = seeded(case.id)
        x = torch.randn((case.n, case.c, *case.size), generator=generator).to(dtype)
        leaf = x.double().clone().requires_grad_()
        if case.n == 0:
            y = x.new_zeros((0, case.c, *problem.output_spatial)).double()
        else:
            y = pool(
                leaf,
                case.kernel,
                case.stride,
                case.padding,
                case.ceil_mode,
                case.count_include_pad,
                *override,
            )
        dy = torch.randn(y.shape, generator=generator).to(dtype)
        dx = torch.autograd.grad(y, leaf, dy.double())[0] if case.n else torch.zeros_like(leaf)
        got = pools.averages(x, dy, problem, layout)
        assert_close(got[0], y.detach(), problem.window_size)
        assert_close(got[1], dx, problem.windows_above)
        again = pools.averages(x, dy, problem, layout)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ADAPTIVES, ids=lambda case: case.id)
def test_adaptive(pools: Pools, case: Adaptive, layout: str) -> None:
    problem = AdaptivePoolingProblem.from_aten(case.size, case.output)
    rank = len(case.size)
    pool_max = (
        functional.adaptive_max_pool1d,
        functional.adaptive_max_pool2d,
        functional.adaptive_max_pool3d,
    )[rank - 1]
    for dtype in pools.dtypes:
        generator = seeded(case.id)
        x = whole_numbers((case.n, case.c, *case.size), dtype, generator)
        leaf = x.double().clone().requires_grad_()
        shape = (case.n, case.c, *case.output)
        if case.n:
            y, indices = pool_max(leaf, case.output, return_indices=True)
        else:
            y = leaf.new_zeros(shape)
            indices = torch.zeros(shape, dtype=torch.int64)
        dy = whole_numbers(shape, dtype, generator)
        got = pools.adaptive_maxima(x, dy, problem, layout)
        assert torch.equal(got[0].double(), y.detach())
        assert torch.equal(got[1], indices)
        assert torch.equal(got[2].double(), scatter_reference(dy, indices, x.shape))


def test_kernels_refuse_wrong_extents(pools: Pools) -> None:
    """Sizes that the geometry does not give are an error of the function, before any memory is touched."""
    problem = PoolingProblem.from_aten((8, 8), 2)
    x = torch.zeros(1, 1, 8, 8, 1, device=pools.device)
    with pytest.raises(RuntimeError, match=r"output\.H=2: the extent that the geometry gives is 4"):
        pools.call("avg_pool_fprop", [(torch.Size((1, 1, 2, 2, 1)), F32)], [x], problem)


TYPED = PoolingProblem.from_aten((9, 7), 3, 2, 1)
TYPED_UNDIVIDED = PoolingProblem.from_aten((9, 7), 3, 2, 1, divisor_override=1)
TYPED_ADAPTIVE = AdaptivePoolingProblem.from_aten((9, 7), (3, None))


def typed(x: TensorValue) -> list[TensorValue]:
    """What the typed functions make of [N, 1, 9, 7, C]: forward, then gradients."""
    y, indices = pooling.max_pool_fprop(x, TYPED)
    y_too, offsets = pooling.max_pool_fprop_offsets(x, TYPED)
    mean = pooling.avg_pool_fprop(x, TYPED_UNDIVIDED)
    best, places = pooling.adaptive_max_pool_fprop(x, TYPED_ADAPTIVE)
    return [
        *(y, indices, y_too, offsets, mean, best, places),
        pooling.max_pool_dgrad(y, indices, TYPED),
        pooling.max_pool_dgrad_offsets(y_too, offsets, TYPED),
        pooling.max_pool_dgrad_scatter(y, indices, TYPED),
        pooling.avg_pool_dgrad(mean, TYPED_UNDIVIDED),
        pooling.adaptive_max_pool_dgrad(best, places, TYPED_ADAPTIVE),
        pooling.max_unpool_fprop(y, indices, TYPED.input),
        pooling.max_unpool_dgrad(x, indices),
    ]


def test_typed_functions_keep_a_symbolic_batch() -> None:
    kind = TensorType(DType.float32, ("batch", 1, 9, 7, 4), DeviceRef.CPU())
    with Graph("typed", input_types=[kind], kernel_library=session.library_to_build_with()) as graph:
        assert all(str(value.shape[0]) == "batch" for value in typed(graph.inputs[0].tensor))
        graph.output()


def test_typed_functions(pools: Pools) -> None:
    """They reach the kernels and give the shapes that PyTorch gives."""
    kind = TensorType(DType.float32, (3, 1, 9, 7, 4), device_ref(pools.device))
    logical = whole_numbers((3, 4, 9, 7), F32, seeded("typed"))
    listed = ListedGraph([kind], lambda values: typed(values[0]), pools.device).load()
    results = [each.cpu() for each in listed(shown(logical, "channels_last").to(pools.device))]
    leaf = logical.clone().requires_grad_()
    y, indices = functional.max_pool2d(leaf, 3, 2, 1, return_indices=True)
    dx = torch.autograd.grad(y, leaf, y.detach())[0]
    mean = functional.avg_pool2d(leaf, 3, 2, 1, divisor_override=1)
    mean_dx = torch.autograd.grad(mean, leaf, mean.detach())[0]
    best, places = functional.adaptive_max_pool2d(leaf, (3, 7), return_indices=True)
    best_dx = torch.autograd.grad(best, leaf, best.detach())[0]
    wanted = [*(y, indices, y, None, mean, best, places), dx, dx, dx, mean_dx, best_dx, None, y]
    for number, (result, truth) in enumerate(zip(results, wanted, strict=True)):
        if truth is not None:
            assert torch.equal(to_logical(result, truth.shape, "channels_last"), truth), f"result {number}"
    spread = to_logical(results[12], leaf.shape, "channels_last").flatten(2)
    assert torch.equal(spread.gather(2, indices.flatten(2)).view_as(y), y.detach())
