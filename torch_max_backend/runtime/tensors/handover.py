"""Passes tensors between PyTorch and MAX without copies.

Both runtimes support DLPack, whose Python protocol synchronizes streams for each tensor. Here capsules are created and
consumed in C alone; streams are ordered once for each call (``runtime/engine/streams.py``).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, getitem, or_
from typing import Any

import torch
from max.driver import Buffer

from torch_max_backend.dtypes import max_dtype
from torch_max_backend.ir.layout import strides_of
from torch_max_backend.max_compat import buffer_address, buffer_from_capsule, make_dlpack_capsule
from torch_max_backend.runtime.tensors.interface import InputSpec, OutputSpec, WriteSpec
from torch_max_backend.runtime.tensors.leaving import Leaving, taker
from torch_max_backend.runtime.tensors.plain import plain
from torch_max_backend.torch_compat import alike, assert_size_stride, tensor_of_capsule

# DLDeviceType of the DLPack specification.
_DL_CPU, _DL_CUDA, _DL_ROCM = 1, 2, 10

#: Addresses that an argument is remembered at; a caching allocator deals out few in turn.
_ADDRESSES = 16
#: How often arguments are learned that are checked at once in the next call. PyTorch's state (autocast, modes, what
#: requires gradients) is a part of them.
_LEARNED = 8
#: No memory lies below: a tensor without memory is at its offset from null. The heap of a Python that is no
#: position-independent executable begins low.
_LOWEST_ADDRESS = 2**32 if torch.empty(1).data_ptr() >= 2**32 else 2**22
#: Of most tensors' addresses.
_USUAL_ALIGNMENT = 8

_data_ptr = torch.Tensor.data_ptr
_device_number = torch.Tensor.get_device
_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_is_negated = torch.Tensor.is_neg


def dlpack_device(device: torch.device) -> tuple[int, int]:
    """DLPack's name for a PyTorch device: its type and its index."""
    if device.type == "cpu":
        return _DL_CPU, 0
    return (_DL_ROCM if torch.version.hip else _DL_CUDA), device.index or 0


class _Capsule:
    """A DLPack capsule behind the protocol by which MAX asks for one; MAX's wish for stream order is not heard."""

    __slots__ = ("capsule", "device")

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self.capsule = capsule
        self.device = device

    def __dlpack__(self, **_: Any) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def borrow(address: int, dtype: torch.dtype, shape: Sequence[int], device: tuple[int, int]) -> Buffer:
    """A contiguous MAX buffer over memory that it does not own, and which must outlive it."""
    # () is the owner: nothing.
    capsule = make_dlpack_capsule((), address, *device, max_dtype(dtype), shape, None, None)
    return buffer_from_capsule(_Capsule(capsule, device))


class Inputs:
    """The tensor arguments of one graph on their way into MAX.

    A MAX buffer is made for an address and owns nothing, so it serves whatever tensor of that size, strides and dtype
    lies there later: parameters, activations and gradients come to the same addresses again and again. Only the length
    of a call counts, during which the caller holds the tensors.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = specs
        self.sizes = [math.prod(spec.shape or ()) * spec.dtype.itemsize for spec in specs]
        """Bytes of each input; of no use where a size is symbolic."""
        self._devices = [dlpack_device(spec.device) for spec in specs]
        known = [number for number, spec in enumerate(specs) if _is_regular(spec)]
        self._take = taker([specs[number].position for number in known])
        self._shapes = [specs[number].shape or () for number in known]
        self._strides = [strides_of(specs[number].shape or (), specs[number].order) for number in known]
        self._dtypes = [specs[number].dtype for number in known]
        self._books: list[dict[int, Buffer]] = [{} for _ in specs]
        self._others = [number for number in range(len(specs)) if number not in set(known)]
        unguarded = [spec.position for spec in specs if spec.unguarded]
        self._take_unguarded = taker(unguarded) if unguarded else None
        self._alignments = [max(spec.alignment, spec.dtype.itemsize) for spec in specs]
        self._usual_alignment = max([_USUAL_ALIGNMENT, *self._alignments])
        self._device_numbers = [-1 if spec.device.type == "cpu" else spec.device.index or 0 for spec in specs]
        self._alike: Callable[..., bool] | None = None
        """Whether arguments are what those of an earlier call were, in which nothing was unexpected."""
        self._learned = 0
        self._sound: list[int] | None = None
        """The addresses of the last call's arguments, which have been found to be as they should."""

    def buffers(self, args: Sequence[Any]) -> tuple[list[Buffer], list[torch.Tensor]]:
        """A buffer for each input, and what has to live until the graph has run; see ``enter``."""
        tensors, addresses = self.enter(args)
        try:
            return list(map(getitem, self._books, addresses)), tensors
        except KeyError:
            return list(map(self._buffer, range(len(tensors)), tensors, addresses)), tensors

    def enter(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """Each input in the memory order that the graph was built for, a copy where it lies in another, and its
        address.

        Raises:
            ValueError: a tensor of another shape, dtype or device than the graph was built for, or without memory.
            WrappedError: a tensor that stands for a batch.
        """
        regular = self._regular(args)
        if regular is not None:
            found = list(regular)
            for number in self._others:
                found.insert(number, self._ordered(number, args))
            addresses = self._addresses(found)
            if addresses is not None:
                return found, addresses
        found = [self._ordered(number, args) for number in range(len(self._specs))]
        return found, list(map(_data_ptr, found))

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Where tensors lie; None if one of them may not lie there, on its device, aligned as it should be."""
        try:
            addresses = list(map(_data_ptr, tensors))
        except RuntimeError:
            # Without a storage: a wrapper of functorch's, or another layout.
            return None
        if addresses == self._sound:
            return addresses
        if min(addresses, default=_LOWEST_ADDRESS) < _LOWEST_ADDRESS:
            return None
        if functools.reduce(or_, addresses, 0) % self._usual_alignment and any(
            address % alignment for address, alignment in zip(addresses, self._alignments, strict=True)
        ):
            return None
        if list(map(_device_number, tensors)) != self._device_numbers:
            return None
        self._sound = addresses
        return addresses

    def _regular(self, args: Sequence[Any]) -> Sequence[torch.Tensor] | None:
        """The arguments whose sizes and strides are known beforehand; None if one of them is not as expected."""
        tensors = self._take(args)
        if self._alike is not None and self._alike(*tensors):
            return tensors
        try:
            deque(map(assert_size_stride, tensors, self._shapes, self._strides), 0)
        except AssertionError:
            return None
        if list(map(_dtype_of, tensors)) != self._dtypes or (
            self._take_unguarded is not None and any(map(_is_negated, self._take_unguarded(args)))
        ):
            return None
        if tensors and self._learned < _LEARNED:
            self._learned += 1
            self._alike = alike(tensors)
        return tensors

    def _buffer(self, number: int, tensor: torch.Tensor, address: int) -> Buffer:
        spec, book = self._specs[number], self._books[number]
        buffer = book.get(address)
        if buffer is None:
            # Of a symbolic shape it comes from ``_ordered``, in the order of the memory.
            shape = tensor.shape if spec.shape is None else [spec.shape[dim] for dim in spec.order]
            buffer = borrow(address, spec.dtype, tuple(shape), self._devices[number])
            if spec.shape is not None:
                if len(book) >= _ADDRESSES:
                    book.clear()
                book[address] = buffer
        return buffer

    def _ordered(self, number: int, args: Any) -> torch.Tensor:
        """The contiguous tensor that has the argument's elements in the graph's order; a view where it can be."""
        spec = self._specs[number]
        tensor = args[spec.position]
        if tensor.dtype != spec.dtype or tensor.device != spec.device:
            expected, found = f"{spec.dtype} on {spec.device}", f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"argument {spec.position}: expected {expected}, got {found}")
        if spec.shape is not None and tuple(tensor.shape) != spec.shape:
            raise ValueError(f"argument {spec.position}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
        ordered = plain(tensor, f"argument {spec.position}").permute(spec.order).contiguous()
        return ordered.clone() if ordered.data_ptr() % self._alignments[number] else ordered


def _is_regular(spec: InputSpec) -> bool:
    """Whether the tensors' sizes and strides are known beforehand, and such that MAX can take their memory."""
    return spec.shape is not None and math.prod(spec.shape) > 0 and spec.dense


class Outputs:
    """The results of one graph on their way out of MAX.

    A tensor over a result's memory owns the result: MAX's allocator gets the memory back, in the order of MAX's stream,
    when the last view of it has gone.

    MAX lays all results of a call, and what it needs on the way to them, into one piece of memory, which it gets back
    as a whole. So a small result that its user keeps is copied, lest it keep a network's activations with it.

    Args:
        outputs: what leaves.
        writes: the arguments that are updated.
        device: of the graph.
        private: numbers of outputs that only a backward graph of ours will see.
        kept: numbers of outputs that users may keep beyond the next call. They are copied, too, where memory is only
            lent (``runtime/device_graphs/capture.py``).
        computed_bytes: of all that the graph computes.
    """

    #: A copy of a result that is that much smaller than all that was computed costs nothing beside it.
    _SMALL_PART = 8

    def __init__(
        self,
        outputs: Sequence[OutputSpec],
        writes: Sequence[WriteSpec],
        device: torch.device,
        private: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
        computed_bytes: int = 0,
    ) -> None:
        self._device = dlpack_device(device)
        self.leaving = Leaving(outputs, writes)
        facts = self.leaving.facts
        self._orders = [fact.order for fact in facts]
        self._dtypes = [max_dtype(fact.dtype) for fact in facts]
        self._shapes = [fact.shape or () for fact in facts]
        self._strides = [fact.strides for fact in facts]
        self._symbolic = [index for index, fact in enumerate(facts) if fact.shape is None]
        shown = {spec.index: spec for number, spec in enumerate(outputs) if number not in private and spec.index >= 0}
        self.not_lent = frozenset(outputs[number].index for number in kept if outputs[number].index >= 0)
        self._copied = {
            index for index in self.not_lent if shown[index].bytes * self._SMALL_PART <= computed_bytes
        }  # fmt: skip
        doubtful = {
            index for index, spec in shown.items() if spec.foldable and spec.bytes <= _Ownership.CONSTANT_BYTES
        } - self._copied  # fmt: skip
        if computed_bytes > _Ownership.HELD_BYTES:
            self._copied |= doubtful
            doubtful = set()
        self._ownership = _Ownership(frozenset(doubtful))

    def collect(self, results: list[Buffer], inputs: Sequence[Buffer], args: Sequence[Any]) -> list[Any]:
        """Updates the arguments that the model updates, and returns what it returns."""
        shapes, strides = self._shapes, self._strides
        if self._symbolic:
            shapes, strides = list(shapes), list(strides)
            for index in self._symbolic:
                extents, order = dict(zip(self._orders[index], results[index].shape, strict=True)), self._orders[index]
                shapes[index] = tuple(extents[dim] for dim in range(len(order)))
                strides[index] = strides_of(shapes[index], order)
        kind, number = self._device
        addresses = list(map(buffer_address, results))
        where = repeat(kind), repeat(number)
        capsules = map(make_dlpack_capsule, results, addresses, *where, self._dtypes, shapes, strides, repeat(None))
        tensors: list[Any] = list(map(tensor_of_capsule, capsules))
        for index in self._copied.union(self._ownership.foreign(results, inputs)):
            tensors[index] = tensors[index].clone()
        return self.leaving.picked(tensors, args)


class _Ownership:
    """Finds out which results of a graph have no memory of their own: these have to be copied.

    MAX returns an argument, or a reshaped one, as it is, and constants in the model's own memory. But PyTorch promised
    a tensor that its user may write to, and what MAX has for an argument lasts for a call only. The graph settles which
    results these are; it shows in the first call, and for constants in the second.

    Args:
        doubtful: numbers of results that may be constants.
    """

    #: Larger results are not taken for constants.
    CONSTANT_BYTES = 2**20
    #: The first call's results are held for the second one where they, and the memory around them, are that small.
    HELD_BYTES = 2**26

    def __init__(self, doubtful: frozenset[int]) -> None:
        self._doubtful = doubtful
        self._foreign: list[int] | None = None
        self._first: dict[int, Buffer] | None = None

    def foreign(self, results: Sequence[Buffer], inputs: Sequence[Buffer]) -> list[int]:
        """The numbers of the results that the caller has to copy."""
        first = self._first
        if first is None and self._foreign is not None:
            return self._foreign
        if self._foreign is None or first is None:
            self._foreign = _overlapping(results, inputs)
            if self._doubtful:
                self._first = {number: results[number] for number in self._doubtful}
            return sorted({*self._foreign, *self._doubtful})
        # The first call's results live until now: nothing else can have come to lie there.
        constants = {
            number for number, buffer in first.items() if buffer_address(results[number]) == buffer_address(buffer)
        }
        self._foreign, self._first = sorted({*self._foreign, *constants}), None
        return self._foreign


def _overlapping(results: Sequence[Buffer], inputs: Sequence[Buffer]) -> list[int]:
    """Results that lie in an input's memory or in an earlier result's."""
    taken = [(buffer_address(buffer), buffer_address(buffer) + _bytes(buffer)) for buffer in inputs]
    found = []
    for number, buffer in enumerate(results):
        begin, end = buffer_address(buffer), buffer_address(buffer) + _bytes(buffer)
        if any(begin < other_end and other_begin < end for other_begin, other_end in taken):
            found.append(number)
        taken.append((begin, end))
    return found


def _bytes(buffer: Buffer) -> int:
    return buffer.num_elements * buffer.element_size
