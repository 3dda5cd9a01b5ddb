"""A launch list cut into segments, after each of which some of its results are complete.

DistributedDataParallel adds the gradients of a bucket up as soon as it has all of them. A backward graph that is one
list would hand all gradients over at its end; one that runs in segments hands over what is there after each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch_max_backend.launch_list.listing import Kind, LaunchList, Place


@dataclass(frozen=True)
class Segments:
    """The way in which a list is cut.

    Attributes:
        ends: of each segment, the number of launches up to its end.
        complete: for each result, the segment after which nothing writes or reads it, or arguments that go with it.
    """

    ends: tuple[int, ...]
    complete: tuple[int, ...]


def segments_of(
    listing: LaunchList, sizes: Sequence[int], least: int, read: Mapping[int, Collection[int]] | None = None
) -> Segments | None:
    """Segments that complete at least so many bytes of results each, but for the last; None where that is the whole.

    Args:
        listing: the list.
        sizes: bytes of each result.
        least: bytes, such as those of a bucket.
        read: of a result arguments that may be written to when it is complete: a gradient's weight. So it is complete
            behind the last launch that reads them.
    """
    if listing.updates:
        return None
    last, last_read = [0] * len(sizes), [0] * listing.arguments
    for number, launch in enumerate(listing.launches):
        for word in launch.words:
            if isinstance(word, Place) and word.kind is Kind.RESULT:
                last[word.number] = number
            elif isinstance(word, Place) and word.kind is Kind.ARGUMENT:
                last_read[word.number] = number
    for result, arguments in (read or {}).items():
        last[result] = max([last[result], *(last_read[number] for number in arguments)])
    # Results that are copies are made behind the last launch, of results that must be there until then.
    end = len(listing.launches)
    for number, place in enumerate(listing.results):
        if place != Place(Kind.RESULT, number):
            last[number] = end
            if place.kind is Kind.RESULT:
                last[place.number] = end
    ends: list[int] = []
    ready = 0
    by_launch = sorted(zip(last, sizes, strict=True))
    for position, (at, size) in enumerate(by_launch):
        ready += size
        more = position + 1 < len(by_launch)
        if ready >= least and more and by_launch[position + 1][0] > at and at + 1 < end:
            ends.append(at + 1)
            ready = 0
    if not ends:
        return None
    ends.append(end)
    complete = [next((segment for segment, until in enumerate(ends) if at < until), len(ends) - 1) for at in last]
    return Segments(tuple(ends), tuple(complete))
