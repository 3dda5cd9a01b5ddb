"""Finds which launch depends on which, where several operations are one launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.convolutions import FusedConvolution
from torch_max_backend.typed_graph.operations import Operation, Value


class Dependencies:
    """The operations of a graph, some of which are computed together; the others are launches of their own.

    Args:
        groups: that are programs, each a launch.
        taken: of these the ones that run with a convolution.
    """

    def __init__(self, groups: Iterable[Group], taken: Mapping[Group, FusedConvolution]) -> None:
        self._launch_of: dict[Operation, object] = {}
        self._inputs: dict[object, list[Value]] = {}
        for group in groups:
            self.add_group(group, group)
        for group, absorbed in taken.items():
            self.add_convolution(group, absorbed)

    def add(self, launch: object, made: Iterable[Operation | None], inputs: Iterable[Value]) -> None:
        """Makes operations a part of ``launch``, which then reads these values, too."""
        self._inputs.setdefault(launch, []).extend(inputs)
        self._launch_of.update((maker, launch) for maker in made if maker is not None)

    def add_group(self, launch: object, group: Group) -> None:
        """Makes a program a part of ``launch``."""
        self.add(launch, (root.maker for root in group.roots), (leaf.value for leaf in group.terms.leaves))

    def add_convolution(self, launch: object, absorbed: FusedConvolution) -> None:
        """Makes a convolution, and the sums that it stores, a part of ``launch``."""
        for operation in (absorbed.convolution, absorbed.sums):
            if operation is not None:
                self.add(launch, [operation], operation.operands)

    def of(self, maker: Operation) -> object:
        """The launch that computes the operation."""
        return self._launch_of.get(maker, maker)

    def waits(self, values: Iterable[Value], launch: object) -> bool:
        """Whether one of ``values`` is there only after ``launch``."""
        return any(each is launch for each in self._before(values))

    def _before(self, values: Iterable[Value]) -> Iterator[object]:
        waiting, seen = list(values), set[object]()
        while waiting:
            maker = waiting.pop().maker
            if maker is None:
                continue
            launch = self.of(maker)
            if launch in seen:
                continue
            seen.add(launch)
            yield launch
            waiting += self._inputs.get(launch, maker.operands)
