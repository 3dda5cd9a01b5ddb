"""Launches of training steps, to compare two versions of the project: "equal but for names". No GPU has to be there.

    python -m benchmarks launches --model resnet50 --target sm_90a --json before.json [--ptx]
    python -m benchmarks launches --compare before.json

The first command lowers training steps (``benchmarks step_graphs``), and writes each launch with its function, numbers,
places in memory and extents; with ``--ptx`` it also compiles the kernels and writes a digest of each one's PTX. The
second makes the same with the tree at hand and tells the differences; so does ``--compare before.json --compare
after.json`` without making anything. The exit status is 1 if there are any. Names, and digests of sources in names, do
not count as differences; what was renamed is told.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks import records, zoo
from benchmarks.compiling.launch_differences import compared
from benchmarks.compiling.ptx import compiled_kernels
from benchmarks.step_graphs import CPU, PLACES, WithLoss, step_graphs
from benchmarks.steps import MEMORY_FORMATS
from benchmarks.training.step_bytes import BATCHES
from torch_max_backend.fusion.program import Program
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.launch_list.listing import Kind, Launch, LaunchList, Place
from torch_max_backend.mojo_ops.functions import Function, required, with_rest

_SYMBOL = re.compile(r'"(torch_max_\w+)"')


def _source(function: Function, by_symbol: Mapping[str, Function]) -> str:
    """What a function is compiled from, without digests: its entry and parameters, with those of the functions that it
    calls in the place of their symbols, and the source of a program."""

    def called(match: re.Match[str]) -> str:
        return f"<{_source(by_symbol[match[1]], by_symbol)}>"

    expression, definition = function.expression, function.definition
    if isinstance(function, Program):
        expression, definition = expression.replace(function.name, "program"), function.defined_as("program")
    return _SYMBOL.sub(called, expression) + definition


def _placed(place: Place) -> str:
    number = "" if place.kind is Kind.WORKSPACE else f" {place.number}"
    return f"{place.kind.value}{number}" + (f" + {place.offset}" if place.offset else "")


def _row(launch: Launch, function: int) -> dict[str, Any]:
    """A launch: its function's number, the numbers before the first address, and each address with what follows it."""
    numbers: list[int] = []
    tensors: list[list[str | int]] = []
    for word in launch.words:
        if isinstance(word, Place):
            tensors.append([_placed(word)])
        else:
            (tensors[-1] if tensors else numbers).append(word)
    return {"function": function, "ops": launch.ops, "numbers": numbers, "tensors": tensors}


def _memory(listing: LaunchList) -> dict[str, Any]:
    """The memory of a launch list: all that it has besides launches."""
    return {
        "workspace": listing.workspace,
        "results": [_placed(place) for place in listing.results],
        "constants": [hashlib.sha256(each.content).hexdigest()[:16] for each in listing.constants],
        "updates": sorted(map(list, listing.updates.items())),
        "reused": sorted(map(list, listing.reused.items())),
    }


class Recording:
    """The launches of graphs, in the form of the result file.

    Attributes:
        graphs: one row for each, without its launches.
        rows: the launches.
        functions: what they call, in the order of their first launch; rows have their numbers here.
    """

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.functions: list[Function] = []

    def add(self, model: str, graphs: Sequence[CompiledGraph]) -> None:
        """Takes in the graphs of a model's step."""
        by_symbol = {function.symbol: function for function in required()}
        for graph in graphs:
            for executable in graph.executables:
                listing = executable.listing
                assert listing is not None
                name = {"model": model, "graph": executable.name}
                self.graphs.append({**name, **_memory(listing)})
                for number, launch in enumerate(listing.launches):
                    row = _row(launch, self._number(by_symbol[launch.function]))
                    self.rows.append({**name, "launch": number, **row})

    def _number(self, function: Function) -> int:
        if function not in self.functions:
            self.functions.append(function)
        return self.functions.index(function)

    def content(self) -> dict[str, Any]:
        """As the result file has it."""
        by_symbol = {function.symbol: function for function in with_rest(required())}
        sources = [_source(function, by_symbol) for function in self.functions]
        return {"graphs": self.graphs, "functions": sources, "rows": self.rows}


def recorded(models: Mapping[str, tuple[nn.Module, Sequence[torch.Tensor]]], target: str, ptx: bool) -> dict[str, Any]:
    """The launches of some models' training steps, with their functions and, with ``ptx``, kernels.

    Args:
        models: by name, each with the inputs of a call that gives its loss.
        target: one of ``PLACES``.
        ptx: compile the kernels, for an NVIDIA GPU.
    """
    recording = Recording()
    for name, (model, inputs) in models.items():
        recording.add(name, step_graphs(model, *inputs, target=target))
    content = recording.content()
    return {**content, "kernels": compiled_kernels(recording.functions, target)} if ptx else content


def _drawn(name: str, batch: int) -> tuple[nn.Module, Sequence[torch.Tensor]]:
    make, shape = zoo.MODELS[name]
    x = torch.zeros(batch or BATCHES.get(name, 64), *shape)
    labels = torch.zeros(x.shape[0], *(x.shape[2:] if name in zoo.PIXELWISE else ()), dtype=torch.int64)
    layout = MEMORY_FORMATS[x.dim()]
    return WithLoss(make().to(memory_format=layout)), (x.contiguous(memory_format=layout), labels)


def _made(settings: Mapping[str, Any]) -> dict[str, Any]:
    models = {name: _drawn(name, settings["batch"]) for name in settings["model"]}
    return {**settings, **recorded(models, settings["target"], settings["ptx"])}


def measure(
    model: Annotated[list[str], typer.Option(help=f"any of {', '.join(zoo.MODELS)}")] = ["resnet50"],  # noqa: B006
    batch: Annotated[int, typer.Option(min=0, help="0 for the model's own")] = 0,
    target: Annotated[str, typer.Option(help=f"one of {', '.join(PLACES)}")] = "sm_90a",
    ptx: Annotated[bool, typer.Option("--ptx", help="compile the kernels, too")] = False,
    compare: Annotated[list[Path], typer.Option(help="a file of before; a second one: of after")] = [],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="where the launches go")] = None,
) -> None:
    """Makes a file, or compares."""
    zoo.refuse_unknown(model)
    zoo.refuse_unknown([target], PLACES, "target")
    if ptx and not target.startswith("sm_"):
        raise typer.BadParameter(f"--ptx: {target} has none")
    if len(compare) > 2:
        raise typer.BadParameter("--compare takes one or two files")
    files = [json.loads(path.read_text()) for path in compare]
    settings = {"model": model, "batch": batch, "target": target, "ptx": ptx}
    if files:
        settings = {name: files[0][name] for name in settings}
    if len(files) < 2:
        files.append(_made(settings))
        if json_file is not None:
            versions = {"date": records.date(), "versions": records.versions(torch.device(CPU))}
            records.write(json_file, {**settings, **versions, **files[-1]})
    before, after = files[0], files[-1]
    if not compare:
        print(f"{len(after['rows'])} launches of {len(after['functions'])} functions")
        return
    found = compared(before, after)
    print(found)
    if found.differences:
        sys.exit(1)


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
