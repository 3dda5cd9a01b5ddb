"""The three convolution passes as benchmark tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops

from torch_max_backend.bench import compiled
from torch_max_backend.bench.compiled import KernelGraph, Operand
from torch_max_backend.bench.epilogue import Epilogue
from torch_max_backend.bench.listed import ListedGraph
from torch_max_backend.bench.task import MemoryLayout, Tolerance, draw, summation_tolerance
from torch_max_backend.checked import beartype
from torch_max_backend.convolution_problem import ConvolutionProblem, Pass
from torch_max_backend.dtypes import TORCH_TO_MAX, device_ref
from torch_max_backend.lowering.convolution import allows_tf32
from torch_max_backend.mojo_ops.convolution import (
    Grouping,
    conv_with_geometry,
    geometry_values,
    workspace_limit,
)

aten = torch.ops.aten
T = TypeVar("T")

_X = ("n", "d", "h", "w", "c")
_W = ("k", "t", "r", "s", "cg")
_Y = ("n", "o", "p", "q", "k")
#: Of each pass: the two operands it reads, and the one it makes.
_ROLES = {Pass.FPROP: (_X, _W, _Y), Pass.DGRAD: (_Y, _W, _X), Pass.WGRAD: (_X, _Y, _W)}
_NAMES = {_X: "in_n_c", _W: "wei_k_c", _Y: "out_n_k"}
_SPATIAL = {_X: ("di", "hi", "wi"), _W: ("z", "y", "x"), _Y: ("do", "ho", "wo")}

#: Composable Kernel's default problem.
CK_DEFAULT = ConvolutionProblem.from_sizes(128, 128, 256, [71, 71], [3, 3], stride=[2], padding=[1])
#: The default of its grouped data gradient: 2 groups of 256 channels on both sides.
CK_GROUPED_DEFAULT = ConvolutionProblem.from_sizes(128, 512, 512, [14, 14], [3, 3], stride=[2], padding=[1], groups=2)


def _channels_first(value: TensorValue) -> TensorValue:
    return ops.permute(value, [0, 4, 1, 2, 3])


def _channels_last(value: TensorValue) -> TensorValue:
    return ops.permute(value, [0, 2, 3, 4, 1])


def _contiguous_dims(dims: tuple[T, ...]) -> tuple[T, ...]:
    return (dims[0], dims[4], *dims[1:4])


@beartype
def kernel_graph(
    which: Pass, dtype: torch.dtype, layout: MemoryLayout = "channels_last", grouping: Grouping = Grouping.ANY
) -> KernelGraph:
    """The graph of one pass, by the library function that serves groups of this kind.

    With the contiguous layout it changes the memory order of what goes in and comes out, as a compiled model does at
    its edges.
    """
    a, b, result = _ROLES[which]
    contiguous = layout == "contiguous"
    name = TORCH_TO_MAX[dtype]

    def build(values: Sequence[TensorValue], geometry: TensorValue, place: DeviceRef) -> TensorValue:
        first, second = [_channels_last(value) if contiguous else value for value in values]
        value = conv_with_geometry(which.value, first, second, geometry, list(result), grouping=grouping)
        return _channels_first(value) if contiguous else value

    operands = tuple(Operand(name, _contiguous_dims(dims) if contiguous else dims) for dims in (a, b))
    extents = tuple(dim for dim in result if dim not in {*a, *b})
    graph_name = f"bench_{which.value}_{grouping.name}_{name.name}_{layout}"
    return KernelGraph(graph_name, operands, extents, build)


def kernel_graphs(dtypes: Iterable[torch.dtype]) -> list[KernelGraph]:
    """All graphs that channels-last tasks without an epilogue run."""
    kinds = (Grouping.ONE, Grouping.WIDE, Grouping.DEPTHWISE)
    return [kernel_graph(which, dtype, grouping=kind) for dtype in dtypes for which in Pass for kind in kinds]


class ConvolutionTask:
    """One pass of one convolution, as PyTorch's caller names it: forward, data gradient or weight gradient."""

    @beartype
    def __init__(
        self,
        name: str,
        problem: ConvolutionProblem,
        role: Pass,
        dtype: torch.dtype,
        device: torch.device,
        layout: MemoryLayout = "channels_last",
        epilogue: Epilogue = Epilogue.NONE,
    ) -> None:
        self.name = name
        self.problem = problem
        self.role = role
        # A transposed convolution's forward is the data gradient of the one that it transposes, and back.
        swapped = {Pass.FPROP: problem.forward_pass, Pass.DGRAD: problem.grad_input_pass}
        self.which = swapped.get(role, role)
        self.dtype = dtype
        self.device = device
        self.layout: MemoryLayout = layout
        self.epilogue = epilogue
        self.sizes = self._sizes()
        self._grouping = Grouping.of(problem.groups, problem.c // problem.groups, problem.k)
        plain = epilogue is Epilogue.NONE
        self.kernel = kernel_graph(self.which, dtype, layout, self._grouping) if plain else None
        a, b, result = _ROLES[self.which]
        extra = sum(_product(self._extent(dims)) for dims in epilogue.dims(result))
        width = dtype.itemsize
        self.flops = int(problem.flops)
        self.moved = int(problem.bytes(width)) + extra * width
        self.set_bytes = (_product(self._extent(a)) + _product(self._extent(b)) + extra) * width
        self.arithmetic = True
        self.operands = {self._label(dims): self._logical_shape(dims) for dims in (_X, _W, _Y)}
        for number, dims in enumerate(epilogue.dims(result)):
            self.operands[f"d{number}"] = self._logical_shape(dims) if len(dims) == 5 else self._extent(dims)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.problem), "pass": self.role.value, "epilogue": self.epilogue.value}

    def inputs(self, init: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        a, b, result = _ROLES[self.which]
        tensors = [self._draw(dims, init, generator) for dims in (a, b)]
        shapes = [self._extent(dims) for dims in self.epilogue.dims(result)]
        for number, (dims, shape) in enumerate(zip(self.epilogue.dims(result), shapes, strict=True)):
            if len(dims) == 5:
                tensors.append(self._draw(dims, init, generator))
            else:
                tensors.append(self.epilogue.vector(number, shape, self.dtype, self.device, init, generator))
        return tuple(tensors)

    def ours(self, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        operands = [self._physical(tensor) if tensor.dim() > 1 else tensor for tensor in inputs]
        if self.kernel is None:
            return functools.partial(self._with_epilogue(), *operands)
        model = compiled.load(self.kernel, self.device)
        return compiled.bind(model, self.kernel, operands, self._geometry(), self.sizes)

    def _with_epilogue(self) -> Callable[..., torch.Tensor]:
        """The pass and what follows it, as a launch list."""
        contiguous, geometry = self.layout == "contiguous", np.array(self._geometry())
        a, b, result = _ROLES[self.which]

        def build(values: Sequence[TensorValue]) -> TensorValue:
            first, second, *extra = [_channels_last(v) if contiguous and v.rank == 5 else v for v in values]
            words = ops.constant(geometry, DType.int64, device=DeviceRef.CPU())
            shape = self._extent(result)
            value = conv_with_geometry(self.which.value, first, second, words, shape, grouping=self._grouping)
            value = self.epilogue.build(value, extra)
            return _channels_first(value) if contiguous else value

        shapes = [self._extent(dims) for dims in (a, b, *self.epilogue.dims(result))]
        if contiguous:
            shapes = [_contiguous_dims(shape) if len(shape) == 5 else shape for shape in shapes]
        types = [TensorType(TORCH_TO_MAX[self.dtype], shape, device_ref(self.device)) for shape in shapes]
        return ListedGraph(types, build, self.device).load()

    def logical(self, result: torch.Tensor) -> torch.Tensor:
        first = result if self.layout == "contiguous" else result.permute(0, 4, 1, 2, 3)
        return first.reshape(self._logical_shape(_ROLES[self.which][2]))

    def theirs(self, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        if not self.symmetric:
            raise NotImplementedError("PyTorch pads both sides alike")
        return self._torch(inputs, self._aten_padding())

    @property
    def symmetric(self) -> bool:
        """Whether PyTorch, which pads both sides alike, can pose this problem."""
        p = self.problem
        return p.transposed or all(
            (extent + 2 * pad - dilation * (taps - 1) - 1) // stride + 1 == out
            for extent, pad, dilation, taps, stride, out in zip(
                p.input_size, p.padding, p.dilation, p.filter_size, p.stride, p.output_size, strict=True
            )
        )

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        wide = [tensor.double() for tensor in inputs]
        if self.symmetric:
            return self._torch(wide, self._aten_padding())()
        # Padding by hand, then a convolution that pads nothing; what it gives for the padding is cut off.
        rank = self.problem.spatial_rank
        left, right = self.problem.padding[3 - rank :], [int(pad) for pad in self.problem.right_padding[3 - rank :]]
        amounts = [amount for pair in zip(reversed(left), reversed(right), strict=True) for amount in pair]
        zeros = [0] * rank
        if self.which is not Pass.DGRAD:
            wide[0] = torch.nn.functional.pad(wide[0], amounts)
            return self._torch(wide, zeros)()
        spatial = [int(extent) for extent in self.problem.input_size[3 - rank :]]
        shape = [extent + a + b for extent, a, b in zip(spatial, left, right, strict=True)]
        padded = self._torch(wide[:2], zeros, shape, fused=False)()
        result = padded
        for axis, (extent, start) in enumerate(zip(spatial, left, strict=True), start=2):
            # With a negative right padding the trailing pixels, which no window reads, get zeros.
            part = result.narrow(axis, start, min(extent, result.shape[axis] - start))
            missing = [0, 0] * (result.dim() - 1 - axis) + [0, extent - part.shape[axis]]
            result = torch.nn.functional.pad(part, missing)
        return self._apply_epilogue(result, wide[2:])

    def tolerance(self, init: int, reference: torch.Tensor) -> Tolerance:
        length = self.problem.gemm(self.which).k
        tolerance = summation_tolerance(self.dtype, self.device, init, int(length), matmul=True)
        return self.epilogue.widen(tolerance, self.dtype, reference)

    def _geometry(self) -> list[int]:
        p = self.problem
        limit = workspace_limit(p, self.dtype.itemsize, self.device.type == "cuda")
        return geometry_values(p.stride, p.padding, p.dilation, p.groups, limit, allow_tf32=allows_tf32()).tolist()

    # Shapes.

    def _sizes(self) -> dict[str, int]:
        p = self.problem
        values = (p.n, *p.input_size, p.c, p.k, *p.filter_size, p.c // p.groups, *p.output_size)
        return dict(zip((*_X, *_W, "o", "p", "q"), map(int, values), strict=True))

    def _extent(self, dims: Sequence[str | int]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else self.sizes[dim] for dim in dims)

    def _logical_shape(self, dims: Sequence[str | int]) -> tuple[int, ...]:
        n, *spatial, c = self._extent(dims)
        return (n, c, *spatial[3 - self.problem.spatial_rank :])

    def _label(self, dims: tuple[str, str, str, str, str]) -> str:
        return "_".join((_NAMES[dims], *_SPATIAL[dims][3 - self.problem.spatial_rank :]))

    def _draw(self, dims: Sequence[str | int], init: int, generator: torch.Generator) -> torch.Tensor:
        n, c, *spatial = self._logical_shape(dims)
        if self.layout == "contiguous":
            return draw((n, c, *spatial), self.dtype, self.device, init, generator)
        physical = draw((n, *spatial, c), self.dtype, self.device, init, generator)
        return physical.permute(0, -1, *range(1, 1 + len(spatial)))

    def _physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """The graph's view of a logical tensor: rank 5, never a copy."""
        n, c, *spatial = tensor.shape
        spatial = [1] * (3 - len(spatial)) + spatial
        if self.layout == "contiguous":
            return tensor.view(n, c, *spatial)
        return tensor.permute(0, *range(2, tensor.dim()), 1).view(n, *spatial, c)

    # PyTorch.

    def _aten_padding(self) -> list[int]:
        return list(self.problem.padding[3 - self.problem.spatial_rank :])

    def _torch(
        self,
        inputs: Sequence[torch.Tensor],
        padding: list[int],
        input_shape: Sequence[int] | None = None,
        *,
        fused: bool = True,
    ) -> Callable[[], torch.Tensor]:
        p = self.problem
        rank = p.spatial_rank
        stride, dilation = list(p.stride[3 - rank :]), list(p.dilation[3 - rank :])
        extra = self._output_padding() if p.transposed else [0] * rank
        rest = (stride, padding, dilation, p.transposed, extra, p.groups)
        first, second, *more = inputs
        if self.role is Pass.FPROP:
            return lambda: aten.convolution(first, second, None, *rest)
        if self.role is Pass.DGRAD:
            shape = p.aten_input_shape if input_shape is None else (p.n, p.c, *input_shape)
            # Only its shape, dtype, device and memory order matter.
            x = self._placeholder(first, shape)

            def dgrad() -> torch.Tensor:
                dx = aten.convolution_backward(first, x, second, None, *rest, [True, False, False])[0]
                return self._apply_epilogue(dx, more) if fused else dx

            return dgrad
        x, dy = (second, first) if p.transposed else (first, second)
        w = self._placeholder(first, p.aten_weight_shape)
        return lambda: aten.convolution_backward(dy, x, w, None, *rest, [False, True, False])[1]

    def _placeholder(self, like: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
        n, c, *spatial = map(int, shape)
        if self.layout == "contiguous":
            return like.new_empty((n, c, *spatial))
        return like.new_empty((n, *spatial, c)).permute(0, -1, *range(1, 1 + len(spatial)))

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

    def _apply_epilogue(self, dx: torch.Tensor, extra: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.epilogue.apply(dx, extra)


def _product(values: Sequence[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total
