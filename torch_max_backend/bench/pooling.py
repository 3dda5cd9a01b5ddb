"""The pooling gradients as benchmark tasks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue

from torch_max_backend.bench import compiled
from torch_max_backend.bench.arguments import PoolingSizes
from torch_max_backend.bench.compiled import KernelGraph, Operand
from torch_max_backend.bench.task import LARGEST_INTEGER, MemoryLayout, Tolerance, draw, summation_tolerance
from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.pooling import pool_op
from torch_max_backend.pooling_problem import PoolingProblem

aten = torch.ops.aten

_INPUT = ("n", "d", "h", "w", "c")
_OUTPUT = ("n", "o", "p", "q", "c")

#: ResNet's pooling of its stem, and the middle one of the 3-D cases.
MAX_DEFAULT = PoolingSizes(32, 64, PoolingProblem.from_aten([112, 112], 3, 2, 1))
AVG_DEFAULT = PoolingSizes(4, 64, PoolingProblem.from_aten([32, 56, 56], 3, 2, 1))


class Form(enum.Enum):
    """The forms of max pooling's gradient.

    GATHER: each pixel sums the outputs whose int64 index names it. OFFSETS: the same from the taps' numbers, one byte
    each. SCATTER: each output adds to where its index points. RECOMPUTE: only x was kept, the maxima are found again.
    """

    GATHER = "gather"
    OFFSETS = "offsets"
    SCATTER = "scatter"
    RECOMPUTE = "recompute"


@beartype
def max_graph(form: Form, dtype: torch.dtype) -> KernelGraph:
    """The gradient of max pooling; a contiguous NCHW tensor goes in as [N * C, D, H, W, 1]."""
    name = TORCH_TO_MAX[dtype]
    second = {
        Form.GATHER: Operand(DType.int64, _OUTPUT),
        Form.SCATTER: Operand(DType.int64, _OUTPUT),
        Form.OFFSETS: Operand(DType.uint8, _OUTPUT),
        Form.RECOMPUTE: Operand(name, _INPUT),
    }[form]

    def build(values: Sequence[TensorValue], geometry: TensorValue, place: DeviceRef) -> TensorValue:
        dy, other = values
        dx = TensorType(name, list(_INPUT), place)
        if form is Form.SCATTER:
            return pool_op("max_pool_dgrad_scatter", place, [dy, other], [dx])[0]
        if form is Form.RECOMPUTE:
            results = [TensorType(of, list(_OUTPUT), place) for of in (name, DType.uint8)]
            other = pool_op("max_pool_fprop", place, [other, geometry], results)[1]
        return pool_op("max_pool_dgrad", place, [dy, other, geometry], [dx])[0]

    extents = () if form is Form.RECOMPUTE else ("d", "h", "w")
    return KernelGraph(
        f"bench_max_pool_dgrad_{form.value}_{name.name}", (Operand(name, _OUTPUT), second), extents, build
    )


@beartype
def avg_graph(dtype: torch.dtype) -> KernelGraph:
    """The gradient of average pooling."""
    name = TORCH_TO_MAX[dtype]

    def build(values: Sequence[TensorValue], geometry: TensorValue, place: DeviceRef) -> TensorValue:
        dx = TensorType(name, list(_INPUT), place)
        return pool_op("avg_pool_dgrad", place, [values[0], geometry], [dx])[0]

    return KernelGraph(f"bench_avg_pool_dgrad_{name.name}", (Operand(name, _OUTPUT),), ("d", "h", "w"), build)


class _PoolingTask:
    """What the two gradients share."""

    arithmetic = False

    def __init__(
        self,
        name: str,
        sizes: PoolingSizes,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout,
        kernel: KernelGraph,
    ) -> None:
        self.name = name
        self.sizes = sizes
        self.problem = sizes.problem
        self.dtype = dtype
        self.device = device
        self.layout: MemoryLayout = layout
        self.kernel = kernel
        self.small = (sizes.n, sizes.c, *self.problem.output_spatial)
        self.large = (sizes.n, sizes.c, *self.problem.input_spatial)
        axes = "_".join(("di", "hi", "wi")[3 - self.problem.rank :])
        self.operands = {f"din_n_c_{axes}": self.large, f"dout_n_c_{axes.replace('i', 'o')}": self.small}

    def describe(self) -> dict[str, Any]:
        return {"n": self.sizes.n, "c": self.sizes.c, **asdict(self.problem)}

    def ours(self, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        operands = [self._physical(tensor) for tensor in self._kernel_inputs(inputs)]
        model = compiled.load(self.kernel, self.device)
        extents = dict(zip(("d", "h", "w"), self.problem.input, strict=True))
        return compiled.bind(model, self.kernel, operands, self.problem.geometry().tolist(), extents)

    def logical(self, result: torch.Tensor) -> torch.Tensor:
        if self.layout == "channels_last":
            result = result.permute(0, 4, 1, 2, 3)
        return result.reshape(self.large)

    def _kernel_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return inputs

    def _draw(self, shape: Sequence[int], init: int, generator: torch.Generator) -> torch.Tensor:
        return self._ordered(draw(shape, self.dtype, self.device, init, generator))

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the task's memory order."""
        if self.layout == "contiguous":
            return tensor.contiguous()
        rank = tensor.dim()
        return tensor.permute(0, *range(2, rank), 1).contiguous().permute(0, rank - 1, *range(1, rank - 1))

    def _physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """The kernel's [N, D, H, W, C] view of a logical tensor, never a copy."""
        n, c, *spatial = tensor.shape
        spatial = [1] * (3 - len(spatial)) + spatial
        if self.layout == "contiguous":
            return tensor.view(n * c, *spatial, 1)
        return tensor.permute(0, *range(2, tensor.dim()), 1).view(n, *spatial, c)

    def _aten_geometry(self) -> list[list[int]]:
        p, first = self.problem, 3 - self.problem.rank
        return [list(values[first:]) for values in (p.window, p.stride, p.padding, p.dilation)]

    def _elements(self) -> tuple[int, int]:
        large, small = torch.Size(self.large).numel(), torch.Size(self.small).numel()
        return large, small


class MaxPoolBackward(_PoolingTask):
    """aten.max_pool2d_with_indices_backward."""

    @beartype
    def __init__(
        self,
        name: str,
        sizes: PoolingSizes,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
        form: Form = Form.GATHER,
    ) -> None:
        if form in (Form.OFFSETS, Form.RECOMPUTE) and not sizes.problem.has_byte_offsets:
            raise ValueError(f"window={sizes.problem.window}: must have at most 255 taps, which a byte counts")
        super().__init__(name, sizes, dtype, device, layout, max_graph(form, dtype))
        self.form = form
        large, small = self._elements()
        width = dtype.itemsize
        index_bytes = {
            Form.GATHER: 8 * small,
            Form.SCATTER: 8 * small,
            Form.OFFSETS: small,
            Form.RECOMPUTE: width * large,
        }[form]
        self.flops = small
        self.moved = width * (large + small) + index_bytes
        self.set_bytes = width * small + index_bytes

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "form": self.form.value}

    def inputs(self, init: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        # Uninitialised inputs would make indices that depend on what the memory held before.
        x = self._draw(self.large, init or 2, generator)
        k, s, p, d = self._aten_geometry()
        indices = aten.max_pool2d_with_indices(x, k, s, p, d, self.problem.ceil_mode)[1]
        return self._draw(self.small, init, generator), self._ordered(indices), x

    def theirs(self, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        dy, indices, x = inputs
        k, s, p, d = self._aten_geometry()
        ceil_mode = self.problem.ceil_mode
        return lambda: aten.max_pool2d_with_indices_backward(dy, x, k, s, p, d, ceil_mode, indices)

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        dy, indices, _ = inputs
        planes = torch.zeros((*self.large[:2], self.large[2] * self.large[3]), dtype=torch.float64, device=self.device)
        planes.scatter_add_(2, indices.flatten(2), dy.double().flatten(2))
        return planes.view(self.large)

    def tolerance(self, init: int, reference: torch.Tensor) -> Tolerance:
        return summation_tolerance(self.dtype, self.device, init, self.problem.windows_above, matmul=False)

    def _kernel_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        dy, indices, x = inputs
        if self.form is Form.RECOMPUTE:
            return dy, x
        return dy, self._offsets(indices) if self.form is Form.OFFSETS else indices

    def _offsets(self, indices: torch.Tensor) -> torch.Tensor:
        """The number of each winning tap within its window."""
        (_, window), (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w) = self._aten_geometry()
        rows, columns = indices // self.large[3], indices % self.large[3]
        p, q = (torch.arange(extent, device=self.device) for extent in self.small[2:])
        r = (rows - (p * stride_h - pad_h)[:, None]) // dilation_h
        s = (columns - (q * stride_w - pad_w)) // dilation_w
        return self._ordered((r * window + s).to(torch.uint8))


class AvgPoolBackward(_PoolingTask):
    """aten.avg_pool3d_backward."""

    @beartype
    def __init__(
        self,
        name: str,
        sizes: PoolingSizes,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
    ) -> None:
        super().__init__(name, sizes, dtype, device, layout, avg_graph(dtype))
        large, small = self._elements()
        self.flops = small * self.problem.window_size
        self.moved = dtype.itemsize * (large + small)
        self.set_bytes = dtype.itemsize * small

    def inputs(self, init: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (self._draw(self.small, init, generator),)

    def theirs(self, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        x = self._ordered(torch.empty(self.large, dtype=self.dtype, device=self.device))
        return self._torch(inputs[0], x)

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        # ATen's CPU result is the one that defines the op.
        dy = inputs[0].cpu().double().contiguous()
        return self._torch(dy, torch.empty(self.large, dtype=torch.float64))()

    def tolerance(self, init: int, reference: torch.Tensor) -> Tolerance:
        # Each term is rounded too, by its division.
        length = self.problem.windows_above
        tolerance = summation_tolerance(self.dtype, self.device, 2, 2 * length, matmul=False)
        return Tolerance(tolerance.absolute * LARGEST_INTEGER, tolerance.relative)

    def _torch(self, dy: torch.Tensor, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        k, s, p, _ = self._aten_geometry()
        problem = self.problem
        modes = (problem.ceil_mode, problem.count_include_pad, problem.divisor_override)
        return lambda: aten.avg_pool3d_backward(dy, x, k, s, p, *modes)
