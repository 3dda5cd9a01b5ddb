"""``torch.autograd.grad`` without PyTorch's engine, for tracing for a GPU that is not present.

The engine asks the CUDA runtime for devices and streams before it runs a node on a fake CUDA tensor. This walk runs the
same nodes in the same order and adds gradients in the same order, so that the same graph is traced.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from torch_max_backend.torch_compat import input_metadata, sequence_number

_LAST = 2**64


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor],
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The vector-Jacobian products of ``outputs`` with ``grad_outputs``; None for inputs that no output depends on.

    Takes what AOTAutograd hands to ``torch.autograd.grad``: lists of tensors, unused inputs allowed.
    """
    wanted = [get_gradient_edge(tensor)[:2] for tensor in inputs]
    needed = _leading_to({edge[0] for edge in wanted}, [get_gradient_edge(tensor).node for tensor in outputs])
    waiting: dict[Node, int] = defaultdict(int)
    for node in needed:
        for following, _number in node.next_functions:
            if following is not None and following in needed:
                waiting[following] += 1
    buffers: dict[Node, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor, gradient in zip(outputs, grad_outputs, strict=True):
        node, number = get_gradient_edge(tensor)[:2]
        if node in needed:
            _add(buffers[node], number, _fitting(gradient, node, number))
    order = itertools.count()
    ready = [(-_sequence(node), next(order), node) for node in needed if not waiting[node]]
    heapq.heapify(ready)
    results: dict[tuple[Node, int], torch.Tensor] = {}
    captured: dict[Node, set[int]] = defaultdict(set)
    for node, number in wanted:
        captured[node].add(number)
    while ready:
        node = heapq.heappop(ready)[2]
        buffer = buffers.pop(node, {})
        for number in captured.get(node, ()):
            if number in buffer:
                results[node, number] = buffer[number]
        edges: list[tuple[Any, int]] = list(node.next_functions)
        goes_on = any(edge[0] in needed for edge in edges)
        made: Sequence[torch.Tensor | None] = [None] * len(edges)
        if goes_on and buffer:
            arguments = [buffer.get(number) for number in range(len(input_metadata(node)))]
            call: Any = node
            outcome = call(*arguments)
            made = outcome if isinstance(outcome, tuple) else (outcome,)
        # All of them are made to fit before one is added.
        made = [
            _fitting(gradient, each, number) if each in needed and gradient is not None else None
            for (each, number), gradient in zip(edges, made, strict=True)
        ]
        for (each, number), fitting in zip(edges, made, strict=True):
            if each not in needed:
                continue
            if fitting is not None:
                _add(buffers[each], number, fitting)
            waiting[each] -= 1
            if not waiting[each]:
                heapq.heappush(ready, (-_sequence(each), next(order), each))
    return tuple(results.get(edge) for edge in wanted)


def _leading_to(wanted: set[Node], roots: Sequence[Node]) -> set[Node]:
    """The nodes between ``roots`` and ``wanted``, both included."""
    leads: dict[Node, bool] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, seen = stack.pop()
        following = [each for each, _ in node.next_functions if each is not None]
        if seen:
            leads[node] = node in wanted or any(leads[each] for each in following)
        elif node not in leads:
            stack.append((node, True))
            stack.extend((each, False) for each in following if each not in leads)
    return {node for node, leading in leads.items() if leading}


def _sequence(node: Node) -> int:
    """Nodes made later run first; those that hold a leaf before all others."""
    return _LAST if node.name().endswith("AccumulateGrad") else sequence_number(node)


def _add(buffer: dict[int, torch.Tensor], number: int, gradient: torch.Tensor) -> None:
    buffer[number] = buffer[number] + gradient if number in buffer else gradient


def _fitting(gradient: torch.Tensor, node: Node, number: int) -> torch.Tensor:
    """``gradient`` in the shape and dtype of the value that it belongs to, as the engine makes it."""
    meta = input_metadata(node)[number]
    if gradient.shape != meta.shape:
        gradient = gradient.sum_to_size(meta.shape)
    return gradient if gradient.dtype == meta.dtype else gradient.to(meta.dtype)
