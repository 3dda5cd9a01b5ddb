"""Turns the results of a compiled graph into what its FX graph returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from torch_max_backend.ir.layout import Order, strides_of
from torch_max_backend.runtime.tensors.interface import OutputSpec, View, WriteSpec
from torch_max_backend.torch_compat import copy_all, part_of


@dataclass(frozen=True)
class Fact:
    """One result; where a size is symbolic, ``shape`` is None and ``strides`` have no meaning."""

    order: Order
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    strides: tuple[int, ...]


def taker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from a sequence to its items at ``positions``."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[position] for position in positions]


_Copies = list[tuple[Callable[[Sequence[Any]], Sequence[Any]], Callable[[Sequence[Any]], Sequence[Any]]]]


def _copies(writes: Sequence[WriteSpec]) -> _Copies:
    """For each dtype: which arguments are updated, and from which results."""
    groups: dict[torch.dtype, list[WriteSpec]] = {}
    for write in writes:
        groups.setdefault(write.dtype, []).append(write)
    return [
        (taker([write.position for write in group]), taker([write.index for write in group]))
        for group in groups.values()
    ]


def _part(whole: torch.Tensor, view: View, of_argument: bool) -> torch.Tensor:
    if of_argument:
        # Whatever it is: autograd has to know, and it may be no plain memory.
        return whole.as_strided(view.shape, view.strides, whole.storage_offset() + view.offset)
    return part_of(whole, view.shape, view.strides, view.offset)


class Leaving:
    """A graph's outputs (results, constants and unchanged arguments), and the arguments that it updates.

    Args:
        outputs: what leaves.
        writes: the arguments that are updated.

    Attributes:
        facts: of the results.
        writes: as given.
    """

    def __init__(self, outputs: Sequence[OutputSpec], writes: Sequence[WriteSpec]) -> None:
        everything: list[OutputSpec | WriteSpec] = [*outputs, *writes]
        computed = {spec.index: spec for spec in everything if spec.index >= 0}
        self.facts = [
            Fact(spec.order, spec.dtype, spec.shape, strides_of(spec.shape or (), spec.order if spec.shape else ()))
            for spec in (computed[index] for index in range(len(computed)))
        ]
        self.writes = list(writes)
        self._copies = _copies(writes)
        self._copies_left = self._copies
        # What leaves is picked from the results, the constants and, behind them, the arguments.
        self._constants = [spec.constant for spec in outputs if spec.index < 0 and spec.passthrough is None]
        first_constant, first_argument = len(self.facts), len(self.facts) + len(self._constants)
        constants = iter(range(first_constant, first_argument))
        self._takes_arguments = any(spec.passthrough is not None for spec in outputs)
        self._pick = taker([
            spec.index if spec.index >= 0 else next(constants) if spec.passthrough is None
            else first_argument + spec.passthrough
            for spec in outputs
        ])  # fmt: skip
        self._views = [
            (number, spec.view, spec.passthrough is not None)
            for number, spec in enumerate(outputs)
            if spec.view is not None
        ]  # fmt: skip

    def leave_out(self, results: Collection[int]) -> None:
        """Marks ``results`` that launches may have written over their arguments before ``picked`` runs."""
        self._copies_left = _copies([write for write in self.writes if write.index not in results])

    def picked(self, tensors: list[Any], args: Sequence[Any], *, in_place: bool = False) -> list[Any]:
        """Updates the arguments that the model updates, and returns what it returns.

        Args:
            tensors: the results.
            args: of the graph.
            in_place: the results that ``leave_out`` got are the arguments.
        """
        copies = self._copies_left if in_place else self._copies
        if copies:
            with torch.no_grad():
                for take, new in copies:
                    copy_all(list(take(args)), list(new(tensors)))
        tensors += self._constants
        if self._takes_arguments:
            tensors += args
        results = list(self._pick(tensors))
        for number, view, of_argument in self._views:
            results[number] = _part(results[number], view, of_argument)
        return results
