"""Maps from a result's elements to the places of an operand's elements.

A result's elements are counted in memory order. An operand is read at an offset that is a sum over the digits of that
count, in a mixed radix, each times a stride. Broadcasts, transposes, reshapes and slices are such maps, and so are most
of their compositions. Guards on digits express padding: outside their range, nothing is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Digit = tuple[int, ...]
"""Extent and stride; of a guarded digit also the first value inside, and how many are. It adds nothing at the first."""


class ReadsOnlyPadding(Exception):
    """A map reads nothing of a padded tensor."""


@dataclass(frozen=True)
class IndexMap:
    """A map from 0 <= i < size to offsets: digits of i, the highest first, each with its extent and stride.

    Equal maps have equal digits: those of extent 1 are left out, neighbours that count on are one.

    Attributes:
        digits: of the count.
        start: the offset where every digit adds nothing.
    """

    digits: tuple[Digit, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """The number of elements that the map reads, repetitions counted."""
        return math.prod(digit[0] for digit in self.digits)

    @property
    def plain(self) -> IndexMap:
        """The map without guards: its digits add nothing at zero."""
        return from_digits([digit[:2] for digit in self.digits])

    @property
    def constant(self) -> int:
        """The part of the offset that ``plain`` lacks."""
        return self.start - sum(digit[1] * digit[2] for digit in self.digits if len(digit) > 2)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions under which something is read."""
        found = []
        for at, digit in enumerate(self.digits):
            if len(digit) > 2:
                count = [(each[0], int(place == at)) for place, each in enumerate(self.digits)]
                found.append(Guard(from_digits(count), digit[2], digit[3]))
        return tuple(found)

    def then(self, other: IndexMap) -> IndexMap | None:
        """The map to ``other``'s offset at this map's offset; None where no such digits exist.

        Every digit is cut where it runs over a digit of ``other``; the digits that meet in one must not carry.

        Raises:
            ReadsOnlyPadding: ``other`` guards all that this map reads.
        """
        bases = [1]
        for digit in reversed(other.digits):
            bases.append(bases[-1] * digit[0])
        radix = other.digits[::-1]
        begin = [self.start // bases[k] % radix[k][0] for k in range(len(radix))]
        if self.start >= bases[-1]:
            return None
        reached = list(begin)
        pieces: list[tuple[Digit, int | None]] = []
        for digit in reversed(self.digits):
            extent, at = digit[:2]
            if len(digit) > 2 and at:
                place = _place(bases, at)
                if place is None or at % bases[place]:
                    return None
                step = at // bases[place]
                pieces.append(((extent, step, *digit[2:]), place))
                reached[place] += (digit[3] - 1) * step
                continue
            left = extent
            while left > 1 and at:
                place = _place(bases, at)
                if place is None or at % bases[place]:
                    return None
                taken, rest = divmod(bases[place + 1], at)
                if at * left <= bases[place + 1]:
                    taken = left
                elif rest or left % taken:
                    return None
                step = at // bases[place]
                pieces.append(((taken, step), place))
                reached[place] += (taken - 1) * step
                left, at = left // taken, at * taken
            if left > 1:
                pieces.append(((left, 0, *digit[2:]), None))
        if any(top >= bases[k + 1] // bases[k] for k, top in enumerate(reached)):
            return None
        return _strided(pieces, begin, reached, radix, other.start)


@dataclass(frozen=True)
class Guard:
    """A condition on the count: ``start <= place < start + count``.

    Attributes:
        place: from the count.
        start: the first place inside.
        count: how many there are.
    """

    place: IndexMap
    start: int
    count: int


def _place(bases: Sequence[int], at: int) -> int | None:
    return next((k for k in range(len(bases) - 1) if bases[k] <= at < bases[k + 1]), None)


def _strided(
    pieces: Sequence[tuple[Digit, int | None]],
    begin: Sequence[int],
    reached: Sequence[int],
    radix: Sequence[Digit],
    start: int,
) -> IndexMap | None:
    """The map whose digits, the lowest first, are ``pieces``, each of the digit of ``radix`` that is named with it."""
    alone: dict[int, int] = {}
    for k, digit in enumerate(radix):
        stride = digit[1]
        if len(digit) == 2:
            start += begin[k] * stride
            continue
        first, count = digit[2:]
        if first <= begin[k] and reached[k] < first + count:
            start += (begin[k] - first) * stride
            continue
        own = [number for number, (_, place) in enumerate(pieces) if place == k]
        if not own:
            raise ReadsOnlyPadding
        high = _guarded_piece(own, pieces, (begin[k], first, count))
        if high is None:
            return None
        alone[high] = k
    found: list[Digit] = []
    for number, (piece, place) in enumerate(pieces):
        extent, step, *guard = piece
        if number not in alone:
            found.append((extent, step * (0 if place is None else radix[place][1]), *guard))
            continue
        k = alone[number]
        _, stride, first, count = radix[k]
        zero, inside = guard or (0, extent)
        low = max(zero, zero - (begin[k] - first) // step)
        high = min(zero + inside, zero - (begin[k] - first - count) // step)
        if low >= high:
            raise ReadsOnlyPadding
        found.append((extent, step * stride, low, high - low))
        start += (begin[k] + step * (low - zero) - first) * stride
    return from_digits(found[::-1], start)


def _guarded_piece(
    numbers: Sequence[int], pieces: Sequence[tuple[Digit, int | None]], bounds: Sequence[int]
) -> int | None:
    """The piece of a guarded digit that tells whether the digit is inside: the highest, if no sum of the others reaches
    its step and it begins and ends at the guard's ``bounds``. None where several have to be asked."""
    *lower, high = sorted(numbers, key=lambda number: pieces[number][0][1])
    step, below = pieces[high][0][1], 0
    for number in lower:
        extent, own, *guard = pieces[number][0]
        below += ((guard[1] if guard else extent) - 1) * own
    whole = not lower or (below < step and not any(bound % step for bound in bounds))
    return high if whole else None


def from_digits(digits: Sequence[Digit], start: int = 0) -> IndexMap:
    """The map with these digits, the highest first, from ``start`` on."""
    merged: list[Digit] = []
    for digit in digits:
        extent, stride, *guard = digit
        if extent == 1 or guard == [0, extent]:
            guard = []
        if extent == 1:
            continue
        if guard and guard[1] == 1:
            # It adds nothing at the one place inside.
            stride = 0
        if merged and not guard and len(merged[-1]) == 2 and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride, *guard))
    return IndexMap(tuple(merged), start)


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


def part(shape: Sequence[int], starts: Sequence[int], steps: Sequence[int], result: Sequence[int]) -> IndexMap:
    """How a contiguous tensor of ``shape`` is read for a slice of ``result``'s extents, none of which is 0."""
    strides = _strides(shape)
    digits = [(extent, step * stride) for extent, step, stride in zip(result, steps, strides, strict=True)]
    return from_digits(digits, sum(start * stride for start, stride in zip(starts, strides, strict=True)))


def padding(shape: Sequence[int], before: Sequence[int], result: Sequence[int]) -> IndexMap:
    """How a contiguous tensor of ``shape`` is read for a ``result`` in which it begins at ``before``."""
    digits = zip(result, _strides(shape), before, shape, strict=True)
    # Where an extent is 1, the one place is inside: a tensor without elements is not padded.
    return from_digits([digit if digit[0] > 1 else digit[:2] for digit in digits])


def refined(maps: Sequence[IndexMap], cuts: frozenset[int] = frozenset()) -> tuple[list[int], list[list[int]]] | None:
    """Common digits of maps of one size without guards: their extents, the highest first, and each map's strides.

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
        for digit, low, high in zip(each.digits[::-1], lows, [*lows[1:], size], strict=False):
            of_map += [digit[1] * (place // low) for place in ordered[:-1] if low <= place < high]
        strides.append(of_map[::-1])
    if any(len(of_map) != len(extents) for of_map in strides):
        return None
    return _joined(extents, strides)


@functools.cache
def _cuts(each: IndexMap) -> list[int]:
    """Where digits begin, the lowest first."""
    places = [1]
    for digit in each.digits[:0:-1]:
        places.append(places[-1] * digit[0])
    return places if each.digits else []


def _joined(extents: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same maps, with neighbouring digits joined where every map counts on across them."""
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
