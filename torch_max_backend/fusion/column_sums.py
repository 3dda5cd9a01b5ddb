"""Batch normalization's reductions in a convolution's store: sums over each channel's rows of what is stored.

Otherwise a reduction reads the convolution's result, or the result of the program in its store, from memory again. The
Hopper kernel adds up the values that it stores (kernels/convolution/sm90/column_sums.mojo). The result stays in memory
for its other readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from max.graph import DeviceRef

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.convolutions import FusedConvolution, convolution_alone, is_suitable, takes_part
from torch_max_backend.fusion.dependencies import Dependencies
from torch_max_backend.fusion.terms import in_memory
from torch_max_backend.mojo_ops.fused_convolution import STORED_SUMS
from torch_max_backend.typed_graph.operations import Call, Operation, Value


def with_sums(
    operations: Sequence[Operation], groups: Sequence[Group], taken: Mapping[Group, FusedConvolution], device: DeviceRef
) -> tuple[dict[Group, FusedConvolution], list[FusedConvolution]]:
    """The convolutions that also add up what they store: with a program, and alone.

    Args:
        operations: of the graph, in their order.
        groups: all programs.
        taken: the convolutions that are computed with a program, each with reductions of its own afterwards.
        device: that the graph computes on.
    """
    joined, alone = dict(taken), list[FusedConvolution]()
    if not takes_part(device):
        return joined, alone
    group_of = {group.roots[0]: group for group in taken}
    dependencies, done = Dependencies(groups, taken), set[Value]()
    for operation in operations:
        if not isinstance(operation, Call) or operation.kernel not in STORED_SUMS:
            continue
        stored = in_memory(operation.operands[0])
        if stored in done or stored.maker is None:
            continue
        group = group_of.get(stored)
        plain = taken[group] if group is not None else convolution_alone(stored) if is_suitable(stored) else None
        if plain is None or not _is_of_channels(operation, plain):
            continue
        chosen = plain.with_sums(operation)
        launch, beside = dependencies.of(stored.maker), operation.operands[1:]
        if chosen is None or dependencies.waits(beside, launch):
            continue
        alone_so_far = stored.maker.operands if launch is stored.maker else ()
        dependencies.add(launch, [operation], [*alone_so_far, *beside])
        done.add(stored)
        if group is None:
            alone.append(chosen)
        else:
            joined[group] = chosen
    return joined, alone


def _is_of_channels(operation: Operation, plain: FusedConvolution) -> bool:
    """Whether the reduction's columns are the convolution's."""
    rows, result = operation.operands[0].shape, plain.convolution.results[0].shape
    return rows is not None and result is not None and rows[1] == result[4]
