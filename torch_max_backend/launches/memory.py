"""Plans the workspace: an offset for each value that lives between two launches, first fit, the largest value first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes: as CUDA's allocator deals memory out, and more than any vector load asks for."""

TORCH_ALIGNMENT = 512
"""The same of PyTorch's allocator."""


def rounded_up(size: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is no less than ``size``."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Span:
    """A value's size in bytes, and the numbers of the launches that make it and that read it last."""

    size: int
    first: int
    last: int


def planned(spans: Sequence[Span]) -> tuple[list[int], int]:
    """An offset for each span, such that spans that live at the same time do not overlap, and the bytes for all.

    Values are placed in the order of their size, each at the lowest offset that is free for as long as it lives
    (greedy by size, Pisarchyk and Lee 2020, https://arxiv.org/abs/2001.03288).
    """
    offsets = [0] * len(spans)
    placed: list[tuple[int, int, int, int]] = []
    for number in sorted(range(len(spans)), key=lambda each: -spans[each].size):
        span = spans[number]
        size = max(ALIGNMENT, rounded_up(span.size, ALIGNMENT))
        offset = 0
        for begin, end, first, last in placed:
            if first <= span.last and span.first <= last:
                if offset + size <= begin:
                    break
                offset = max(offset, end)
        offsets[number] = offset
        insort(placed, (offset, offset + size, span.first, span.last))
    return offsets, max((end for _, end, _, _ in placed), default=0)
