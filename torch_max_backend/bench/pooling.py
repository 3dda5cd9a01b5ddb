"""The gradients of max and average pooling as cases."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_max_backend.bench.arguments import PoolingSizes
from torch_max_backend.bench.case import LARGEST_INTEGER, MemoryLayout, Tolerance, draw, ordered, summation_tolerance
from torch_max_backend.checked import beartype
from torch_max_backend.custom_ops.pool_offsets import max_pool_offsets, max_pool_offsets_backward
from torch_max_backend.problems.pooling import PoolingProblem

aten = torch.ops.aten

#: ResNet's pooling of its stem, and the middle one of the 3-D cases.
MAX_DEFAULT = PoolingSizes(32, 64, PoolingProblem.from_aten([112, 112], 3, 2, 1))
AVG_DEFAULT = PoolingSizes(4, 64, PoolingProblem.from_aten([32, 56, 56], 3, 2, 1))


class Form(enum.StrEnum):
    """The form in which max pooling's forward pass saves argmaxes for the gradient.

    gather: an int64 index for each output, as in eager PyTorch. offsets: the number of its tap, one byte, as in a
    compiled model.
    """

    gather = "gather"
    offsets = "offsets"


class _PoolingCase:
    """The common part of the two gradients."""

    arithmetic = False

    def __init__(
        self, name: str, sizes: PoolingSizes, dtype: torch.dtype, device: torch.device, layout: MemoryLayout
    ) -> None:
        self.name, self.problem = name, sizes.problem
        self.dtype, self.device, self.layout = dtype, device, layout
        self.small = (sizes.n, sizes.c, *self.problem.output_spatial)
        self.large = (sizes.n, sizes.c, *self.problem.input_spatial)
        axes = "_".join(("di", "hi", "wi")[3 - self.problem.rank :])
        self.operands = {f"din_n_c_{axes}": self.large, f"dout_n_c_{axes.replace('i', 'o')}": self.small}

    def _draw(self, shape: Sequence[int], init: int, generator: torch.Generator) -> Tensor:
        return draw(shape, self.dtype, self.device, init, generator, self.layout)

    def _window(self) -> list[list[int]]:
        p, first = self.problem, 3 - self.problem.rank
        return [list(values[first:]) for values in (p.window, p.stride, p.padding, p.dilation)]


class MaxPoolBackward(_PoolingCase):
    """aten.max_pool2d_with_indices_backward. Inputs: dy; offsets if the form has them; indices; x."""

    @beartype
    def __init__(
        self,
        name: str,
        sizes: PoolingSizes,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
        form: Form = Form.gather,
    ) -> None:
        if form is Form.offsets and not sizes.problem.has_byte_offsets:
            raise ValueError(f"window={sizes.problem.window}: must have at most 255 taps, which a byte counts")
        super().__init__(name, sizes, dtype, device, layout)
        self.form = form
        large, small = math.prod(self.large), math.prod(self.small)
        saved = small if form is Form.offsets else 8 * small
        self.flops = small
        self.moved = dtype.itemsize * (large + small) + saved
        self.set_bytes = dtype.itemsize * small + saved
        # Indices are read by PyTorch, and by us in their form.
        self.read = 3 if form is Form.offsets else 2

    def inputs(self, init: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        # Uninitialised inputs would make indices that depend on what the memory held before.
        x, window = self._draw(self.large, init or 2, generator), self._window()
        indices = ordered(aten.max_pool2d_with_indices(x, *window, self.problem.ceil_mode)[1], self.layout)
        dy = self._draw(self.small, init, generator)
        if self.form is Form.gather:
            return dy, indices, x
        offsets = max_pool_offsets(x, *window, self.problem.ceil_mode)[1]
        return dy, ordered(offsets, self.layout), indices, x

    def ours(self, *inputs: Tensor) -> Tensor:
        if self.form is Form.gather:
            return self.theirs(*inputs)
        dy, offsets, _, x = inputs
        return max_pool_offsets_backward(dy, list(x.shape), *self._window(), self.problem.ceil_mode, offsets)

    def theirs(self, *inputs: Tensor) -> Tensor:
        dy, *_, indices, x = inputs
        return aten.max_pool2d_with_indices_backward(dy, x, *self._window(), self.problem.ceil_mode, indices)

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        dy, *_, indices, _ = inputs
        planes = torch.zeros((*self.large[:2], self.large[2] * self.large[3]), dtype=torch.float64, device=self.device)
        planes.scatter_add_(2, indices.flatten(2), dy.double().flatten(2))
        return planes.view(self.large)

    def tolerance(self, init: int, reference: Tensor) -> Tolerance:
        return summation_tolerance(self.dtype, self.device, init, self.problem.windows_above, matmul=False)


class AvgPoolBackward(_PoolingCase):
    """aten.avg_pool3d_backward. Inputs: dy; x."""

    read = 1

    @beartype
    def __init__(
        self,
        name: str,
        sizes: PoolingSizes,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
    ) -> None:
        super().__init__(name, sizes, dtype, device, layout)
        large, small = math.prod(self.large), math.prod(self.small)
        self.flops = small * self.problem.window_size
        self.moved = dtype.itemsize * (large + small)
        self.set_bytes = dtype.itemsize * small

    def inputs(self, init: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return self._draw(self.small, init, generator), self._draw(self.large, 0, generator)

    def theirs(self, *inputs: Tensor) -> Tensor:
        dy, x = inputs
        k, s, p, _ = self._window()
        problem = self.problem
        modes = (problem.ceil_mode, problem.count_include_pad, problem.divisor_override)
        return aten.avg_pool3d_backward(dy, x, k, s, p, *modes)

    ours = theirs

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        # ATen's CPU result is the one that defines the op.
        return self.theirs(*(tensor.cpu().double().contiguous() for tensor in inputs))

    def tolerance(self, init: int, reference: Tensor) -> Tolerance:
        # Each term is rounded too, by its division.
        length = self.problem.windows_above
        tolerance = summation_tolerance(self.dtype, self.device, 2, 2 * length, matmul=False)
        return Tolerance(tolerance.absolute * LARGEST_INTEGER, tolerance.relative)
