"""Values that several programs compute and that are better stored once, as the sums along a chain of residuals.

What a program computes on the way stays in registers, and every program that needs it computes it again. That writes no
bytes, but each program reads all that the value is computed from: where gradients of residuals are added up and each
sum is needed on the way, later programs would read ever more of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.terms import Leaf, in_memory, readers_of
from torch_max_backend.typed_graph.operations import Operation, Reduction, Value

LAUNCH_BYTES = 2**23
"""What has to be saved for a launch that stores a value: a GPU moves about as much in the time of a launch."""
_LEAST_BYTES = 2**20
"""What has to be saved where no launch is added."""


def shared_values(
    groups: Sequence[Group], kept: Collection[Value], fusible: Collection[Operation], joins: Callable[[Value], bool]
) -> list[Value]:
    """The values that are to be stored because fewer bytes move then.

    Args:
        groups: all programs.
        kept: the graph's results.
        fusible: the operations that programs can compute.
        joins: whether a value's maker computes while it stores what is computed with the value.
    """
    programs = [_Program(group) for group in groups]
    choice = _Choice(programs, {in_memory(value) for value in kept}, fusible, joins)
    gains = {value: choice.gain(value) for value in choice.needing}
    while gains:
        best = max(gains, key=gains.__getitem__)
        if gains[best] < 0:
            break
        choice.chosen.append(best)
        changed = {value for program in choice.needing[best] for value in program.computed}
        gains.update((value, choice.gain(value)) for value in changed & gains.keys())
        del gains[best]
    return choice.chosen


class _Program:
    """The steps of a group.

    Attributes:
        computed: the values in between that are as large as its results.
        over_rows: whether it adds up rows of memory: with what is computed from its sums it is often one launch.
    """

    def __init__(self, group: Group) -> None:
        terms = group.terms
        self._steps = terms.steps
        self._stores = terms.stores
        self._size = terms.size
        self.over_rows = terms.extents is not None and terms.extents.inner == 1
        found = (step.value for step in terms.steps if not isinstance(step, Leaf) and step.operands)
        large = (value for value in found if value.size == terms.size and value.bytes >= _LEAST_BYTES)
        self.computed = dict.fromkeys(value for value in large if value not in terms.roots)

    def reads(self, stored: Collection[Value], value: Value | None = None) -> dict[Value, int]:
        """The bytes of each value that it reads.

        Args:
            stored: values that lie in memory beside its leaves.
            value: counts what this one, which it computes, is computed from; None counts everything.
        """
        if value is None:
            waiting = list(self._stores)
        else:
            steps = [step for step in self._steps if not isinstance(step, Leaf) and step.value is value]
            waiting = [operand for step in steps for operand in step.operands]
        found: dict[Value, int] = {}
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            step = self._steps[number]
            if isinstance(step, Leaf) or step.value in stored:
                found[step.value] = min(step.value.size, self._size) * step.value.dtype.size_in_bytes
            else:
                waiting += step.operands
        return found


class _Choice:
    """What a value's being stored would save.

    Attributes:
        chosen: the values that are stored.
        needing: the programs that compute a value, of those that more than one computes.
    """

    def __init__(
        self,
        programs: Sequence[_Program],
        kept: Collection[Value],
        fusible: Collection[Operation],
        joins: Callable[[Value], bool],
    ) -> None:
        self.chosen: list[Value] = []
        self._programs = programs
        self._kept = kept
        self._fusible = fusible
        self._joins = joins
        needing: dict[Value, list[_Program]] = defaultdict(list)
        for program in programs:
            for value in program.computed:
                if value.maker in fusible:
                    needing[value].append(program)
        self.needing = {value: users for value, users in needing.items() if len(users) > 1}

    def gain(self, value: Value) -> int:
        """The bytes that are saved if ``value`` is stored, less what they have to be."""
        stored = {*self.chosen, value}
        users = self.needing[value]
        operands = users[0].reads(self.chosen, value)
        counted = [user for user in users if not user.over_rows] or users[:1]
        saved = sum(sum(user.reads(self.chosen).values()) - sum(user.reads(stored).values()) for user in counted)
        gain = saved - sum(operands.values()) - value.bytes
        maker = self._storing(value, operands, stored)
        # The convolution's own result is neither written nor read.
        return gain - LAUNCH_BYTES if maker is None else gain + 2 * maker.bytes - _LEAST_BYTES

    def _storing(self, value: Value, operands: Iterable[Value], stored: Collection[Value]) -> Value | None:
        """The operand whose maker can store ``value`` in its place."""
        for operand in operands:
            if operand.size != value.size or operand.dtype != value.dtype or operand in self._kept:
                continue
            if not self._joins(operand) or not all(map(self._is_known, readers_of(operand))):
                continue
            if not any(operand in program.reads(stored) for program in self._programs):
                return operand
        return None

    def _is_known(self, reader: Operation) -> bool:
        """Whether programs compute what ``reader`` does."""
        return reader in self._fusible or isinstance(reader, Reduction)
