"""A graph that was compiled, as a callable over tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.memory import GraphMemory, Kept
from torch_max_backend.graph.partition import Refusal
from torch_max_backend.ir.layout import strides_of
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.memory.packs import Packing


@dataclass
class CompiledGraph:
    """A graph that can run after its unit is compiled, and an account of what runs where.

    Attributes:
        name: of the FX graph.
        executables: the MAX graphs in it.
        refusals: the ops left to PyTorch.
        host_ops: draws and size computations, which run in Python by design.
        sources: for each output the executable that makes it with its number there; None for what none makes. Empty
            where the graph came from the cache.
        packing: of the outputs that leave in packs.
        cut_graph: the graph that calls the executables; None where one executable is all.
        unpacks: its first arguments are packs of these values, and the executables want the values.
        memory: what it is given, returns and keeps, of graphs that ``recorded_graphs`` receives.
        kept: what it, or the forward graph of a backward graph, keeps.
        first_saved: of a forward graph, the number of the first output that is kept for the backward graph.
        altered: of a forward graph, the arguments that it updates, returns, or returns a view of.
    """

    name: str
    runner: Callable[[Sequence[Any]], Sequence[Any]]
    executables: list[Executable]
    refusals: list[Refusal]
    host_ops: list[str]
    sources: Sequence[tuple[Executable, int] | None] = ()
    packing: Packing | None = None
    cut_graph: GraphModule | None = None
    unpacks: Packing | None = None
    memory: GraphMemory | None = None
    kept: Kept | None = None
    first_saved: int = 0
    altered: frozenset[int] = frozenset()

    @property
    def saved_alone(self) -> frozenset[int]:
        """The values that it saves for a backward graph, by their numbers, that nobody else sees."""
        return self.executables[0].spec.saved_alone if self.cut_graph is None else frozenset()

    #: AOTAutograd hands arguments over in a list that the callee may empty.
    _boxed_call = True

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        taken = list(args)
        args.clear()
        try:
            return self.runner(taken)
        except torch.OutOfMemoryError as error:
            if self.kept is not None:
                error.add_note(str(self.kept))
            raise

    def output_strides(self, gm: GraphModule, free_outputs: frozenset[int]) -> list[tuple[int, ...] | None]:
        """The strides of outputs where they may differ from those in the traced graph ``gm``.

        Args:
            gm: whose outputs these are; its sizes may be symbolic.
            free_outputs: as in ``compile_graph``.
        """
        strides: list[tuple[int, ...] | None] = []
        for number, (node, source) in enumerate(zip(outputs_of(gm), self.sources, strict=True)):
            fake = node.meta.get("val") if isinstance(node, Node) else None
            if not isinstance(fake, torch.Tensor):
                strides.append(None)
                continue
            order = source[0].output_order(source[1]) if source and number in free_outputs else None
            strides.append(tuple(fake.stride()) if order is None else strides_of(fake.shape, order))
        return strides


def outputs_of(gm: GraphModule) -> Sequence[Any]:
    """The outputs of a graph that returns several."""
    outputs: Any = gm.graph.output_node().args[0]
    return outputs
