"""Whole graphs at random, compiled beside eager PyTorch and float64: what differs is shrunk and shown as a program.

A lot of programs shares the building of libraries. Most lots fuse little, because small generated programs are the same
in many graphs and are built once; every fourth lot fuses as it would for a user.

A folder gets, for each process, ``SEED.json`` (what was counted and found) and ``SEED.lot.py`` (the programs that it
runs now), and each fault as a program, ``fault_SEED_NUMBER.py``. With ``--jobs`` processes run side by side, which
share the cores; ``found.json`` then has what all of them found, and ``SEED.log`` what each printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import re
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks import records
from benchmarks.fuzzing import jobs as fuzz_jobs
from tests.random_graphs.check import Outcome, check
from tests.random_graphs.draw import programs
from tests.random_graphs.program import Program
from tests.random_graphs.shrink import shrunk
from torch_max_backend import lowering
from torch_max_backend.inspection import support

#: Every so many lots one program also runs through MAX's compiler, which takes ten seconds and more.
_LOTS_FOR_A_GRAPH = 8


class Findings:
    """What a process has found so far, kept in files.

    Args:
        folder: for the files; None keeps nothing.
        device: that programs run on.
        seed: of the process.
    """

    def __init__(self, folder: Path | None, device: str, seed: int) -> None:
        self.folder, self.device, self.seed = folder, device, seed
        self.kinds: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.ops: set[str] = set()
        self.left: Counter[str] = Counter()

    def begin(self, lot: list[Program]) -> None:
        """Keeps the programs that run now: one of them may end the process."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = "\n\n".join(program.demonstration(self.device) for program in lot)
            (self.folder / f"{self.seed}.lot.py").write_text(text)

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
                if self.folder is not None:
                    path = self.folder / f"fault_{self.seed}_{len(self.kinds)}.py"
                    path.write_text(self.kinds[kind])
                print(f"{self.kinds[kind]}\n{outcome.trace[-3000:]}", flush=True)

    def _smallest(self, outcome: Outcome, fused: bool) -> Program:
        kind = kind_of(outcome)

        def fails(program: Program) -> bool:
            found = check([program], self.device, fused=fused)
            return bool(found) and found[0].failure is not None and found[0].ours and kind_of(found[0]) == kind

        return shrunk(outcome.program, fails)

    def write(self) -> None:
        """Prints the counts, and writes the process's file."""
        reached, known = self._operators()
        print(dict(self.counts), f"{len(reached)} of {len(known)} operators", flush=True)
        if self.folder is not None:
            found = {"seed": self.seed, "counts": dict(self.counts), "operators": sorted(reached)}
            more = {
                "not_met": sorted(known - reached),
                "left_to_pytorch": dict(self.left),
                "failures": list(self.kinds.values()),
            }
            records.write(self.folder / f"{self.seed}.json", {**found, **more})

    def _operators(self) -> tuple[set[str], set[str]]:
        """The operators that ran, and all that are drawn from."""
        known = {support.name(each) for family in support.families().values() for each in family}
        return known & {op.removesuffix(".default") for op in self.ops}, known


def kind_of(outcome: Outcome) -> str:
    """What failures have in common that are alike."""
    text = re.sub(r"[\d.]+(e[-+]\d+)?|\[[^]]*\]|\([^)]*\)", "", outcome.failure or "").replace("batch :", "")
    where = re.findall(r'File "([^"]*torch_max_backend[^"]*)", line \d+, in (\w+)', outcome.trace)
    return f"{text[:60]} {where[-1] if where else ''}"


def _run(args: argparse.Namespace) -> int:
    """One process's share; its exit status."""
    faulthandler.enable()
    # Convolutions in TF32 are no faults, and hide some.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lowering.load_all()
    end = time.monotonic() + 60 * args.minutes
    most = math.inf if args.graphs is None else args.graphs
    found = Findings(args.output, args.device, args.seed)
    drawn = programs(args.seed)
    for number in itertools.count(args.first_lot):
        lot = list(itertools.islice(drawn, int(min(args.lot, most - found.counts["graphs"]))))
        fused = number % 4 == 0
        found.begin(lot)
        found.take(check(lot, args.device, fused=fused), fused=fused, shrink=not args.whole)
        if number % _LOTS_FOR_A_GRAPH == 0 and args.device == "cpu":
            found.take(check(lot[:1], args.device, {"run": "graph"}), fused=False, shrink=False)
        found.write()
        if time.monotonic() > end or found.counts["graphs"] >= most:
            return 1 if found.kinds else 0
    raise AssertionError


def main() -> int:
    """Reads the command's options, and runs; its exit status: 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="begin no lot later")
    parser.add_argument("--graphs", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=0, help="with --jobs, of the first process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lot", type=int, default=25, help="graphs whose libraries are built together")
    parser.add_argument("--first-lot", type=int, default=1, help="its number: every fourth fuses as for a user")
    parser.add_argument("--whole", action="store_true", help="shrink nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep what is found here")
    args = parser.parse_args()
    if args.jobs == 1:
        return _run(args)
    if args.output is None:
        parser.error("--jobs needs --output")
    return fuzz_jobs.run(
        args.output,
        jobs=args.jobs,
        seed=args.seed,
        minutes=args.minutes,
        graphs=args.graphs,
        options=["--device", args.device, "--lot", str(args.lot), *(["--whole"] if args.whole else [])],
    )
