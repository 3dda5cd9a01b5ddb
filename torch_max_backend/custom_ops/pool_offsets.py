"""Max pooling as PyTorch operators that save one byte for each output.

PyTorch's own operator returns an int64 index for each output, which stays in memory until the backward pass. The number
of the winning tap within its window fits a byte if the window has at most 255 taps. PyTorch runs the bodies below where
a graph is cut around the operators; in MAX Mojo kernels run (``lowering/pooling.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_max_backend.problems.pooling import PoolingProblem

aten = torch.ops.aten


def problem_of(shape: Sequence[int], window: Sequence[Sequence[int]], ceil_mode: bool) -> PoolingProblem:
    """The pooling of a tensor of ``shape``; ``window`` is aten's kernel_size, stride, padding and dilation in full."""
    rank = len(window[0])
    return PoolingProblem.from_aten(
        list(shape[-rank:]), list(window[0]), list(window[1]), list(window[2]), list(window[3]), ceil_mode
    )


def _coordinates(problem: PoolingProblem, like: torch.Tensor) -> list[tuple[int, torch.Tensor, int, int, int]]:
    """For each axis: its extent, every output's window start, the dilation, the taps and the axis' number."""
    rank = problem.rank
    axes = []
    for axis in range(rank):
        own = 3 - rank + axis
        count = problem.output_spatial[axis]
        start = torch.arange(count, device=like.device) * problem.stride[own] - problem.padding[own]
        shape = [1] * rank
        shape[axis] = count
        extent, dilation, taps = problem.input_spatial[axis], problem.dilation[own], problem.window[own]
        axes.append((extent, start.reshape(shape), dilation, taps, axis))
    return axes


@torch.library.custom_op("torch_max_backend::max_pool_offsets", mutates_args=())
def max_pool_offsets(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima, and for each the number of its tap within the window, row-major, of at most 255 taps.

    Source: aten.max_pool2d_with_indices, max_pool3d_with_indices. This body is what PyTorch runs where the graph is
    cut around the op; in MAX a Mojo kernel runs.
    """
    window = (kernel_size, stride, padding, dilation)
    problem = problem_of(x.shape, window, ceil_mode)
    op = aten.max_pool2d_with_indices if problem.rank == 2 else aten.max_pool3d_with_indices
    y, index = op(x, *(list(part) for part in window), ceil_mode)
    offset = torch.zeros_like(index)
    rest = index
    for extent, start, step, _, axis in reversed(_coordinates(problem, x)):
        place = rest % extent
        rest = rest // extent
        offset = offset + ((place - start) // step) * _taps_after(problem, axis)
    return y, offset.to(torch.uint8)


def _taps_after(problem: PoolingProblem, axis: int) -> int:
    """The number of taps that one step along ``axis`` skips."""
    skipped = 1
    for later in problem.window[3 - problem.rank + axis + 1 :]:
        skipped *= later
    return skipped


@max_pool_offsets.register_fake
def _(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    window = (kernel_size, stride, padding, dilation)
    op = aten.max_pool2d_with_indices if len(kernel_size) == 2 else aten.max_pool3d_with_indices
    y, index = op(x, *(list(part) for part in window), ceil_mode)
    return y, index.to(torch.uint8)


@torch.library.custom_op("torch_max_backend::max_pool_offsets_backward", mutates_args=())
def max_pool_offsets_backward(
    grad: torch.Tensor,
    shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The gradient of ``max_pool_offsets``' first result for an argument of ``shape``, which is not kept for it."""
    window = (kernel_size, stride, padding, dilation)
    x = _empty(shape, grad, offsets)
    problem = problem_of(shape, window, ceil_mode)
    index = torch.zeros_like(offsets, dtype=torch.int64)
    for extent, start, step, taps, axis in _coordinates(problem, x):
        tap = (offsets.long() // _taps_after(problem, axis)) % taps
        index = index * extent + start + tap * step
    backward = aten.max_pool2d_with_indices_backward if problem.rank == 2 else aten.max_pool3d_with_indices_backward
    return backward(grad, x, *(list(part) for part in window), ceil_mode, index)


@max_pool_offsets_backward.register_fake
def _(
    grad: torch.Tensor,
    shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: torch.Tensor,
) -> torch.Tensor:
    return _empty(shape, grad, offsets)


def _empty(shape: Sequence[int], grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the dtype of ``grad``, in the memory format of ``offsets``, which is the argument's."""
    chosen = {4: torch.channels_last, 5: torch.channels_last_3d}.get(offsets.dim(), torch.contiguous_format)
    if offsets.is_contiguous() or not offsets.is_contiguous(memory_format=chosen):
        chosen = torch.contiguous_format
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=chosen)
