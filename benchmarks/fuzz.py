"""Whole graphs at random, compiled beside eager PyTorch and float64: what differs is shrunk and shown as a program.

A lot of programs shares the building of libraries. Most lots fuse little, because small generated programs are the same
in many graphs and are built once; every fourth lot fuses as it would for a user.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks import records
from tests.random_graphs.check import Outcome, check
from tests.random_graphs.draw import programs
from tests.random_graphs.program import Program
from tests.random_graphs.shrink import shrunk
from torch_max_backend import lowering
from torch_max_backend.report import support

#: Every so many lots one program also runs through MAX's compiler, which takes ten seconds and more.
_LOTS_FOR_A_GRAPH = 8


class Findings:
    """What a run has found so far, kept in a file.

    Args:
        path: of the file; None keeps nothing.
        device: that programs run on.
    """

    def __init__(self, path: Path | None, device: str) -> None:
        self.path, self.device = path, device
        self.kinds: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.ops: set[str] = set()
        self.left: Counter[str] = Counter()

    def take(self, outcomes: list[Outcome], *, fused: bool, shrink: bool) -> None:
        """Counts what became of programs; the first of each kind of failure is shrunk and printed."""
        for outcome in outcomes:
            self.counts["graphs"] += 1
            self.counts["fused"] += fused
            self.ops |= outcome.ops
            self.left.update(outcome.left)
            if outcome.failure is None:
                continue
            if not outcome.ours:
                self.counts["PyTorch's own"] += 1
                continue
            self.counts["failures"] += 1
            kind = kind_of(outcome)
            if kind not in self.kinds:
                self.kinds[kind] = ""
                program = self._smallest(outcome, fused) if shrink else outcome.program
                self.kinds[kind] = f"# {outcome.failure}\n{program.demonstration(self.device)}"
                print(f"{self.kinds[kind]}\n{outcome.trace[-3000:]}", flush=True)

    def _smallest(self, outcome: Outcome, fused: bool) -> Program:
        kind = kind_of(outcome)

        def fails(program: Program) -> bool:
            found = check([program], self.device, fused=fused)
            return bool(found) and found[0].failure is not None and found[0].ours and kind_of(found[0]) == kind

        return shrunk(outcome.program, fails)

    def write(self, seed: int) -> None:
        """Writes the file."""
        known = {support.name(each) for family in support.families().values() for each in family}
        reached = known & {op.removesuffix(".default") for op in self.ops}
        print(dict(self.counts), f"{len(reached)} of {len(known)} operators", flush=True)
        if self.path is not None:
            found = {"seed": seed, "counts": dict(self.counts), "operators": len(reached)}
            more = {
                "not_met": sorted(known - reached),
                "left_to_pytorch": dict(self.left),
                "failures": list(self.kinds.values()),
            }
            records.write(self.path, {**found, **more})


def kind_of(outcome: Outcome) -> str:
    """What failures have in common that are alike."""
    text = re.sub(r"[\d.]+(e[-+]\d+)?|\[[^]]*\]|\([^)]*\)", "", outcome.failure or "").replace("batch :", "")
    where = re.findall(r'File "([^"]*torch_max_backend[^"]*)", line \d+, in (\w+)', outcome.trace)
    return f"{text[:60]} {where[-1] if where else ''}"


def main() -> int:
    """Reads the command's options, and runs; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--graphs", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lot", type=int, default=25, help="graphs whose libraries are built together")
    parser.add_argument("--whole", action="store_true", help="shrink nothing")
    parser.add_argument("--output", type=Path, help="write what is found as JSON here")
    args = parser.parse_args()
    # Convolutions in TF32 are no faults, and hide some.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lowering.load_all()
    end = time.monotonic() + 60 * args.minutes
    found = Findings(args.output, args.device)
    drawn = programs(args.seed)
    for number in itertools.count(1):
        lot = list(itertools.islice(drawn, args.lot))
        fused = number % 4 == 0
        if args.output is not None:
            # What ends the process is here.
            args.output.parent.mkdir(parents=True, exist_ok=True)
            text = "\n\n".join(program.demonstration(args.device) for program in lot)
            args.output.with_suffix(".lot.py").write_text(text)
        found.take(check(lot, args.device, fused=fused), fused=fused, shrink=not args.whole)
        if number % _LOTS_FOR_A_GRAPH == 0 and args.device == "cpu":
            found.take(check(lot[:1], args.device, {"run": "graph"}), fused=False, shrink=False)
        found.write(args.seed)
        if time.monotonic() > end or (args.graphs is not None and found.counts["graphs"] >= args.graphs):
            return 1 if found.kinds else 0
    raise AssertionError
