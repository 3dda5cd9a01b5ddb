"""Which architectures are lowered whole: ``python -m tests.models.coverage > docs/models.md``.

Builds the graphs of a training step of every architecture without compiling them (3 to 25 s of CPU each), a few in each
process. Names on the command line choose some, by library or by the name's beginning, and print a table alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from tests.models.architectures import Architecture, architectures
from torch_max_backend import explain

#: A process of its own for so many: what a failing one leaves behind ends with it.
IN_EACH_PROCESS = 6
MARK = "architecture: "


@dataclass
class Entry:
    """What became of one architecture.

    Attributes:
        name: what its library calls it.
        library: that library.
        kind: what it is for.
        ops: how many aten ops of its graphs run in MAX.
        traced: the graphs that Dynamo made of its forward call: more than one where the model's own Python cuts it.
        graphs: the MAX graphs, forward and backward.
        missing: the ops that stay in PyTorch, with how often.
        reasons: why, by op.
        error: what was raised, if anything.
        torch: the PyTorch that it was examined with.
    """

    name: str
    library: str
    kind: str
    ops: int = 0
    traced: int = 0
    graphs: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    error: str = ""
    torch: str = ""

    @property
    def whole(self) -> bool:
        """Whether nothing stays in PyTorch."""
        return not self.missing and not self.error


def examine(architecture: Architecture) -> Entry:
    """Builds the graphs of one training step."""
    entry = Entry(architecture.name, architecture.library, architecture.kind, torch=_version("torch"))
    torch.manual_seed(0)
    try:
        positional, keywords = architecture.call()
        explanation = explain(architecture.model().train(), *positional, quiet=True, compile=False, **keywords)
    except Exception as error:
        entry.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return entry
    missing: Counter[str] = Counter()
    for graph in explanation.graphs:
        for refusal in graph.refusals:
            missing[refusal.op] += 1
            entry.reasons.setdefault(refusal.op, f"{refusal.reason} ({refusal.arguments})")
    entry.ops = explanation.max_op_count
    entry.traced = sum(graph.name != "backward" for graph in explanation.graphs)
    entry.graphs = sum(graph.max_graphs for graph in explanation.graphs)
    entry.missing = dict(missing.most_common())
    return entry


def _in_a_process(names: Sequence[str]) -> list[Entry]:
    """Examines some architectures in a process of their own; one that ends it is reported, the rest goes on."""
    entries: list[Entry] = []
    rest = list(names)
    while rest:
        command = [sys.executable, "-m", "tests.models.coverage", "--record", *rest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                entries.append(Entry(**json.loads(line.removeprefix(MARK))))
                rest.remove(_key(entries[-1]))
        if rest:
            lost = next(architecture for architecture in architectures() if _key(architecture) == rest[0])
            lines = done.stderr.strip().splitlines()
            error = f"the process ended with status {done.returncode}: {lines[-1] if lines else ''}"
            entries.append(Entry(lost.name, lost.library, lost.kind, error=error))
            rest.pop(0)
    return entries


def _key(architecture: Architecture | Entry) -> str:
    return f"{architecture.library}/{architecture.name}"


_HEADING = """\
# Models

The training graphs of {total} published architectures ({which}), built from their libraries' code with random
weights, small images and, where a configuration allows it, few and narrow layers. "whole" means that every operator
of forward and backward runs in MAX: {whole} of {total}. "traced" are the graphs that `torch.compile` makes of one
forward call (more than one where the model's own Python cuts it, whatever the backend); "MAX graphs" are forward and
backward ones: twice as many where nothing cuts them. What is missing runs in PyTorch, between two MAX graphs.

Graphs are built, not compiled: this table says what is lowered, not how fast it runs. torchvision {torchvision}, timm
{timm}, transformers {transformers}, torch {torch}, on a CPU.

This file is written by `python -m tests.models.coverage > docs/models.md`.
"""


def _version(package: str) -> str:
    return version(package).partition("+")[0]


def under_another(entries: Sequence[Entry]) -> str:
    """What became of architectures under another PyTorch, in a paragraph."""
    whole = sum(entry.whole for entry in entries)
    counts = Counter(entry.library for entry in entries)
    of = ", ".join(f"{count} of {library}" for library, count in counts.items())
    rest = [f"{entry.name} ({_missing(entry)})" for entry in entries if not entry.whole]
    which = f" All but {', '.join(rest)}." if rest else ""
    built = f"Under torch {entries[0].torch}, {len(entries)} of them were built ({of})"
    return f"{built}, and {whole} are lowered whole.{which}\n"


def markdown(entries: Sequence[Entry], others: Sequence[Entry] = ()) -> str:
    """The text of docs/models.md; ``others`` were examined under another PyTorch."""
    versions = {name: _version(name) for name in ("torchvision", "timm", "transformers", "torch")}
    listed = f"of {len(architectures())}" if len(entries) < len(architectures()) else "all"
    which = f"{listed} in `tests/models`"
    parts = [_HEADING.format(total=len(entries), which=which, whole=sum(entry.whole for entry in entries), **versions)]
    if others:
        parts.append(under_another(others))
    for library in dict.fromkeys(entry.library for entry in entries):
        mine = [entry for entry in entries if entry.library == library]
        lines = [f"## {library}: {sum(entry.whole for entry in mine)} of {len(mine)}", ""]
        lines += ["| model | kind | aten ops | traced | MAX graphs | missing |", "|" + " --- |" * 6]
        lines += [
            f"| {entry.name} | {entry.kind} | {entry.ops} | {entry.traced} | {entry.graphs} | {_missing(entry)} |"
            for entry in mine
        ]
        parts.append("\n".join(lines) + "\n")
    missing = Counter(op for entry in entries for op in entry.missing)
    if missing:
        lines = ["## What is missing, by models", "", "| operator | models | why |", "| --- | --- | --- |"]
        for op, count in missing.most_common():
            reason = next(entry.reasons[op] for entry in entries if op in entry.missing)
            lines.append(f"| `{op}` | {count} | {reason.replace('|', chr(92) + '|')} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _missing(entry: Entry) -> str:
    if entry.error:
        return f"not traced: {entry.error[:160]}".replace("|", "\\|")
    return ", ".join(f"`{op}` ({count})" for op, count in entry.missing.items())


def _read(path: Path | None) -> list[Entry]:
    return [Entry(**entry) for entry in json.loads(path.read_text())] if path and path.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="a library or the beginning of a name; all by default")
    parser.add_argument("--record", action="store_true", help="print JSON lines, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="a file of entries: those in it are kept, new ones are added at once")
    parser.add_argument("--others", type=Path, help="such a file of another PyTorch: a paragraph")
    options = parser.parse_args(arguments)
    if options.record:
        torch._dynamo.config.recompile_limit = 256
        warnings.simplefilter("ignore")
        chosen = {_key(architecture): architecture for architecture in architectures()}
        for name in options.names:
            print(MARK + json.dumps(asdict(examine(chosen[name]))), flush=True)
        return
    keys = [
        _key(architecture)
        for architecture in architectures()
        if not options.names
        or any(architecture.library == name or architecture.name.startswith(name) for name in options.names)
    ]
    found = {_key(entry): entry for entry in _read(options.json)}
    keys = [key for key in keys if key not in found]
    chunks = [keys[i : i + IN_EACH_PROCESS] for i in range(0, len(keys), IN_EACH_PROCESS)]
    console = Console(stderr=True)
    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("architectures", total=len(keys))
        for entries in pool.map(_in_a_process, chunks):
            progress.advance(task, len(entries))
            found |= {_key(entry): entry for entry in entries}
            if options.json:
                options.json.write_text(json.dumps([asdict(entry) for entry in found.values()], indent=1))
            for entry in entries:
                if not entry.whole:
                    console.print(f"{_key(entry)}: {entry.error or entry.missing}")
    chosen_entries = [found[key] for key in map(_key, architectures()) if key in found]
    print(markdown(chosen_entries, _read(options.others)), end="")


if __name__ == "__main__":
    main()
