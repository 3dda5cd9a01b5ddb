"""Convolutions by calls of their library functions, as launch lists make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks.kernels.launcher import Launcher, Word
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.lowering.convolution import allows_tf32, is_widened, with_repeated_channels
from torch_max_backend.mojo_ops.convolution import (
    FAMILY,
    Geometry,
    Grouping,
    convolution_function,
    workspace_limit,
)
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

#: Of each pass: the two operands it reads, and the one it makes.
_ROLES = {Pass.FPROP: "xwy", Pass.DGRAD: "ywx", Pass.WGRAD: "xyw"}


class Convolutions:
    """The library functions of the three passes in these dtypes on one device.

    A case's layout decides the order of filters on a CPU: PyTorch's or channels-last. Other operands are channels-last.
    """

    def __init__(self, dtypes: Iterable[torch.dtype], device: torch.device) -> None:
        self._functions: dict[tuple[Pass, torch.dtype, Grouping], LibraryFunction] = {
            (which, dtype, kind): convolution_function(
                which.value, "gpu" if device.type == "cuda" else "cpu", TORCH_TO_MAX[dtype], kind, deep=True
            )
            for which in Pass
            for dtype in dtypes
            for kind in (Grouping.ONE, Grouping.WIDE, Grouping.DEPTHWISE)
        }
        self._launcher = Launcher(self._functions.values(), device)
        self._wide: Convolutions | None = None

    def bind(
        self, case: ConvolutionCase, inputs: Sequence[torch.Tensor], allow_tf32: bool | None = None
    ) -> Callable[[], torch.Tensor]:
        """A call that gives the pass's result, in the kernels' shape; nothing is copied of channels-last operands.

        Args:
            case: the convolution.
            inputs: of the pass.
            allow_tf32: None for PyTorch's setting.
        """
        p = case.problem
        if which_of(case) is Pass.DGRAD and is_widened(p, TORCH_TO_MAX[case.dtype], case.device.type == "cuda"):
            return self._bind_widened(case, inputs)
        run = with_repeated_channels(p, case.device.type == "cuda")
        if run != p:
            return self._bind_repeated(case, run, inputs)
        a, b, result = _ROLES[which_of(case)]
        if p.transposed and case.role is Pass.WGRAD:
            inputs = (inputs[1], inputs[0])
        inside = _taps_inside(case)
        group, taps = p.c // p.groups, p.filter_size
        sizes = {
            "x": (p.n, *p.input_size, p.c),
            "w": (p.k, group, *taps) if inside else (p.k, *taps, group),
            "y": (p.n, *p.output_size, p.k),
        }
        operands = {
            name: (tensor if name == "w" and inside else tensor.movedim(1, -1)).contiguous()
            for name, tensor in zip((a, b), inputs, strict=False)
        }
        limit = workspace_limit(p, case.dtype.itemsize, case.device.type == "cuda")
        tf32 = allows_tf32() if allow_tf32 is None else allow_tf32
        geometry = Geometry(p.stride, p.padding, p.dilation, p.groups, limit, tf32, inside)
        given: list[tuple[Word, tuple[int, ...]]] = [(0, sizes[result]), *((operands[x], sizes[x]) for x in (a, b))]
        signature = FAMILY[which_of(case).value]
        words = signature.words(geometry.numbers(), given)
        function = self._functions[which_of(case), case.dtype, Grouping.of(p.groups, group, p.k)]
        return self._launcher.bind_result(function, len(signature.numbers), sizes[result], case.dtype, words)

    def _bind_widened(self, case: ConvolutionCase, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The same in float32, from operands that PyTorch widens at each call, as it narrows the result."""
        if self._wide is None:
            self._wide = Convolutions([torch.float32], case.device)
        wide = [x.movedim(1, -1).contiguous().movedim(-1, 1).float() for x in inputs[:2]]
        same = ConvolutionCase(case.name, case.problem, case.role, torch.float32, case.device, case.layout)
        call = self._wide.bind(same, wide, allow_tf32=True)

        def widened() -> torch.Tensor:
            for target, source in zip(wide, inputs[:2], strict=True):
                target.copy_(source)
            return call().to(case.dtype)

        return widened

    def _bind_repeated(
        self, case: ConvolutionCase, run: ConvolutionProblem, inputs: Sequence[torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """The same by a convolution ``run`` of repeated channels, which PyTorch repeats and adds up at each call."""
        split = (case.problem.c, run.c // case.problem.c)
        whole = ConvolutionCase(case.name, run, case.role, case.dtype, case.device, case.layout)
        if which_of(case) is Pass.DGRAD:
            gradient = self.bind(whole, inputs)
            return lambda: gradient().unflatten(-1, split).sum(-1)
        place = 1 if case.problem.transposed and case.role is Pass.WGRAD else 0
        x, given = inputs[place], list(inputs)
        given[place] = wide = x.movedim(1, -1).contiguous().repeat_interleave(split[1], -1).movedim(-1, 1)
        call = self.bind(whole, given)

        def repeated() -> torch.Tensor:
            wide.unflatten(1, split).copy_(x.unsqueeze(2).expand_as(wide.unflatten(1, split)))
            return call()

        return repeated


def which_of(case: ConvolutionCase) -> Pass:
    """The kernels' pass: a transposed convolution's forward pass is the data gradient of the one that it transposes,
    and the reverse."""
    problem = case.problem
    return {Pass.FPROP: problem.forward_pass, Pass.DGRAD: problem.grad_input_pass}.get(case.role, case.role)


def logical(case: ConvolutionCase, result: torch.Tensor) -> torch.Tensor:
    """What a call gave, in PyTorch's shape: a view."""
    if which_of(case) is not Pass.WGRAD or not _taps_inside(case):
        result = result.movedim(-1, 1)
    spatial = result.shape[5 - case.problem.spatial_rank :]
    return result.reshape(*result.shape[:2], *spatial)


def _taps_inside(case: ConvolutionCase) -> bool:
    return case.device.type == "cpu" and case.layout == "contiguous"
