"""Convolutions that are fused with the program that reads their result.

On Hopper the program runs in the kernel's store (kernels/convolution/sm90/fused_entries.mojo), on a CPU over each block
of rows that has just been stored (kernels/convolution/cpu/fused_entries.mojo).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from max.graph import DeviceRef

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.loop_nest import LoopNest, loop_nest_of
from torch_max_backend.fusion.program import (
    MAX_INPUTS,
    Program,
    generate_epilogue,
    plain_epilogue,
    summing,
)
from torch_max_backend.fusion.terms import Leaf, in_memory, is_view
from torch_max_backend.mojo_ops.convolution import Geometry
from torch_max_backend.mojo_ops.functions import is_hopper
from torch_max_backend.mojo_ops.fused_convolution import (
    FusedKernel,
    FusedPass,
    narrow_columns,
    phases_in_store,
    shared_taps,
)
from torch_max_backend.typed_graph.operations import Call, Value, Word, words_of

_LARGE_BYTES = 4 * 2**20
"""The size from which a CPU's caches do not hold a result until a second pass."""


@dataclass(frozen=True)
class FusedConvolution:
    """A convolution and what it is computed with.

    Attributes:
        convolution: the op.
        leaf: of the program of its result's only reader, that is the convolution's result; None without such a program.
        others: what the program reads beside that.
        program: all as a function of a library.
        loop_nest: extents of the program's loops, then strides and starts of its operands.
        ordered: which of ``others``, by their numbers, are read at each element's own place alone, just before it is
            stored.
        sums: batch normalization's reduction of what is stored (``column_sums.py``).
    """

    convolution: Call
    leaf: Leaf | None
    others: tuple[Value, ...]
    program: Program
    loop_nest: list[int]
    ordered: frozenset[int] = frozenset()
    sums: Call | None = None

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of a call that reads ``inputs``."""
        kernel = self.program.convolution
        assert kernel is not None
        numbers = kernel.numbers(
            self.convolution.numbers,
            _shapes(self.convolution),
            self.sums.numbers if self.sums is not None else (),
            self.loop_nest,
        )
        return words_of(self.program.signature, numbers)

    @property
    def inputs(self) -> list[Value]:
        """What the program and the reduction read beside the convolution's result, x or dy, the filter, and what comes
        before the convolution for memory's sake."""
        first, second, *after = self.convolution.operands
        beside = self.sums.operands[1:] if self.sums is not None else []
        return [*self.others, *beside, first, second, *after]

    @property
    def in_order(self) -> list[frozenset[int]]:
        """For each result of ``sums``, and for the stored result, the inputs that it may be written over. The former
        are running statistics: a channel's new value reads only that channel's old one."""
        running: set[Value] = set()
        results = 0
        if self.sums is not None:
            read = {number for numbers in self.sums.in_order.values() for number in numbers}
            running.update(self.sums.operands[number] for number in read)
            results = len(self.sums.results)
        old = frozenset(number for number, value in enumerate(self.inputs) if value in running)
        return [*[old] * results, self.ordered]

    def with_sums(self, sums: Call) -> FusedConvolution | None:
        """The same with a reduction; None where that makes too many operands."""
        found = replace(self, sums=sums, program=summing(self.program, sums.kernel, sums.function.symbol))
        return found if len(found.inputs) <= MAX_INPUTS else None


def absorbed(
    group: Group, groups: Sequence[Group], kept: Collection[Value], device: DeviceRef
) -> FusedConvolution | None:
    """The convolution that can be computed together with ``group``, the last one where there are several.

    Args:
        group: a program.
        groups: all programs.
        kept: the graph's results.
        device: that the graph computes on.
    """
    if not (takes_part(device) or not device.is_gpu()) or len(group.roots) > 1 or group.terms.extents is not None:
        return None
    suits = is_suitable if device.is_gpu() else _suits_cpu
    found = [leaf for leaf in group.terms.leaves if _is_whole(leaf, group) and suits(leaf.value)]
    found = [
        leaf for leaf in found if leaf.value.dtype == group.roots[0].dtype and _is_read_by(leaf, group, groups, kept)
    ]
    loops = loop_nest_of(group.terms)
    if not found or loops is None:
        return None
    leaf = max(found, key=_position)
    assert leaf.value.maker is not None
    if len(group.terms.leaves) + len(leaf.value.maker.operands) - 2 > MAX_INPUTS:
        return None
    return _together(leaf, group, loops, device)


def takes_part(device: DeviceRef) -> bool:
    """Whether a device has the kernels that add up what they store, too."""
    return device.is_gpu() and is_hopper()


def convolution_alone(value: Value) -> FusedConvolution:
    """The convolution of a result that ``is_suitable``, without a program."""
    call, _ = _convolution(value)
    return FusedConvolution(call, None, (), plain_epilogue(_hopper_kernel(value, call)), [value.size, 0, 0])


def _is_whole(leaf: Leaf, group: Group) -> bool:
    """Whether all of the value is read in order, not its beginning alone."""
    return leaf.map == group.terms.identity and leaf.value.size == group.terms.size


def _position(leaf: Leaf) -> int:
    assert leaf.value.maker is not None
    return leaf.value.maker.position


def is_suitable(value: Value) -> bool:
    """Whether the value is a convolution that the Hopper kernels with a program in their store compute."""
    return _is_convolution(value) and _phases_in_store(value) is not None


def _phases_in_store(value: Value) -> int | None:
    """``phases_in_store`` of a value that ``_is_convolution``; None where an extent is symbolic, too."""
    call, geometry = _convolution(value)
    shapes = _shapes(call)
    return phases_in_store(_pass_of(call), value.dtype, geometry, *shapes) if shapes else None


def _suits_cpu(value: Value) -> bool:
    """Whether the value is a convolution of known sizes and a large result, which is made in blocks of rows.

    Forward alone: taking in a mask or a residual's gradient made no step faster on a CPU. Nothing is gained where a
    result stays in the cache, either. Kernels that make a result in no such blocks run the program behind it.
    """
    if not _is_convolution(value):
        return False
    call, _ = _convolution(value)
    if call.kernel != "conv_fprop" or value.shape is None or any(each.shape is None for each in call.operands[:2]):
        return False
    return value.bytes >= _LARGE_BYTES


def _is_convolution(value: Value) -> bool:
    """Whether the value is the result of a forward pass, or a data gradient, of known geometry."""
    maker = value.maker
    return isinstance(maker, Call) and maker.kernel in get_args(FusedPass) and isinstance(maker.facts, Geometry)


def _convolution(value: Value) -> tuple[Call, Geometry]:
    """The call of a value that ``_is_convolution``, and its geometry."""
    call = value.maker
    assert isinstance(call, Call) and isinstance(call.facts, Geometry)
    return call, call.facts


def _is_read_by(leaf: Leaf, group: Group, groups: Sequence[Group], kept: Collection[Value]) -> bool:
    """Whether nothing but ``group`` reads the value."""
    if any(other.value is leaf.value for each in groups if each is not group for other in each.terms.leaves):
        return False
    if sum(other.value is leaf.value for other in group.terms.leaves) > 1:
        return False
    if any(in_memory(value) is leaf.value for value in kept):
        return False
    roots = {root for each in groups for root in each.roots}
    waiting, seen = [leaf.value], {leaf.value}
    while waiting:
        for reader in waiting.pop().readers:
            result = reader.results[0] if reader.results else None
            known = is_view(reader) or (result is not None and (result in roots or reader in group.terms.fusible))
            if not known or result is None:
                return False
            if result not in roots and result not in seen:
                seen.add(result)
                waiting.append(result)
    return True


def _together(leaf: Leaf, group: Group, loops: LoopNest, device: DeviceRef) -> FusedConvolution | None:
    call, _ = _convolution(leaf.value)
    kernel = (_hopper_kernel if device.is_gpu() else _cpu_kernel)(leaf.value, call)
    program = generate_epilogue(group.terms, loops, leaf, kernel)
    if program is None:
        return None
    rest = [each for each in group.terms.leaves if each is not leaf]
    others = [strides for each, strides in zip(group.terms.leaves, loops.strides, strict=True) if each is not leaf]
    strides = [[0] * len(loops.extents), *map(list, others)]
    starts = [0, *(each.map.constant for each in rest)]
    loop_nest = [*loops.extents, *(stride for each in strides for stride in each), *starts]
    inputs = tuple(each.value for each in rest)
    # A CPU's convolution stores its own results before the program reads anything.
    ordered = (number for number, each in enumerate(rest) if _is_whole(each, group) and device.is_gpu())
    return FusedConvolution(call, leaf, inputs, program, loop_nest, frozenset(ordered))


def _hopper_kernel(value: Value, call: Call) -> FusedKernel:
    """The kernel that makes the convolution's result ``value``, which ``is_suitable``."""
    most_phases = _phases_in_store(value)
    _, geometry = _convolution(value)
    assert most_phases is not None
    result, a, w = _shapes(call)
    narrow = narrow_columns(_pass_of(call), geometry, result, a, w)
    taps = shared_taps(geometry, a, w) if narrow else 1
    return FusedKernel(_pass_of(call), value.dtype, call.function.symbol, "gpu", narrow, taps, most_phases)


def _cpu_kernel(value: Value, call: Call) -> FusedKernel:
    return FusedKernel(_pass_of(call), value.dtype, call.function.symbol, "cpu")


def _pass_of(call: Call) -> FusedPass:
    return cast("FusedPass", call.kernel)


def _shapes(call: Call) -> list[tuple[int, ...]]:
    """The shapes of a convolution's result and of what it reads, none where one is not known."""
    shapes = [each.shape for each in (*call.results, *call.operands[:2])]
    return [shape for shape in shapes if shape is not None] if None not in shapes else []
