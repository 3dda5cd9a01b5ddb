"""Where an operand's elements lie, seen from the elements of a result.

A result's elements are counted in memory order; an operand is read at an offset that is a sum over the digits of that
count, in a mixed radix, each times a stride. Broadcasts, transposes and reshapes are such maps, and so are most of
their compositions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Digit = tuple[int, int]
"""Extent and stride."""


@dataclass(frozen=True)
class IndexMap:
    """A map from 0 <= i < size to offsets: digits of i, the highest first, each with its extent and stride.

    Equal maps have equal digits: those of extent 1 are left out, neighbours that count on are one.
    """

    digits: tuple[Digit, ...]

    @property
    def size(self) -> int:
        """How many elements the map reads, repetitions counted."""
        return math.prod(extent for extent, _ in self.digits)

    @property
    def is_identity(self) -> bool:
        """Whether every element is read at its own place."""
        return self == identity(self.size)

    def then(self, other: IndexMap) -> IndexMap | None:
        """The map to ``other``'s offset at this map's offset; None where no such digits exist.

        Every digit is cut where it runs over a digit of ``other``; the digits that meet in one must not carry.
        """
        bases = [1]
        for extent, _ in reversed(other.digits):
            bases.append(bases[-1] * extent)
        strides = [stride for _, stride in reversed(other.digits)]
        reached = [0] * len(strides)
        found: list[Digit] = []
        for extent, stride in reversed(self.digits):
            left, at = extent, stride
            while left > 1 and stride:
                place = next((k for k in range(len(strides)) if bases[k] <= at < bases[k + 1]), None)
                if place is None or at % bases[place]:
                    return None
                taken, rest = divmod(bases[place + 1], at)
                if at * left <= bases[place + 1]:
                    taken = left
                elif rest or left % taken:
                    return None
                step = at // bases[place]
                found.append((taken, step * strides[place]))
                reached[place] += (taken - 1) * step
                left, at = left // taken, at * taken
            if left > 1:
                found.append((left, 0))
        if any(top >= bases[k + 1] // bases[k] for k, top in enumerate(reached)):
            return None
        return from_digits(found[::-1])


def from_digits(digits: Sequence[Digit]) -> IndexMap:
    """The map with these digits, the highest first."""
    merged: list[Digit] = []
    for extent, stride in digits:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return IndexMap(tuple(merged))


def identity(size: int) -> IndexMap:
    """The map that reads ``size`` elements in a row."""
    return from_digits([(size, 1)])


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def broadcast(shape: Sequence[int], result: Sequence[int]) -> IndexMap:
    """How a contiguous tensor of ``shape`` is read for a ``result`` that it is broadcast to, as NumPy does."""
    padded = [1] * (len(result) - len(shape)) + list(shape)
    strides = _strides(padded)
    return from_digits(
        [(wanted, 0 if own == 1 else stride) for wanted, own, stride in zip(result, padded, strides, strict=True)]
    )


def permutation(shape: Sequence[int], axes: Sequence[int]) -> IndexMap:
    """How a contiguous tensor of ``shape`` is read for the one whose axis i is its axis ``axes[i]``."""
    strides = _strides(shape)
    return from_digits([(shape[axis], strides[axis]) for axis in axes])


def refined(maps: Sequence[IndexMap], cuts: frozenset[int] = frozenset()) -> tuple[list[int], list[list[int]]] | None:
    """Common digits of maps of one size: their extents, the highest first, and each map's strides.

    None where the maps cut the count at places that do not divide each other.

    Args:
        maps: of one size.
        cuts: further places to cut at, as products of lower extents.
    """
    size = maps[0].size
    places = {1, size, *cuts}
    for each in maps:
        places.update(_cuts(each))
    ordered = sorted(places)
    if any(high % low for low, high in itertools.pairwise(ordered)):
        return None
    extents = [high // low for low, high in itertools.pairwise(ordered)][::-1]
    strides = []
    for each in maps:
        of_map: list[int] = []
        lows = _cuts(each)
        for (_, stride), low, high in zip(each.digits[::-1], lows, [*lows[1:], size], strict=False):
            of_map += [stride * (place // low) for place in ordered[:-1] if low <= place < high]
        strides.append(of_map[::-1])
    if any(len(of_map) != len(extents) for of_map in strides):
        return None
    return _joined(extents, strides)


@functools.cache
def _cuts(each: IndexMap) -> list[int]:
    """Where digits begin, the lowest first."""
    places = [1]
    for extent, _ in each.digits[:0:-1]:
        places.append(places[-1] * extent)
    return places if each.digits else []


def _joined(extents: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """With neighbouring digits that count on in every map as one."""
    kept: list[int] = []
    of_maps: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(extents):
        now = [of_map[axis] for of_map in strides]
        if kept and all(found[-1] == extent * stride for found, stride in zip(of_maps, now, strict=True)):
            kept[-1] *= extent
            for found, stride in zip(of_maps, now, strict=True):
                found[-1] = stride
        else:
            kept.append(extent)
            for found, stride in zip(of_maps, now, strict=True):
                found.append(stride)
    return kept, of_maps
