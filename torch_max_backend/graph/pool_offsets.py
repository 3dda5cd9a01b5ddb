"""Max pooling's memory between forward and backward: one byte for each output instead of an int64 index.

PyTorch's op returns an index into the plane for every output, eight bytes that wait in memory until the backward
pass. Where nobody but the pooling's own backward looks at them, the joint graph is rewritten to a pair of ops that
hand over the winner's place *within its window* instead: a byte wherever the window has at most 255 taps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.pooling_problem import PoolingProblem

aten = torch.ops.aten

_PAIRS = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}


def _problem(shape: Sequence[int], window: Sequence[Sequence[int]], ceil_mode: bool) -> PoolingProblem:
    rank = len(window[0])
    return PoolingProblem.from_aten(list(shape[-rank:]), *(list(part) for part in window), ceil_mode)


def offset_dtype(problem: PoolingProblem) -> torch.dtype:
    """The type that holds the number of a tap."""
    return torch.uint8 if problem.offset_bits == 8 else torch.int32


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
    """Maxima, and for each the number of its tap within the window, row-major.

    Source: aten.max_pool2d_with_indices, max_pool3d_with_indices. This body is what PyTorch runs where the graph is
    cut around the op; in MAX a Mojo kernel runs.
    """
    window = (kernel_size, stride, padding, dilation)
    problem = _problem(x.shape, window, ceil_mode)
    op = aten.max_pool2d_with_indices if problem.rank == 2 else aten.max_pool3d_with_indices
    y, index = op(x, *(list(part) for part in window), ceil_mode)
    offset = torch.zeros_like(index)
    rest = index
    for extent, start, step, _, axis in reversed(_coordinates(problem, x)):
        place = rest % extent
        rest = rest // extent
        offset = offset + ((place - start) // step) * _taps_after(problem, axis)
    return y, offset.to(offset_dtype(problem))


def _taps_after(problem: PoolingProblem, axis: int) -> int:
    """How many taps one step along ``axis`` skips."""
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
    return y, index.to(offset_dtype(_problem(x.shape, window, ceil_mode)))


@torch.library.custom_op("torch_max_backend::max_pool_offsets_backward", mutates_args=())
def max_pool_offsets_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The gradient of ``max_pool_offsets``' first result. ``x`` gives shape and memory format only."""
    window = (kernel_size, stride, padding, dilation)
    problem = _problem(x.shape, window, ceil_mode)
    index = torch.zeros_like(offsets, dtype=torch.int64)
    for extent, start, step, taps, axis in _coordinates(problem, x):
        tap = (offsets.long() // _taps_after(problem, axis)) % taps
        index = index * extent + start + tap * step
    backward = aten.max_pool2d_with_indices_backward if problem.rank == 2 else aten.max_pool3d_with_indices_backward
    return backward(grad, x, *(list(part) for part in window), ceil_mode, index)


@max_pool_offsets_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(x)


def keep_small_offsets(joint: GraphModule) -> GraphModule:
    """Rewrites every pooling of a joint graph whose indices only its own backward reads; ``joint`` is returned."""
    for node in list(joint.graph.nodes):
        backward = _PAIRS.get(node.target)
        if backward is not None and node.meta.get("val") is not None:
            _rewrite(node, backward)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _rewrite(node: Node, backward: object) -> None:
    x = node.args[0]
    fake = x.meta["val"]
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(results) != len(node.users) or 1 not in results or any(isinstance(s, torch.SymInt) for s in fake.shape):
        return
    readers = list(results[1].users)
    if not readers or any(reader.target is not backward or reader.args[7] is not results[1] for reader in readers):
        return
    window, ceil_mode = _window(node)
    problem = _problem(fake.shape, window, ceil_mode)
    if problem.has_empty_windows:
        return
    dtype = offset_dtype(problem)
    graph = node.graph
    with graph.inserting_before(node):
        fresh = graph.call_function(torch.ops.torch_max_backend.max_pool_offsets.default, (x, *window, ceil_mode))
    y, index = node.meta["val"]
    small = index.to(dtype)
    fresh.meta = {**node.meta, "val": (y, small)}
    node.replace_all_uses_with(fresh)
    results[1].meta = {**results[1].meta, "val": small}
    for reader in readers:
        with graph.inserting_before(reader):
            call = graph.call_function(
                torch.ops.torch_max_backend.max_pool_offsets_backward.default,
                (reader.args[0], reader.args[1], *window, ceil_mode, results[1]),
            )
        call.meta = dict(reader.meta)
        reader.replace_all_uses_with(call)
        graph.erase_node(reader)
    graph.erase_node(node)


def _window(node: Node) -> tuple[tuple[list[int], ...], bool]:
    """Window, stride, padding and dilation in full, and ceil_mode, of aten's call with its defaults."""
    rank = 2 if "2d" in str(node.target) else 3
    given = [*node.args[1:], *[None] * (6 - len(node.args))]

    def spread(value: object, default: list[int]) -> list[int]:
        if value is None or value == []:
            return default
        values = [value] if isinstance(value, int) else list(value)
        return values * rank if len(values) == 1 else values

    window = spread(given[0], [])
    parts = (window, spread(given[1], window), spread(given[2], [0] * rank), spread(given[3], [1] * rank))
    return parts, bool(given[4])
