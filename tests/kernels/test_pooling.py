"""The pooling ops, without the lowering: every case is one entry of a table, checked against PyTorch in float64.

The ops are compiled once for each dtype with all sizes symbolic, so a further case costs no compile. Each case runs
contiguous ([N * C, D, H, W, 1]) and channels-last ([N, D, H, W, C]). Inputs of small whole numbers must come out
exactly, and they tie often, which is where maxima go wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType
from torch.nn import functional

from tests.kernels import together
from torch_max_backend.mojo_ops import pooling
from torch_max_backend.problems.pooling import NUMBERS, AdaptivePoolingProblem, PoolingProblem
from torch_max_backend.runtime import session

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = {F32: DType.float32, F64: DType.float64, BF16: DType.bfloat16, F16: DType.float16}
LAYOUTS = ("contiguous", "channels_last")
GIVEN, MADE = ("n", "d", "h", "w", "c"), ("n", "e0", "e1", "e2", "c")


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

#: What the typed functions are called with.
TYPED = PoolingProblem.from_aten((9, 7), 3, 2, 1)
TYPED_UNDIVIDED = PoolingProblem.from_aten((9, 7), 3, 2, 1, divisor_override=1)
TYPED_ADAPTIVE = AdaptivePoolingProblem.from_aten((9, 7), (3, None))


def to_physical(t: torch.Tensor, layout: str) -> torch.Tensor:
    """[N, C, spatial...] as the kernels take it."""
    while t.dim() < 5:
        t = t.unsqueeze(2)
    if layout == "channels_last":
        return t.permute(0, 2, 3, 4, 1).contiguous()
    n, c, d, h, w = t.shape
    return t.contiguous().view(n * c, d, h, w, 1)


def to_logical(t: torch.Tensor, shape: torch.Size, layout: str) -> torch.Tensor:
    if layout == "channels_last":
        t = t.permute(0, 4, 1, 2, 3)
    return t.reshape(shape)


def dtypes_on(device: str) -> tuple[torch.dtype, ...]:
    # float16 takes the paths of bfloat16; one of the two is enough where compiling is slow.
    return (F32, F64, BF16) if device == "cpu" else (F32, BF16, F16)


def graph_name(family: str, dtype: torch.dtype) -> str:
    return f"{family}_{dtype}".replace(".", "_")


class _Graphs:
    """Adds the pooling ops for one device to a module, one graph for each dtype and family, all sizes symbolic."""

    def __init__(self, module: Module, place: torch.device) -> None:
        self.module = module
        self.ref = DeviceRef.CPU() if place.type == "cpu" else DeviceRef.GPU()
        self.names: list[str] = []
        for dtype in dtypes_on(place.type):
            for build in (self._max, self._avg, self._adaptive):
                build(dtype)
        self._typed()

    def _graph(self, name: str, inputs: list[TensorType]) -> Graph:
        self.names.append(name)
        return Graph(name, input_types=inputs, kernel_library=session.kernel_library(), module=self.module)

    def _with_geometry(self, family: str, dtype: torch.dtype, inputs: list[TensorType]) -> Graph:
        host = DeviceRef.CPU()
        extents = [TensorType(DType.uint8, (e,), host) for e in MADE[1:4]]
        return self._graph(
            graph_name(family, dtype), [*inputs, TensorType(DType.int64, (len(NUMBERS),), host), *extents]
        )

    def _types(self, dtype: torch.dtype) -> tuple[TensorType, TensorType, TensorType, TensorType]:
        x, y = (TensorType(DTYPES[dtype], dims, self.ref) for dims in (GIVEN, MADE))
        return x, y, TensorType(DType.int64, MADE, self.ref), TensorType(DType.uint8, MADE, self.ref)

    def _typed(self) -> None:
        """The typed functions, which infer the shapes, with a symbolic batch."""
        types = [TensorType(DType.float32, ("batch", 1, 9, 7, 4), self.ref)]
        problem, undivided, adaptive = TYPED, TYPED_UNDIVIDED, TYPED_ADAPTIVE
        with self._graph("typed", types) as graph:
            x = graph.inputs[0].tensor
            y, indices = pooling.max_pool_fprop(x, problem)
            y_too, offsets = pooling.max_pool_fprop_offsets(x, problem)
            mean = pooling.avg_pool_fprop(x, undivided)
            best, places = pooling.adaptive_max_pool_fprop(x, adaptive)
            graph.output(
                pooling.max_pool_dgrad(y, indices, problem),
                pooling.max_pool_dgrad_offsets(y_too, offsets, problem),
                pooling.max_pool_dgrad_scatter(y, indices, problem),
                pooling.avg_pool_dgrad(mean, undivided),
                pooling.adaptive_max_pool_dgrad(best, places, adaptive),
                pooling.max_unpool_fprop(y, indices, problem.input),
                pooling.max_unpool_dgrad(x, indices),
            )
            assert all(str(v.shape[0]) == "batch" for v in (y, indices, offsets, mean, best))

    def _max(self, dtype: torch.dtype) -> None:
        x_type, y_type, index_type, offset_type = self._types(dtype)
        with self._with_geometry("max", dtype, [x_type, y_type, index_type]) as graph:
            x, dy, foreign, geometry = (value.tensor for value in graph.inputs[:4])

            def op(name: str, values: list[Any], types: list[TensorType]) -> list[Any]:
                numbers = geometry if pooling.FAMILY[name].takes_numbers else ()
                return pooling.pool_op(name, values, types, numbers)

            y, indices = op("max_pool_fprop", [x], [y_type, index_type])
            y_too, offsets = op("max_pool_fprop", [x], [y_type, offset_type])
            gathered = op("max_pool_dgrad", [dy, indices], [x_type])
            by_offset = op("max_pool_dgrad", [dy, offsets], [x_type])
            scattered = op("max_pool_dgrad_scatter", [dy, indices], [x_type])
            gathered_foreign = op("max_pool_dgrad", [dy, foreign], [x_type])
            scattered_foreign = op("max_pool_dgrad_scatter", [dy, foreign], [x_type])
            unpooled = op("max_unpool_fprop", [dy, foreign], [x_type])
            taken = op("max_unpool_dgrad", [x, foreign], [y_type])
            graph.output(
                *(y, indices, y_too, offsets, *gathered, *by_offset, *scattered),
                *(*gathered_foreign, *scattered_foreign, *unpooled, *taken),
            )

    def _avg(self, dtype: torch.dtype) -> None:
        x_type, y_type, *_ = self._types(dtype)
        with self._with_geometry("avg", dtype, [x_type, y_type]) as graph:
            x, dy, geometry = (value.tensor for value in graph.inputs[:3])
            y = pooling.pool_op("avg_pool_fprop", [x], [y_type], geometry)
            dx = pooling.pool_op("avg_pool_dgrad", [dy], [x_type], geometry)
            graph.output(*y, *dx)

    def _adaptive(self, dtype: torch.dtype) -> None:
        x_type, y_type, index_type, _ = self._types(dtype)
        with self._with_geometry("adaptive", dtype, [x_type, y_type]) as graph:
            x, dy, geometry = (value.tensor for value in graph.inputs[:3])

            def op(name: str, values: list[Any], types: list[TensorType]) -> list[Any]:
                return pooling.pool_op(name, values, types, geometry, adaptive=True)

            y, indices = op("max_pool_fprop", [x], [y_type, index_type])
            dx = op("max_pool_dgrad", [dy, indices], [x_type])
            graph.output(y, indices, *dx)


@together.part("tests/kernels/test_pooling.py", "tests/kernels/test_pooling_properties.py")
def add_graphs(module: Module, place: torch.device) -> list[str]:
    return _Graphs(module, place).names


class Compiled:
    """The pooling ops on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dtypes = dtypes_on(device)
        self.models = together.models(device)

    def run(
        self,
        family: str,
        tensors: list[torch.Tensor],
        problem: PoolingProblem | AdaptivePoolingProblem,
        layout: str,
        shapes: list[torch.Size],
    ) -> list[torch.Tensor]:
        """Results as logical tensors of `shapes`, on the CPU."""
        dtype = tensors[0].dtype
        physical = [to_physical(t, layout).to(self.device) for t in tensors]
        host = [
            torch.tensor(problem.numbers()),
            *(torch.zeros(extent, dtype=torch.uint8) for extent in problem.output),
        ]
        model = self.models[graph_name(family, dtype)]
        results = model.execute(*(Buffer.from_dlpack(t) for t in [*physical, *host]))
        return [
            to_logical(torch.from_dlpack(result).cpu(), shape, layout)
            for result, shape in zip(results, shapes, strict=True)
        ]


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
def test_max(compiled: Compiled, case: Window, layout: str) -> None:
    problem = case.problem("max")
    for dtype in compiled.dtypes:
        generator = seeded(case.id)
        x = whole_numbers((case.n, case.c, *case.size), dtype, generator)
        y, indices = max_reference(x, case)
        dy = whole_numbers(tuple(y.shape), dtype, generator)
        plane = math.prod(case.size)
        foreign = spoil(indices, plane)
        shapes = [*([y.shape] * 4), *([x.shape] * 6), y.shape]
        if not problem.has_byte_offsets:
            with pytest.raises(ValueError, match="one byte"):
                compiled.run("max", [x, dy, foreign], problem, layout, shapes)
            continue
        got = compiled.run("max", [x, dy, foreign], problem, layout, shapes)
        again = compiled.run("max", [x, dy, foreign], problem, layout, shapes)
        assert torch.equal(got[0].double(), y.double())
        assert torch.equal(got[1], indices)
        assert torch.equal(got[2].double(), y.double())
        dx = scatter_reference(dy, indices, x.shape)
        for result in got[4:7]:
            assert torch.equal(result.double(), dx)
        dx_foreign = scatter_reference(dy, foreign, x.shape)
        for result in got[7:9]:
            assert torch.equal(result.double(), dx_foreign)
        inside = (foreign >= 0) & (foreign < plane)
        if problem.overlaps:  # which of several values stays is not defined
            reached = scatter_reference(torch.ones_like(dy), foreign, x.shape) > 0
            assert not got[9][~reached].any()
        else:
            assert torch.equal(got[9].double(), dx_foreign)
        taken = x.flatten(2).gather(2, (foreign * inside).flatten(2)).view(y.shape) * inside
        assert torch.equal(got[10], taken)
        for index, (one, other) in enumerate(zip(got, again, strict=True)):
            if index not in (6, 8, 9) or compiled.device == "cpu":  # atomics, and racing stores
                assert torch.equal(one, other), f"result {index} differs from run to run"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [c for c in WINDOWS if c.n], ids=lambda case: case.id)
def test_max_nan_and_infinity(compiled: Compiled, case: Window, layout: str) -> None:
    problem = case.problem("max")
    if not problem.has_byte_offsets:
        pytest.skip("test_max checks that this window is refused as one byte")
    for dtype in compiled.dtypes:
        generator = seeded(case.id)
        x = torch.randn((case.n, case.c, *case.size), generator=generator).to(dtype)
        kind = torch.randint(0, 8, x.shape, generator=generator)
        x = x.masked_fill(kind == 0, math.nan).masked_fill(kind == 1, math.inf)
        x = x.masked_fill((kind == 2) | (torch.arange(case.size[-1]) < 4), -math.inf)
        y, indices = max_reference(x, case)
        dy = torch.randn(y.shape, generator=generator).to(dtype)
        shapes = [*([y.shape] * 4), *([x.shape] * 6), y.shape]
        got = compiled.run("max", [x, dy, indices], problem, layout, shapes)
        assert torch.equal(got[1], indices)
        assert torch.equal(got[0].isnan(), y.isnan())
        assert torch.equal(got[0].double().nan_to_num(), y.nan_to_num())
        dx = scatter_reference(dy, indices, x.shape)
        for result in (*got[4:7], got[8]):
            assert_close(result, dx, problem.windows_above)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_avg(compiled: Compiled, case: Window, layout: str) -> None:
    problem = case.problem("avg")
    rank = len(case.size)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    override = () if rank == 1 else (case.divisor_override,)
    for dtype in compiled.dtypes:
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
        got = compiled.run("avg", [x, dy], problem, layout, [y.shape, x.shape])
        assert_close(got[0], y.detach(), problem.window_size)
        assert_close(got[1], dx, problem.windows_above)
        again = compiled.run("avg", [x, dy], problem, layout, [y.shape, x.shape])
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ADAPTIVES, ids=lambda case: case.id)
def test_adaptive(compiled: Compiled, case: Adaptive, layout: str) -> None:
    problem = AdaptivePoolingProblem.from_aten(case.size, case.output)
    rank = len(case.size)
    pool_max = (
        functional.adaptive_max_pool1d,
        functional.adaptive_max_pool2d,
        functional.adaptive_max_pool3d,
    )[rank - 1]
    for dtype in compiled.dtypes:
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
        got = compiled.run("adaptive", [x, dy], problem, layout, [y.shape, y.shape, x.shape])
        assert torch.equal(got[0].double(), y.detach())
        assert torch.equal(got[1], indices)
        assert torch.equal(got[2].double(), scatter_reference(dy, indices, x.shape))


def test_kernels_refuse_wrong_extents(compiled: Compiled) -> None:
    """Sizes that the geometry does not give are an error of the op, before any memory is touched."""
    problem = PoolingProblem.from_aten((8, 8), 2)
    other = PoolingProblem.from_aten((8, 8), 4)
    x, dy = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"output\.H=2: the extent that the geometry gives is 4"):
        physical = [to_physical(t, "contiguous").to(compiled.device) for t in (x, dy)]
        host = [torch.tensor(problem.numbers()), *(torch.zeros(e, dtype=torch.uint8) for e in other.output)]
        model = compiled.models["avg_torch_float32"]
        model.execute(*(Buffer.from_dlpack(t) for t in [*physical, *host]))


def test_typed_functions(compiled: Compiled) -> None:
    """They reach the ops and give the shapes that PyTorch gives."""
    logical = whole_numbers((3, 4, 9, 7), F32, seeded("typed"))
    results = [
        torch.from_dlpack(r).cpu()
        for r in compiled.models["typed"].execute(to_physical(logical, "channels_last").to(compiled.device))
    ]
    leaf = logical.clone().requires_grad_()
    y, indices = functional.max_pool2d(leaf, 3, 2, 1, return_indices=True)
    dx = torch.autograd.grad(y, leaf, y.detach())[0]
    for result in results[:3]:
        assert torch.equal(to_logical(result, leaf.shape, "channels_last"), dx)
    mean = functional.avg_pool2d(leaf, 3, 2, 1, divisor_override=1)
    mean_dx = torch.autograd.grad(mean, leaf, mean.detach())[0]
    assert torch.equal(to_logical(results[3], leaf.shape, "channels_last"), mean_dx)
    best = functional.adaptive_max_pool2d(leaf, (3, 7))
    best_dx = torch.autograd.grad(best, leaf, best.detach())[0]
    assert torch.equal(to_logical(results[4], leaf.shape, "channels_last"), best_dx)
    spread = to_logical(results[5], leaf.shape, "channels_last").flatten(2)
    assert torch.equal(spread.gather(2, indices.flatten(2)).view_as(y), y.detach())
    assert torch.equal(to_logical(results[6], y.shape, "channels_last"), y.detach())
