"""The three passes of a convolution as cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_max_backend.bench.case import MemoryLayout, Tolerance, draw, summation_tolerance
from torch_max_backend.bench.epilogue import Epilogue
from torch_max_backend.checked import beartype
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

aten = torch.ops.aten

#: Composable Kernel's default problem.
CK_DEFAULT = ConvolutionProblem.from_sizes(128, 128, 256, [71, 71], [3, 3], stride=[2], padding=[1])
#: The default of its grouped data gradient: 2 groups of 256 channels on both sides.
CK_GROUPED_DEFAULT = ConvolutionProblem.from_sizes(128, 512, 512, [14, 14], [3, 3], stride=[2], padding=[1], groups=2)


class ConvolutionCase:
    """One pass of one convolution, as PyTorch's caller names it: forward, data gradient or weight gradient.

    Inputs are x and w, or dy, w and x, or x, dy and w; a gradient reads only the first two. The tensors D of an
    `epilogue`, which follows a data gradient, stand behind the two.
    """

    arithmetic = True

    @beartype
    def __init__(
        self,
        name: str,
        problem: ConvolutionProblem,
        role: Pass,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
        epilogue: Epilogue = Epilogue.none,
    ) -> None:
        self.name, self.problem, self.role, self.epilogue = name, problem, role, epilogue
        self.dtype, self.device, self.layout = dtype, device, layout
        x, w, y = (
            tuple(map(int, shape))
            for shape in (problem.aten_input_shape, problem.aten_weight_shape, problem.aten_output_shape)
        )
        self._shapes = {Pass.FPROP: (x, w), Pass.DGRAD: (y, w, x), Pass.WGRAD: (x, y, w)}[role]
        extra = epilogue.shapes(x)
        elements = sum(map(math.prod, extra))
        self.read = 2 + len(extra)
        self.flops = int(problem.flops)
        self.moved = int(problem.bytes(dtype.itemsize)) + elements * dtype.itemsize
        self.set_bytes = (math.prod(self._shapes[0]) + math.prod(self._shapes[1]) + elements) * dtype.itemsize
        axes = slice(3 - problem.spatial_rank, None)
        letters = (("in_n_c", ("di", "hi", "wi")), ("wei_k_c", ("z", "y", "x")), ("out_n_k", ("do", "ho", "wo")))
        names = ["_".join((name, *spatial[axes])) for name, spatial in letters]
        self.operands = dict(zip(names, (x, w, y), strict=True)) | {f"d{i}": shape for i, shape in enumerate(extra)}
        rank = problem.spatial_rank
        padding, stride, dilation = (
            list(values[3 - rank :]) for values in (problem.padding, problem.stride, problem.dilation)
        )
        more = self._output_padding() if problem.transposed else [0] * rank
        self._rest = (stride, padding, dilation, problem.transposed, more, problem.groups)

    def inputs(self, init: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        first, second, *unread = self._shapes
        tensors = [self._draw(shape, init, generator) for shape in (first, second)]
        for number, shape in enumerate(self.epilogue.shapes(self._shapes[-1])):
            value = self.epilogue.number(number)
            full = torch.full(shape, value or 0.0, dtype=self.dtype, device=self.device)
            tensors.append(full if value is not None else self._draw(shape, init, generator))
        # Only their shape, dtype, device and memory order matter.
        return (*tensors, *(self._draw(shape, 0, generator) for shape in unread))

    def theirs(self, *inputs: Tensor) -> Tensor:
        if self.role is Pass.FPROP:
            return aten.convolution(inputs[0], inputs[1], None, *self._rest)
        if self.role is Pass.DGRAD:
            dy, w, *d, x = inputs
            dx = aten.convolution_backward(dy, x, w, None, *self._rest, [True, False, False])[0]
            return self.epilogue.apply(dx, d)
        x, dy, w = inputs
        return aten.convolution_backward(dy, x, w, None, *self._rest, [False, True, False])[1]

    ours = theirs

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.theirs(*(tensor.double() for tensor in inputs))

    def tolerance(self, init: int, reference: Tensor) -> Tolerance:
        swapped = {Pass.FPROP: self.problem.forward_pass, Pass.DGRAD: self.problem.grad_input_pass}
        length = self.problem.gemm(swapped.get(self.role, self.role)).k
        tolerance = summation_tolerance(self.dtype, self.device, init, int(length), matmul=True)
        return self.epilogue.widen(tolerance, self.dtype, reference)

    def _draw(self, shape: Sequence[int], init: int, generator: torch.Generator) -> Tensor:
        return draw(shape, self.dtype, self.device, init, generator, self.layout)

    def _output_padding(self) -> list[int]:
        p = self.problem
        least = [
            (small - 1) * stride - 2 * pad + dilation * (taps - 1) + 1
            for small, stride, pad, dilation, taps in zip(
                p.output_size, p.stride, p.padding, p.dilation, p.filter_size, strict=True
            )
        ]
        amounts = [int(extent - low) for extent, low in zip(p.input_size, least, strict=True)]
        return amounts[3 - p.spatial_rank :]
