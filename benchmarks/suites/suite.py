"""PyTorch's benchmark suites beside eager and Inductor: right or wrong, times, the first step, memory.

    python -m benchmarks suite --suite timm [--model NAME ...] [--device cuda --amp bf16] --output FILE [--minutes M]

Each model has a process of its own, with empty caches, which compiles the contenders; several compile side by side.
When all of them have compiled, they measure one after the other, so that times are those of a quiet machine; who still
compiles is stopped meanwhile. Rows are written as they come: with the same ``--output`` a second run measures what is
missing. A contender that fails is a row with its reason. ``--model module:function`` measures a case of your own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import ROOT, records, zoo
from benchmarks.contenders import EAGER, INDUCTOR, INDUCTOR_CAPTURED, MAX, MAX_CAPTURED, caches_in
from benchmarks.records import Results
from benchmarks.suites.accuracy import RULE, tolerance
from benchmarks.suites.models import suites
from benchmarks.suites.worker import MARK, Settings, command

#: By device; ours plain comes before ours captured, which then finds its kernels, and so does Inductor.
CHOSEN = {"cpu": (EAGER, MAX, INDUCTOR), "cuda": (EAGER, MAX, MAX_CAPTURED, INDUCTOR, INDUCTOR_CAPTURED)}
#: Of a round's time; the rest is for measuring.
COMPILING = 0.7
#: Seconds that a round needs at least, and that the end of all processes may take.
WORTH, ENDING = 60.0, 3.0


def missing_of(results: Results, model: str, contenders: Sequence[str]) -> list[str]:
    """The contenders without a row; eager before them, which they are compared with."""
    missing = [name for name in contenders if (model, name) not in results.rows]
    return [EAGER, *(name for name in missing if name != EAGER)] if missing else []


class Worker:
    """A model's process, and what it says; its caches are empty unless ``keep_caches``."""

    def __init__(
        self, chosen: Settings, cores: int, keep_caches: bool, said: queue.Queue[tuple[Worker, dict[str, Any]]]
    ) -> None:
        self.chosen, self.working, self.interrupted = chosen, "", set[str]()
        self.ready = self.ended = False
        # Contender names are no file names, and neither are those of a module's functions.
        own = Path(chosen.folder) / chosen.model.replace(":", ".")
        own.mkdir()
        self._errors = own / "stderr"
        environment = dict(os.environ)
        if not keep_caches:
            environment |= caches_in(own)
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = environment["TORCH_MAX_BACKEND_COMPILE_CORES"] = str(cores)
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command(chosen), cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._listen, args=(said,), daemon=True).start()

    def _listen(self, said: queue.Queue[tuple[Worker, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                said.put((self, json.loads(line.removeprefix(MARK))))
        said.put((self, {"event": "ended", "status": self.process.wait()}))

    @property
    def compiles(self) -> bool:
        """Whether it has neither compiled its contenders nor ended."""
        return not (self.ready or self.ended)

    def go(self) -> None:
        """Its turn to measure."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """A signal to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""


class Round:
    """Some models that compile side by side."""

    def __init__(self, chosen: Sequence[Settings], cores: int, results: Results, hard: float, console: Console) -> None:
        self._results, self._hard, self._console = results, hard, console
        self._said: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
        self._workers = [Worker(each, cores, results.settings["caches"] == "kept", self._said) for each in chosen]
        self._until = chosen[0].until

    def run(self) -> None:
        """Ends before the hard limit; processes that have not ended then are ended."""
        try:
            limit = min(self._until, self._hard)
            while time.time() < self._hard and not all(worker.ended for worker in self._workers):
                while any(worker.compiles for worker in self._workers) and self._hear(limit):
                    pass
                compiling = [worker for worker in self._workers if worker.compiles]
                for worker in compiling:
                    worker.interrupted.add(worker.working)
                    worker.send(signal.SIGSTOP)
                for worker in (worker for worker in self._workers if worker.ready):
                    worker.go()
                    while not worker.ended and self._hear(self._hard):
                        pass
                for worker in compiling:
                    worker.send(signal.SIGCONT)
                limit = (time.time() + self._hard) / 2
        finally:
            for worker in self._workers:
                if not worker.ended:
                    worker.send(signal.SIGKILL)

    def _hear(self, limit: float) -> bool:
        """Takes in what a process says next; False where nobody says anything before the limit."""
        try:
            worker, said = self._said.get(timeout=max(0.0, limit - time.time()))
        except queue.Empty:
            return False
        match said["event"]:
            case "facts":
                self._results.facts |= said["provenance"]
            case "ready":
                worker.ready = True
            case "working":
                worker.working = said["contender"]
            case "row":
                self._add(worker, said["row"])
            case "ended":
                worker.ready, worker.ended = False, True
                if said["status"] and worker.working:
                    reason = f"the process ended with status {said['status']}: {worker.last_words()}"
                    named = {"model": worker.chosen.model, "contender": worker.working, "batch": worker.chosen.batch}
                    self._add(worker, {**named, "error": reason})
        return True

    def _add(self, worker: Worker, row: dict[str, Any]) -> None:
        if row["contender"] in worker.interrupted:
            # The time that it was stopped for is not the contender's.
            row = {**row, "first_step_s": None}
        if self._results.get(row) is None:
            facts = self._results.facts
            hardware, kernels = facts.get("hardware", {}), facts.get("versions", {}).get("kernels", "")
            of_run = {"machine": hardware.get("gpu") or hardware.get("cpu", ""), "date": records.date()}
            searched = self._results.settings["cudnn_benchmark"]
            self._results.add({**row, **of_run, "kernels": kernels, "cudnn_benchmark": searched})
            self._console.print(described(row))


def described(row: dict[str, Any]) -> str:
    """A row in a line."""
    who = f"{row['model']}, {row['batch']}, {row['contender']}"
    if "error" in row:
        return f"{who}: fails: {row['error']}"
    right = "right" if row["right"] else f"wrong: {', '.join(row['wrong'])}"
    over = f", eager's over it {row['eager_ms'] / row['step_ms']:.2f}" if row["eager_ms"] else ""
    return f"{who}: {right}, step {row['step_ms']:.2f} ms{over}, first step {row['first_step_s']} s"


def measure(
    suite: Annotated[str, typer.Option(help="timm, torchbench, dense or attention")],
    output: Annotated[Path, typer.Option(help="the result file; rows that it has are not measured again")],
    model: Annotated[list[str], typer.Option(help="some of the suite's; all by default")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    mode: Annotated[str, typer.Option(help="training or inference")] = "training",
    batch: Annotated[int, typer.Option(min=0, help="0 for each model's own")] = 0,
    contender: Annotated[list[str], typer.Option(help="some; all of the device by default")] = [],  # noqa: B006
    minutes: Annotated[float, typer.Option(min=0.1, help="the end; what is not measured then is left")] = 60.0,
    side_by_side: Annotated[int, typer.Option(min=0, help="processes that compile; 0: one for two cores")] = 0,
    caches: Annotated[str, typer.Option(help="empty or kept: the user's own, for first steps after the first run")] = (
        "empty"
    ),
    search: Annotated[bool, typer.Option(help="cuDNN times its kernels first")] = True,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="measure failed contenders again")] = False,
) -> None:
    """Measures what is missing in the result file."""
    hard = time.time() + 60 * minutes - ENDING
    known = suites()
    allowed = {"suite": tuple(known), "device": tuple(CHOSEN), "amp": ("none", "bf16"),
               "mode": ("training", "inference"), "caches": ("empty", "kept")}  # fmt: skip
    settings = {"suite": suite, "device": device, "amp": amp, "mode": mode}
    for name, value in {**settings, "caches": caches}.items():
        zoo.refuse_unknown([value], allowed[name], name)
    zoo.refuse_unknown([name for name in model if ":" not in name], tuple(known[suite]))
    zoo.refuse_unknown(contender, CHOSEN[device], "contender")
    facts = {**settings, "cudnn_benchmark": search, "channels_last": device == "cuda", "caches": caches,
             "tolerance": tolerance(suite, mode, amp), "rule": RULE}  # fmt: skip
    results = Results(output, facts, key=("model", "contender"), order=("model",), retry=retry_failed)
    console = Console(soft_wrap=True)
    contenders = contender or CHOSEN[device]
    cores = len(os.sched_getaffinity(0))
    width = side_by_side or max(1, cores // 2)
    plain = Settings(
        **settings, model="", batch=batch, contenders=[], folder="", until=0.0, search=search,
        channels_last=device == "cuda",
    )  # fmt: skip
    while missing := {name: left for name in model or known[suite] if (left := missing_of(results, name, contenders))}:
        now, before = time.time(), len(results.rows)
        if hard - now < WORTH and before:
            break
        share = (hard - now) / math.ceil(len(missing) / width)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            chosen = [
                replace(plain, model=name, contenders=left, folder=folder, until=now + COMPILING * share)
                for name, left in list(missing.items())[:width]
            ]
            Round(chosen, math.ceil(cores / len(chosen)), results, hard, console).run()
        if len(results.rows) == before:
            break
    if missing:
        console.print(f"left for another run: {', '.join(missing)}")


def main() -> None:
    """Reads the options."""
    # Ended by a signal, it ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    typer.run(measure)


if __name__ == "__main__":
    main()
