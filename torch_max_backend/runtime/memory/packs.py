"""Values that a forward graph saves for its backward graph, packed into few tensors.

Autograd spends microseconds on each saved tensor. Values that only our own two graphs read share a *pack*, a tensor of
bytes, and their memory serves in one piece when they are no longer needed. The forward graph's launches write into it
and the backward graph's read from it, at offsets that are fixed when both graphs are built. Nothing is copied, and the
bytes are the values: copying a pack (hooks on saved tensors, checkpointing) copies the values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_max_backend.ir.layout import Order, strides_of
from torch_max_backend.launch_list import Kind, Launch, LaunchList, Place
from torch_max_backend.launch_list.memory import TORCH_ALIGNMENT, rounded_up
from torch_max_backend.runtime.tensors.interface import BuiltGraph, InputSpec, OutputSpec

MIN_LIMIT = 2**24
"""Bytes that a pack may have in any case."""
_LARGEST = 4
"""A pack has room for this many of the largest value. When the backward graph no longer needs several values, their
memory serves for a larger one; but an allocator deals with several pieces better than with one."""
_BASE_ALIGNMENT = 64
"""The alignment of a pack itself, which is that of PyTorch's allocator on a CPU."""


@dataclass(frozen=True)
class Packed:
    """A value in a pack.

    Attributes:
        number: of the value among all that the forward graph keeps.
        pack: the pack's number.
        offset: bytes from its beginning.
        shape: of the value.
        order: its memory order.
        dtype: its dtype.
    """

    number: int
    pack: int
    offset: int
    shape: tuple[int, ...]
    order: Order
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """The assignment of values to packs. Autograd gets the packs, then the other values in their order.

    Attributes:
        values: that are packed.
        sizes: of the packs, in bytes.
        kept: how many values there are, packed or not.
    """

    values: tuple[Packed, ...]
    sizes: tuple[int, ...]
    kept: int

    @property
    def others(self) -> list[int]:
        """The numbers of the values that are in no pack."""
        packed = {value.number for value in self.values}
        return [number for number in range(self.kept) if number not in packed]

    def unpacked(self, args: Sequence[Any]) -> list[Any]:
        """A backward graph's arguments, with a tensor for each value that is kept."""
        count = len(self.sizes)
        rest = len(self.others)
        kept = dict(zip(self.others, args[count : count + rest], strict=True))
        for value in self.values:
            content = args[value.pack][value.offset : value.offset + value.bytes].view(value.dtype)
            kept[value.number] = content.as_strided(value.shape, strides_of(value.shape, value.order))
        return [*(kept[number] for number in range(self.kept)), *args[count + rest :]]


def unpacking(run: Callable[[Sequence[Any]], Sequence[Any]], packing: Packing) -> Callable[..., Sequence[Any]]:
    """``run``, for arguments that are packed."""

    def unpacked(args: Sequence[Any]) -> Sequence[Any]:
        return run(packing.unpacked(args))

    return unpacked


def pack_results(built: BuiltGraph, kept: range, packable: Sequence[int]) -> tuple[BuiltGraph, Packing | None]:
    """A forward graph with packs among its results; as it is, and None, where there would be none.

    Args:
        built: the graph, a launch list.
        kept: the outputs that a backward graph gets, the last ones.
        packable: those among them that may be packed: what ``alone`` finds.
    """
    listing = built.listing
    assert isinstance(listing, LaunchList)
    packing = _dealt(built, kept, packable)
    if not packing.values:
        return built, None
    packed = {built.outputs[kept[value.number]].index: value for value in packing.values}
    left = [index for index in range(len(listing.results)) if index not in packed]
    numbers = {index: number for number, index in enumerate(left)}

    packs = range(len(packing.sizes))
    moved = _moves(Kind.RESULT, packed, range(len(left), len(left) + len(packs)), numbers)
    outputs = [
        replace(spec, index=numbers[spec.index]) if spec.index >= 0 else spec
        for spec in built.outputs
        if spec.index not in packed
    ]
    used = [sum(value.bytes for value in packing.values if value.pack == pack) for pack in packs]
    outputs[kept.start : kept.start] = [
        OutputSpec(len(left) + pack, (0,), torch.uint8, (packing.sizes[pack],), bytes=used[pack], foldable=False)
        for pack in packs
    ]
    new = replace(
        listing,
        launches=_placed(listing, moved),
        results=(
            *(moved(listing.results[index]) for index in left),
            *(Place(Kind.RESULT, len(left) + pack) for pack in packs),
        ),
        updates={numbers[result]: number for result, number in listing.updates.items()},
    )
    writes = [replace(write, index=numbers[write.index]) for write in built.writes]
    return replace(built, outputs=outputs, writes=writes, listing=new), packing


def alone(built: BuiltGraph, packable: Collection[int]) -> list[int]:
    """The outputs among ``packable`` that are nothing else, in memory that nothing is copied to or from.

    Args:
        built: a launch list.
        packable: outputs that a backward graph alone gets.
    """
    listing = built.listing
    assert isinstance(listing, LaunchList)
    uses = Counter([*(spec.index for spec in built.outputs), *(spec.index for spec in built.writes)])
    copied = [place for number, place in enumerate(listing.results) if place != Place(Kind.RESULT, number)]
    sources = {place.number for place in copied if place.kind is Kind.RESULT}

    def fits(spec: OutputSpec) -> bool:
        if spec.index < 0 or spec.shape is None or uses[spec.index] > 1 or spec.index in sources:
            return False
        return listing.results[spec.index] == Place(Kind.RESULT, spec.index) and spec.bytes > 0

    return [number for number in sorted(packable) if fits(built.outputs[number])]


def _dealt(built: BuiltGraph, kept: range, packable: Sequence[int]) -> Packing:
    """Values assigned to packs, at least two to each. The last ones, which a backward graph reads first, come first:
    what it writes over then begins at a pack's beginning."""
    packs: list[list[tuple[int, int]]] = []
    limit = max(MIN_LIMIT, _LARGEST * max((built.outputs[number].bytes for number in packable), default=0))
    size = limit
    for number in sorted(packable, reverse=True):
        room = rounded_up(built.outputs[number].bytes, TORCH_ALIGNMENT)
        if size + room > limit:
            packs.append([])
            size = 0
        packs[-1].append((number, size))
        size += room
    values: list[Packed] = []
    sizes: list[int] = []
    for members in packs:
        if len(members) < 2:
            continue
        for number, offset in members:
            spec = built.outputs[number]
            assert spec.shape is not None
            values.append(Packed(number - kept.start, len(sizes), offset, spec.shape, spec.order, spec.dtype))
        sizes.append(values[-1].offset + rounded_up(values[-1].bytes, TORCH_ALIGNMENT))
    return Packing(tuple(values), tuple(sizes), len(kept))


def packed_arguments(packing: Packing, positions: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Where arguments lie that come from the graph's arguments at ``positions``: their packs, and the offsets there."""
    places = {value.number: (value.pack, value.offset) for value in packing.values}
    return {number: places[position] for number, position in enumerate(positions) if position in places}


def take_from_packs(built: BuiltGraph, packing: Packing) -> BuiltGraph | None:
    """A backward graph that takes packs for the values that its first arguments were; None where it needs tensors.

    Args:
        built: the graph, a launch list.
        packing: of its forward graph.
    """
    listing = built.listing
    assert isinstance(listing, LaunchList)
    values = {value.number: value for value in packing.values}
    packed = {number: values[spec.position] for number, spec in enumerate(built.inputs) if spec.position in values}
    count, others = len(packing.sizes), packing.others
    positions = {old: count + new for new, old in enumerate(others)}

    def position(old: int) -> int:
        return positions[old] if old < packing.kept else old - packing.kept + count + len(others)

    returned = {spec.passthrough for spec in built.outputs} | {write.position for write in built.writes}
    if not packed or not returned.isdisjoint(values) or _needs_tensors(built, listing, packed):
        return None
    device = next(built.inputs[number].device for number in packed)
    used = sorted({value.pack for value in packed.values()})
    left = [number for number in range(len(built.inputs)) if number not in packed]
    numbers = {old: len(used) + new for new, old in enumerate(left)}

    moved = _moves(Kind.ARGUMENT, packed, {pack: new for new, pack in enumerate(used)}, numbers)
    reused: dict[int, int] = {}
    for number, size in listing.reused.items():
        place = moved(Place(Kind.ARGUMENT, number))
        reused[place.number] = max(reused.get(place.number, 0), place.offset + size)
    inputs = [
        InputSpec(pack, torch.uint8, (0,), device, (packing.sizes[pack],), alignment=_BASE_ALIGNMENT) for pack in used
    ]
    inputs += [replace(built.inputs[number], position=position(built.inputs[number].position)) for number in left]
    new = replace(
        listing,
        launches=_placed(listing, moved),
        arguments=len(inputs),
        results=tuple(map(moved, listing.results)),
        moved=frozenset(numbers[number] for number in listing.moved),
        updates={result: numbers[number] for result, number in listing.updates.items()},
        reused=reused,
    )
    outputs = [
        spec if spec.passthrough is None else replace(spec, passthrough=position(spec.passthrough))
        for spec in built.outputs
    ]
    writes = [replace(write, position=position(write.position)) for write in built.writes]
    return replace(built, inputs=inputs, outputs=outputs, writes=writes, listing=new)


def _needs_tensors(built: BuiltGraph, listing: LaunchList, packed: Mapping[int, Packed]) -> bool:
    """Whether a packed value is read in another memory order, copied or written to."""
    copied = {
        place.number
        for number, place in enumerate(listing.results)
        if place != Place(Kind.RESULT, number) and place.kind is Kind.ARGUMENT
    }
    if not packed.keys().isdisjoint({*copied, *listing.moved, *listing.updates.values()}):
        return True
    return not all(_lies_as(built.inputs[number], value) for number, value in packed.items())


def _lies_as(spec: InputSpec, value: Packed) -> bool:
    """Whether an argument is expected in the memory order that the value has in its pack."""
    return (
        spec.dense
        and (spec.shape, spec.dtype) == (value.shape, value.dtype)
        and _steps(value.shape, spec.order) == _steps(value.shape, value.order)
    )


def _steps(shape: Sequence[int], order: Order) -> list[int]:
    """The strides of the axes that have more than one element."""
    return [stride for extent, stride in zip(shape, strides_of(shape, order), strict=True) if extent != 1]


def _moves(
    kind: Kind, packed: Mapping[int, Packed], packs: Mapping[int, int] | Sequence[int], numbers: Mapping[int, int]
) -> Callable[[Place], Place]:
    """Where places of ``kind`` lie when the values of ``packed`` lie in packs.

    Args:
        kind: of the places that change, with those of arguments what replaces these; others stay.
        packed: values by their old numbers.
        packs: the new numbers of packs.
        numbers: the new numbers of what is not packed.
    """

    kinds = {kind, Kind.REUSED} if kind is Kind.ARGUMENT else {kind}

    def moved(place: Place) -> Place:
        if place.kind not in kinds:
            return place
        value = packed.get(place.number)
        if value is None:
            return replace(place, number=numbers[place.number])
        return Place(place.kind, packs[value.pack], value.offset + place.offset)

    return moved


def _placed(listing: LaunchList, moved: Callable[[Place], Place]) -> tuple[Launch, ...]:
    """The launches, at other places."""
    return tuple(
        replace(launch, words=tuple(moved(word) if isinstance(word, Place) else word for word in launch.words))
        for launch in listing.launches
    )
