"""Programs over the same rows in one launch: softmax and normalization, forward and backward.

A normalization is a sum over each row, a second sum that needs the first, and what is computed from the row and both;
as launches of their own they read the row three times. Where they follow each other, a block of a GPU runs all of them
over some rows before it takes others (kernels/reduction/rows.mojo): the row comes from memory once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.dependencies import Dependencies
from torch_max_backend.fusion.index_map import from_digits, identity
from torch_max_backend.fusion.loop_nest import loop_nest_of, vector_of
from torch_max_backend.fusion.movement import transposition
from torch_max_backend.fusion.program import Program, named, ops_of, program_of
from torch_max_backend.fusion.terms import Leaf
from torch_max_backend.mojo_ops.sources import symbol_of
from torch_max_backend.typed_graph.operations import Value

TARGETS = frozenset({"gpu"})
"""Where chains are made: a core's cache keeps what a launch has left there until the next one on a CPU."""
SHORTEST, LONGEST = 32, 8192
"""Elements of a row."""
_MAX_PROGRAMS = 6
_FEW_ROWS, _LARGE = 256, 1 << 20
"""Fewer rows than that, of more elements in all, are left to programs, which share a row among several blocks."""


@dataclass(frozen=True)
class RowsFunction:
    """A library's function that runs programs over rows, one after the other.

    Attributes:
        target: MAX's word for the kind of device.
        programs: in their order.
        whole: whether each is over all elements of the rows, not one for each row.
        ops: the aten ops that they compute.
    """

    target: Literal["cpu", "gpu"]
    programs: tuple[Program, ...]
    whole: tuple[bool, ...]
    ops: str = field(default="", compare=False)

    entry = "rows"
    seconds = 2.0
    use = "reduction"

    @property
    def _digest(self) -> str:
        parts = [f"{program.symbol} {whole}" for program, whole in zip(self.programs, self.whole, strict=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The name from which kernels on a GPU take theirs."""
        return named(self.ops, self._digest)

    @property
    def symbol(self) -> str:
        """The name of the exported C function."""
        return symbol_of(f"torch_max_rows_{self._digest}_{self.target}", (module for module, _ in self.imports))

    def extents(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Rows, and their elements.

        Args:
            numbers: of a call's words those that are no addresses.
        """
        return [numbers[:2]]

    @property
    def vector(self) -> int:
        """Neighbouring elements that a thread adds up at once."""
        return next(program.vector for program in self.programs if program.reduction is not None)

    @property
    def expression(self) -> str:
        """The entry with its programs as a type."""
        types = [self._type(number) for number in range(len(self.programs))]
        chain = types[-1]
        for each in types[-2::-1]:
            chain = f"Then[{each}, {chain}]"
        return f'rows["{self.target}", {chain}, "{self.name}"]'

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """The entry, its types and what the programs need."""
        own = {("reduction.rows", name) for name in ("rows", "Then", "ReducedRows", "ComputedRows")}
        entries = {"pointwise", "reduction"}
        return frozenset(
            own | {each for program in self.programs for each in program.imports if each[1] not in entries}
        )

    @property
    def definition(self) -> str:
        """The programs' functions."""
        return "".join(program.defined_as(self._function(number)) for number, program in enumerate(self.programs))

    def _function(self, number: int) -> str:
        return f"{self.programs[number].name}_{self._digest[:8]}_{number}"

    def _type(self, number: int) -> str:
        program = self.programs[number]
        sizes = f"{program.operands}, {program.digits}, {self._function(number)}, {program.vector}"
        counts = f"{program.guards}, {program.numbers}"
        if program.reduction is None:
            return f"ComputedRows[{sizes}, {counts}, {self.whole[number]}]"
        return f"ReducedRows[{program.reduction.parameters}, {sizes}, {program.parts}, {counts}]"


@dataclass(eq=False)
class Rows:
    """Groups of one launch.

    Attributes:
        outer: how many rows there are.
        extent: elements of a row.
        groups: in their order.
    """

    outer: int
    extent: int
    groups: list[Group]

    @property
    def roots(self) -> list[Value]:
        """The values that it computes."""
        return [root for group in self.groups for root in group.roots]

    def is_whole(self, group: Group) -> bool:
        """Whether a group computes from all elements of the rows."""
        return group.terms.size == self.outer * self.extent

    def takes(self, group: Group) -> bool:
        """Whether the next group may be this one: over the same rows, and of what earlier ones write it reads its own
        row alone."""
        terms, extents = group.terms, group.terms.extents
        if len(self.groups) == _MAX_PROGRAMS or not _is_generated(group):
            return False
        if extents is not None and (extents.outer, extents.reduced, extents.inner) != (self.outer, self.extent, 1):
            return False
        whole = self.is_whole(group)
        if not whole and (extents is not None or terms.size != self.outer):
            return False
        if whole and extents is None and not self._are_vectors(group):
            return False
        written = {root: root.size == self.outer * self.extent for root in self.roots}
        read = [leaf for leaf in terms.leaves if leaf.value in written]
        if not read or not all(self._is_of_row(leaf, whole, written[leaf.value]) for leaf in read):
            return False
        return not whole or self._shares(terms.leaves, {value for value, large in written.items() if large})

    def begins_with(self, group: Group) -> bool:
        """Whether a group that computes what these rows are may be the first one: each of the others reads its own rows
        of that."""
        roots = set(group.roots)
        if len(self.groups) == _MAX_PROGRAMS or group.terms.extents is not None or not self.is_whole(group):
            return False
        if not _is_generated(group) or not self._are_vectors(group):
            return False
        return all(
            self._is_of_row(leaf, self.is_whole(each), True)
            for each in self.groups
            for leaf in each.terms.leaves
            if leaf.value in roots
        )

    def _are_vectors(self, group: Group) -> bool:
        """Whether rows are whole vectors of what a group computes from them."""
        return self.extent % vector_of(group.terms, "gpu") == 0

    def _is_of_row(self, leaf: Leaf, whole: bool, written_whole: bool) -> bool:
        if whole == written_whole:
            return leaf.map == identity(self.outer * (self.extent if whole else 1))
        return whole and leaf.map == from_digits([(self.outer, 1), (self.extent, 0)])

    def _shares(self, leaves: Iterable[Leaf], written: Collection[Value]) -> bool:
        """Whether one of the large tensors is in the cache already."""
        near = {leaf.value for group in self.groups for leaf in group.terms.leaves} | set(written)
        return any(leaf.value in near and leaf.value.size >= self.outer * self.extent for leaf in leaves)


def rows(groups: Sequence[Group], dependencies: Dependencies) -> list[Rows]:
    """Groups that one launch computes, two at least over whole rows in each.

    Args:
        groups: that no other launch has taken.
        dependencies: of all launches; they learn of these.
    """
    reading: dict[Value, list[Group]] = {}
    for group in groups:
        for leaf in group.terms.leaves:
            reading.setdefault(leaf.value, []).append(group)
    writing = {root: group for group in groups for root in group.roots}
    found: list[Rows] = []
    taken: set[Group] = set()
    for group in groups:
        extents = group.terms.extents
        if group in taken or extents is None or extents.inner != 1 or not SHORTEST <= extents.reduced <= LONGEST:
            continue
        if (extents.outer < _FEW_ROWS and group.terms.size > _LARGE) or not _is_generated(group):
            continue
        chain = Rows(extents.outer, extents.reduced, [group])
        dependencies.add(chain, (root.maker for root in group.roots), (leaf.value for leaf in group.terms.leaves))
        while (following := _next(chain, reading, taken, dependencies)) is not None:
            chain.groups.append(following)
            inputs = (leaf.value for leaf in following.terms.leaves if leaf.value not in chain.roots)
            dependencies.add(chain, (root.maker for root in following.roots), inputs)
        if sum(map(chain.is_whole, chain.groups)) > 1:
            first = _first(chain, writing, taken, dependencies)
            if first is not None:
                chain.groups.insert(0, first)
                dependencies.add_group(chain, first)
            found.append(chain)
            taken.update(chain.groups)
        else:
            for each in chain.groups:
                dependencies.add(each, (root.maker for root in each.roots), ())
    return found


def _first(
    chain: Rows, writing: Mapping[Value, Group], taken: Collection[Group], dependencies: Dependencies
) -> Group | None:
    """A group whose result the chain reads, and which nothing that the chain waits for reads."""
    inputs = [leaf.value for group in chain.groups for leaf in group.terms.leaves if leaf.value not in chain.roots]
    for group in dict.fromkeys(writing[value] for value in inputs if value in writing):
        others = [value for value in inputs if value not in group.roots]
        if group not in taken and chain.begins_with(group) and not dependencies.waits(others, group):
            return group
    return None


def _next(
    chain: Rows, reading: dict[Value, list[Group]], taken: Collection[Group], dependencies: Dependencies
) -> Group | None:
    roots = set(chain.roots)
    candidates = dict.fromkeys(group for root in chain.roots for group in reading.get(root, ()))
    for group in candidates:
        if group in taken or group in chain.groups or not chain.takes(group):
            continue
        if not dependencies.waits((leaf.value for leaf in group.terms.leaves if leaf.value not in roots), chain):
            return group
    return None


def _is_generated(group: Group) -> bool:
    """Whether a program of its own computes the group, not a kernel that moves memory."""
    loops = loop_nest_of(group.terms)
    return loops is not None and bool(group.terms.leaves) and transposition(group.terms, loops) is None


def rows_function(chain: Rows, target: Literal["cpu", "gpu"]) -> RowsFunction:
    """The library function of a chain."""
    programs = []
    for group in chain.groups:
        loops = loop_nest_of(group.terms)
        assert loops is not None
        programs.append(program_of(group.terms, loops, target))
    ops = "_".join(dict.fromkeys(op for op in map(ops_of, (group.terms for group in chain.groups)) if op))
    return RowsFunction(target, tuple(programs), tuple(map(chain.is_whole, chain.groups)), ops)
