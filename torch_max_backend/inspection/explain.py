"""Reports which parts of a model run in MAX, which in PyTorch and why, and what memory a step takes."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torch_max_backend import ahead, backend
from torch_max_backend.checked import beartype
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.partition import Refusal
from torch_max_backend.inspection.step_memory import StepMemory, step_memory
from torch_max_backend.mojo_ops.functions import required
from torch_max_backend.torch_compat import tree_leaves, tree_map_only


@dataclass(frozen=True)
class GraphAccount:
    """One FX graph: forward, backward or inference.

    Attributes:
        name: "forward", "backward" or "inference".
        max_ops: the number of aten ops that run in MAX, by op.
        max_graphs: the number of MAX graphs; 1 if nothing stays in PyTorch between them.
        refusals: the ops that stay in PyTorch, with reasons and the user's lines.
        host_ops: random draws and size computations, which run in Python by design.
        layout_changes: the number of tensors that are copied into another memory order.
        launches: how often a call of the graph launches each entry of the kernel libraries; empty for graphs that MAX
            compiles. ``conv_pointwise`` is a convolution fused with the program that reads its result,
            ``conv_pointwise_sums`` one that also computes batch normalization's sums.
    """

    name: str
    max_ops: Mapping[str, int]
    max_graphs: int
    refusals: tuple[Refusal, ...]
    host_ops: tuple[str, ...]
    layout_changes: int
    launches: Mapping[str, int]


@dataclass
class Explanation:
    """The account of one call of a model.

    Attributes:
        graphs: in the order in which they were compiled.
        memory: of the call and its backward pass; None where nothing was compiled, or MAX compiles the graphs.
    """

    graphs: list[GraphAccount] = field(default_factory=list)
    memory: StepMemory | None = None

    @property
    def max_op_count(self) -> int:
        """The number of aten ops that run in MAX."""
        return sum(sum(graph.max_ops.values()) for graph in self.graphs)

    @property
    def fallback_count(self) -> int:
        """The number of aten ops that stay in PyTorch."""
        return sum(len(graph.refusals) for graph in self.graphs)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            self.print(console)
        return capture.get()

    def print(self, console: Console | None = None) -> None:
        """Prints tables of the graphs, of their launches, of the ops that stay in PyTorch, and of memory."""
        console = console or Console()
        table = Table("graph", "aten ops in MAX", "MAX graphs", "in PyTorch", "draws, sizes", "layout changes")
        for graph in self.graphs:
            table.add_row(
                graph.name, str(sum(graph.max_ops.values())), str(graph.max_graphs), str(len(graph.refusals)),
                str(len(graph.host_ops)), str(graph.layout_changes),
            )  # fmt: skip
        console.print(table)
        kernels = Table("graph", "launches")
        for graph in self.graphs:
            counts = sorted(graph.launches.items(), key=lambda item: (-item[1], item[0]))
            kernels.add_row(graph.name, ", ".join(f"{entry} {count}" for entry, count in counts) or "MAX's own")
        console.print(kernels)
        rest = Table("graph", "stays in PyTorch", "why", "line")
        for graph in self.graphs:
            for refusal in graph.refusals:
                call = f"{refusal.op}({refusal.arguments})"
                rest.add_row(graph.name, call, refusal.reason, refusal.user_line or "")
        if rest.row_count:
            console.print(rest)
        if self.memory is not None:
            self.memory.print(console)


def account_of(compiled: CompiledGraph) -> GraphAccount:
    """The account of one compiled graph."""
    ops: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    entries = {function.symbol: function.entry for function in required()}
    for executable in compiled.executables:
        ops.update(executable.built.ops)
        if executable.listing is not None:
            launches.update(entries[launch.function] for launch in executable.listing.launches)
    return GraphAccount(
        compiled.name,
        dict(ops),
        len(compiled.executables),
        tuple(compiled.refusals),
        tuple(compiled.host_ops),
        sum(len(executable.layout_changes) for executable in compiled.executables),
        dict(launches),
    )


@beartype
def explain(
    model: Callable[..., Any], *inputs: Any, quiet: bool = False, compile: bool = True, **keywords: Any
) -> Explanation:
    """Compiles ``model(*inputs, **keywords)`` for this backend, and prints and returns an account of what runs where.

    If parameters or inputs require gradients, the backward graph is compiled and reported too. The model's state does
    not change: a module is copied first.

    Args:
        model: a module or a function.
        inputs: its positional arguments.
        quiet: return the account without printing it.
        compile: False only builds the MAX graphs, which takes seconds; the model then runs in PyTorch. What launches
            keep between their kernels then does not count.
        keywords: its keyword arguments.

    Returns:
        The account, graph by graph.
    """
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model)
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs, warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        arguments = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad),
            inputs,
        )
        chosen = backend.max_backend if compile else backend.list_only
        results = torch.compile(model, backend=chosen)(*arguments, **keywords)
        wanting = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if wanting:
            torch.autograd.backward([leaf.sum() for leaf in wanting])
    return _told(graphs, quiet)


@beartype
def explain_ahead(
    model: torch.nn.Module,
    *inputs: Any,
    target: str,
    autocast: torch.dtype | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> Explanation:
    """As ``explain`` without compiling, for a call of ``model`` on a GPU that is not present.

    Args:
        model: the model, which is not modified.
        inputs: its positional arguments; their tensors represent tensors on the GPU.
        target: the GPU's architecture, as for ``compile_ahead``.
        autocast: the dtype of ``torch.autocast("cuda", dtype=...)`` around the call, if any.
        quiet: return the account without printing it.
        keywords: its keyword arguments.

    Returns:
        The account, graph by graph.

    Raises:
        OptionError: an unknown target or autocast dtype.
        DeviceUnavailableError: the process already uses a GPU.
    """
    with backend.recorded_graphs() as graphs, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        ahead.trace_ahead(backend.list_only, model, inputs, keywords, target=target, autocast=autocast)
    return _told(graphs, quiet)


def _told(graphs: Sequence[CompiledGraph], quiet: bool) -> Explanation:
    explanation = Explanation([account_of(graph) for graph in graphs], step_memory(graphs) if graphs else None)
    if not quiet:
        explanation.print()
    return explanation
