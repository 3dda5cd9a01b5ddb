"""Reorders launches to lower the peak of memory.

A graph computes its results in the order in which they are returned. Gradients of biases, which are sums, would thus
run at the end of a backward pass and keep their operands alive until then. A launch that frees at least as much memory
as it allocates runs as early as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

V = TypeVar("V")


def launch_order(
    reads: Sequence[Collection[V]], makes: Sequence[Collection[V]], sizes: Mapping[V, int], fixed: Collection[int]
) -> list[int]:
    """The numbers of the launches in the order in which they run.

    A launch that makes no more bytes than it frees moves to the place after its producers, and after the other readers
    of the values that it frees. The others stay in their order.

    Args:
        reads: values that each launch reads.
        makes: values that each launch makes.
        sizes: bytes of the values whose memory is used again; others cost and free nothing.
        fixed: launches that do not move.
    """
    makers = {value: number for number, made in enumerate(makes) for value in made}
    readers: dict[V, list[int]] = {}
    for number, read in enumerate(reads):
        for value in read:
            readers.setdefault(value, []).append(number)
    order: list[int] = []
    for number, (read, made) in enumerate(zip(reads, makes, strict=True)):
        place = len(order)
        freed = [value for value in read if value in sizes and readers[value][-1] == number]
        gain = sum(sizes[value] for value in freed) - sum(sizes.get(value, 0) for value in made)
        if number not in fixed and gain >= 0 and any(value in sizes for value in read):
            needed = {makers[value] for value in read if value in makers}
            needed.update(reader for value in freed for reader in readers[value])
            while place and order[place - 1] not in needed:
                place -= 1
        order.insert(place, number)
    return order
