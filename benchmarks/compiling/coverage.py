"""Lists which published architectures run as launch lists, on a CPU or on a GPU that is not there, and what does not.

`python -m benchmarks coverage swin_t timm/levit --target sm_90a --autocast bfloat16` builds the graphs of a training
step of every architecture of `tests/models` so named (a library, "library/name", or how a name begins; all by default),
without compiling them: 3 to 25 s of CPU each, a few in each process. `--markdown` writes docs/models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.models.architectures import Architecture, architectures
from torch_max_backend import explain, explain_ahead
from torch_max_backend.ahead import TARGETS
from torch_max_backend.inspection.explain import Explanation

#: A process of its own for so many: what a failing one leaves behind ends with it.
IN_EACH_PROCESS = 6
MARK = "architecture: "
CPU = "cpu"
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Coverage:
    """The coverage of one architecture.

    Attributes:
        name: what its library calls it.
        library: that library.
        kind: what it is for.
        ops: how many aten ops of its graphs run in MAX.
        traced: the graphs that Dynamo made of its forward call: more than one where the model's own Python cuts it.
        graphs: the MAX graphs, forward and backward.
        launches: what a step launches, over all graphs.
        missing: the ops that stay in PyTorch, with how often.
        reasons: why, by op.
        error: what was raised, if anything.
        torch: the PyTorch that it was examined with.
        target: where it would run: a CPU, or a GPU's architecture.
        autocast: the dtype of autocast, "float32" without.
    """

    name: str
    library: str
    kind: str
    ops: int = 0
    traced: int = 0
    graphs: int = 0
    launches: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    error: str = ""
    torch: str = ""
    target: str = CPU
    autocast: str = "float32"

    @property
    def whole(self) -> bool:
        """Whether nothing stays in PyTorch."""
        return not (self.missing or self.error)


def examine(architecture: Architecture, target: str = CPU, autocast: str = "float32") -> Coverage:
    """Builds the graphs of one training step on ``target``, a CPU or a GPU's architecture."""
    result = Coverage(
        architecture.name, architecture.library, architecture.kind, torch=_version("torch"), target=target,
        autocast=autocast,
    )  # fmt: skip
    torch.manual_seed(0)
    try:
        explanation = _explained(architecture, target, DTYPES[autocast])
    except Exception as error:
        result.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return result
    missing: Counter[str] = Counter()
    for graph in explanation.graphs:
        for refusal in graph.refusals:
            missing[refusal.op] += 1
            result.reasons.setdefault(refusal.op, f"{refusal.reason} ({refusal.arguments})")
    result.ops = explanation.max_op_count
    result.traced = sum(graph.name != "backward" for graph in explanation.graphs)
    result.graphs = sum(graph.max_graphs for graph in explanation.graphs)
    result.launches = sum(sum(graph.launches.values()) for graph in explanation.graphs)
    result.missing = dict(missing.most_common())
    return result


def _explained(architecture: Architecture, target: str, autocast: torch.dtype | None) -> Explanation:
    positional, keywords = architecture.call()
    model = architecture.model().train()
    if target != CPU:
        return explain_ahead(model, *positional, target=target, autocast=autocast, quiet=True, **keywords)
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        return explain(model, *positional, quiet=True, compile=False, **keywords)


def _in_a_process(names: Sequence[str], target: str, autocast: str) -> list[Coverage]:
    """Examines some architectures in a process of their own; one that ends it is reported, the rest goes on."""
    results: list[Coverage] = []
    rest = list(names)
    where = ["--target", target, "--autocast", autocast]
    while rest:
        command = [sys.executable, "-m", "benchmarks", "coverage", "--record", *where, *rest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                results.append(Coverage(**json.loads(line.removeprefix(MARK))))
                rest.remove(_key(results[-1]))
        if rest:
            lost = next(architecture for architecture in architectures() if _key(architecture) == rest[0])
            lines = done.stderr.strip().splitlines()
            error = f"the process ended with status {done.returncode}: {lines[-1] if lines else ''}"
            results.append(
                Coverage(lost.name, lost.library, lost.kind, error=error, target=target, autocast=autocast)
            )  # fmt: skip
            rest.pop(0)
    return results


def _key(architecture: Architecture | Coverage) -> str:
    return f"{architecture.library}/{architecture.name}"


_HEADING = """\
# Models

The training graphs of {total} published architectures ({which}), built from their libraries' code with random
weights, small images and, where a configuration allows it, few and narrow layers. "whole" means that every operator
of forward and backward is a call of our kernels, in a launch list: {whole} of {total}. "traced" are the graphs that
`torch.compile` makes of one forward call (more than one where the model's own Python cuts it, whatever the backend);
"graphs" are forward and backward ones: twice as many where nothing cuts them. What is missing runs in PyTorch, between
two graphs.

Graphs are built, not compiled: this table says what is lowered, not how fast it runs. They were built {where} with
{torch}; the machine that wrote this page has torchvision {torchvision}, timm {timm}, transformers {transformers}.

This file is written by `python -m benchmarks coverage --markdown > docs/models.md`.
"""


def _version(package: str) -> str:
    return version(package).partition("+")[0]


def _where(result: Coverage) -> str:
    where = "on a CPU" if result.target == CPU else f"for {result.target}"
    return where if result.autocast == "float32" else f"{where} under {result.autocast} autocast"


def elsewhere(results: Sequence[Coverage]) -> str:
    """What became of architectures under another PyTorch or on another target, in a paragraph."""
    whole = sum(result.whole for result in results)
    counts = Counter(result.library for result in results)
    of = ", ".join(f"{count} of {library}" for library, count in counts.items())
    rest = [f"{result.name} ({_missing(result)})" for result in results if not result.whole]
    which = f" All but {', '.join(rest)}." if rest else ""
    first = results[0]
    return f"Under torch {first.torch}, {_where(first)}, {len(results)} were built ({of}), {whole} whole.{which}\n"


_COLUMNS = ("model", "kind", "aten ops", "traced", "graphs", "launches", "missing")


def _row(result: Coverage) -> tuple[str, ...]:
    counts = (result.ops, result.traced, result.graphs, result.launches)
    return result.name, result.kind, *map(str, counts), _missing(result)


def markdown(results: Sequence[Coverage], others: Sequence[Sequence[Coverage]] = ()) -> str:
    """The text of docs/models.md; each of ``others`` was examined under another PyTorch or for another target."""
    versions = {name: _version(name) for name in ("torchvision", "timm", "transformers")}
    counts = Counter(result.torch for result in results)
    versions["torch"] = " and ".join(f"torch {release} ({count} of them)" for release, count in counts.most_common())
    listed = f"of {len(architectures())}" if len(results) < len(architectures()) else "all"
    facts = {"which": f"{listed} in `tests/models`", "where": _where(results[0]), **versions}
    parts = [_HEADING.format(total=len(results), whole=sum(result.whole for result in results), **facts)]
    parts += [elsewhere(each) for each in others if each]
    for library in dict.fromkeys(result.library for result in results):
        mine = [result for result in results if result.library == library]
        parts.append(f"## {library}: {sum(result.whole for result in mine)} of {len(mine)}\n")
        parts.append(_table(_COLUMNS, map(_row, mine)))
    missing = what_is_missing(results)
    if missing:
        parts += ["## What is missing, by models\n", _table(("operation", "models", "why"), missing)]
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def what_is_missing(results: Sequence[Coverage]) -> list[tuple[str, str, str]]:
    """Each operation without a lowering or a library function, how many models have it, and an example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for result in results:
        found = {f"`{op}`": result.reasons[op] for op in result.missing}
        counts.update(found.keys())
        for op, example in found.items():
            examples.setdefault(op, f"{example}, in {result.name}")
    return [(op, str(count), examples[op]) for op, count in counts.most_common()]


def _missing(result: Coverage) -> str:
    if result.error:
        return f"not traced: {result.error[:160]}"
    return ", ".join(f"`{op}` ({count})" for op, count in result.missing.items())


def _read(path: Path) -> list[Coverage]:
    return [Coverage(**result) for result in json.loads(path.read_text())] if path.exists() else []


def _is_named(architecture: Architecture, names: Sequence[str]) -> bool:
    return not names or any(
        architecture.library == name or architecture.name.startswith(name) or _key(architecture).startswith(name)
        for name in names
    )


def _print(results: Sequence[Coverage]) -> None:
    console = Console(width=180)
    table = Table(*_COLUMNS)
    for result in results:
        table.add_row(*_row(result))
    console.print(table)
    missing = what_is_missing(results)
    if missing:
        table = Table("operation", "models", "why")
        for row in missing:
            table.add_row(*row)
        console.print(table)
    console.print(f"{sum(result.whole for result in results)} of {len(results)} whole")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which architectures; all by default")
    parser.add_argument("--target", default=CPU, choices=[CPU, *TARGETS], help="a CPU, or a GPU's architecture")
    parser.add_argument("--autocast", default="float32", choices=[*DTYPES], help="the dtype; float32 is none")
    parser.add_argument("--record", action="store_true", help="print JSON lines, in this process; names are whole")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="a file of results: those in it are kept, new ones are added at once")
    parser.add_argument("--markdown", action="store_true", help="print docs/models.md")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="files of other results: a paragraph each")
    options = parser.parse_args(arguments)
    if options.record:
        torch._dynamo.config.recompile_limit = 256
        warnings.simplefilter("ignore")
        chosen = {_key(architecture): architecture for architecture in architectures()}
        for name in options.names:
            print(MARK + json.dumps(asdict(examine(chosen[name], options.target, options.autocast))), flush=True)
        return
    named = [_key(architecture) for architecture in architectures() if _is_named(architecture, options.names)]
    found = {_key(result): result for result in (_read(options.json) if options.json else [])}
    keys = [key for key in named if key not in found]
    chunks = [keys[i : i + IN_EACH_PROCESS] for i in range(0, len(keys), IN_EACH_PROCESS)]
    build = functools.partial(_in_a_process, target=options.target, autocast=options.autocast)
    console = Console(stderr=True)
    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("architectures", total=len(keys))
        for results in pool.map(build, chunks):
            progress.advance(task, len(results))
            found |= {_key(result): result for result in results}
            if options.json:
                options.json.write_text(json.dumps([asdict(result) for result in found.values()], indent=1))
            for result in results:
                if not result.whole:
                    console.print(f"{_key(result)}: {result.error or result.missing}")
    chosen_entries = [found[key] for key in named if key in found]
    if options.markdown:
        print(markdown(chosen_entries, [_read(path) for path in options.others]), end="")
    else:
        _print(chosen_entries)


if __name__ == "__main__":
    main()
