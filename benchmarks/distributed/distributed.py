"""Training steps of several processes on one host, alone and together: times, memory, communication that overlaps.

    python -m benchmarks distributed --output FILE [--gpus 1 --gpus 2 ...] [--model resnet50 ...] [--engine ddp ...]
                                     [--contender max ...] [--minutes M] [--device cpu] [--sync-batch-norm]

For each number of GPUs torchrun starts as many processes, which train each contender on a batch each, one contender
after the other. One process alone runs the model without an engine, on each GPU another model; scaling is its time over
that of all together.
"max" is DistributedDataParallel around a compiled model, "max, captured" the same with device graphs, "max, split" a
compiled DistributedDataParallel, whose graph Dynamo cuts at the ends of buckets, "inductor" the latter, too. Times are
those of the slowest process; overlap is the share of the time of NCCL's kernels in which others run beside them.

Rows are written as they come: with the same ``--output`` a second run measures what is missing. A contender that fails
is a row with its reason. Started by torchrun, the program measures with the processes that there are.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import ROOT, records, zoo
from benchmarks.contenders import MAX, MAX_SPLIT
from benchmarks.distributed.process import CHOSEN, DDP, FSDP, NONE, Case, How, contenders_of, run
from benchmarks.records import Results
from benchmarks.suites.worker import words_of

#: By model, images of each process.
BATCHES = {"resnet50": 128, "convnext_tiny": 64, "vit_base": 64, "unet3d": 2}
#: Seconds that the end of all processes may take.
ENDING = 10.0
#: In a process's environment, the GPUs that it may see where these are not all.
VISIBLE = "BENCHMARK_VISIBLE_GPUS"
console = Console(soft_wrap=True)
_running: list[subprocess.Popen[bytes]] = []


def results_of(path: Path, how: How) -> Results:
    """A result file, whose rows are told apart by their cases.

    Raises:
        BadParameter: the file has results of other settings.
    """
    return Results(path, asdict(how), key=[each.name for each in fields(Case)], order=("model", "engine", "gpus"))


def add(results: Results, case: Case, row: dict[str, Any]) -> None:
    """Writes a row, and prints it."""
    device = results.settings["device"]
    results.facts = results.facts or {**records.provenance(torch.device(device)), "nccl": _nccl(device)}
    results.add({**asdict(case), **row})
    console.print(described(case, row, alone(results, case)))


def alone(results: Results, case: Case) -> float | None:
    """Seconds of a queued step of one process alone."""
    contender = MAX if case.contender == MAX_SPLIT else case.contender
    row = results.get(asdict(replace(case, engine=NONE, gpus=1, sync=False, contender=contender)))
    return row["queued_seconds"] if row and "error" not in row else None


def _nccl(device: str) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None


def described(case: Case, row: dict[str, Any], alone: float | None) -> str:
    """A row in a line; ``alone``: seconds of a queued step of one process."""
    if "error" in row:
        return f"{case}: fails: {row['error']}"
    times = ", ".join(f"{name} {row[f'{name}_seconds'] * 1e3:.2f} ms" for name in ("queued", "median"))
    scaling = f", scaling {alone / row['queued_seconds']:.0%}" if alone and case.gpus > 1 else ""
    memory = f", {row['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in row else ""
    return f"{case}: {times}{scaling}, first step {row['first_step_seconds']:.1f} s{memory}{shared(row)}"


def shared(row: dict[str, Any]) -> str:
    """The share of communication that overlaps, in words."""
    if not row.get("communication_seconds"):
        return ""
    share = row["overlapped_seconds"] / row["communication_seconds"]
    return f", {share:.0%} of {row['communication_seconds'] * 1e3:.2f} ms of communication overlap"


@dataclass(frozen=True)
class Chosen:
    """The options that say what is measured."""

    models: Sequence[str]
    engines: Sequence[str]
    contenders: Sequence[str]
    batch: int
    sync: bool

    def cases(self, gpus: int) -> list[Case]:
        """All cases of so many processes."""
        engines = self.engines if gpus > 1 else [NONE]
        return [
            Case(model, engine, name, gpus, self.batch or BATCHES.get(model, 32), self.sync and engine == DDP)
            for engine in engines
            for model in self.models
            for name in contenders_of(engine, gpus, self.contenders)
        ]


def _marks(output: Path, visible: str) -> tuple[Path, Path]:
    """What is measured at the moment on the GPUs that processes may see, and why a process ended."""
    of = f".{output.name}{visible and f'.{visible}'}"
    return output.with_name(f"{of}.working"), output.with_name(f"{of}.failed")


def process(results: Results, chosen: Chosen, how: How, until: float) -> None:
    """One of torchrun's processes; where it fails, it writes why and ends."""
    gpus = int(os.environ["WORLD_SIZE"])
    working, failed = _marks(results.path, os.environ.get(VISIBLE, ""))
    missing = [case for case in chosen.cases(gpus) if results.get(asdict(case)) is None]

    def begin(case: Case) -> None:
        working.write_text(json.dumps(asdict(case)))

    try:
        run(how, missing, until, begin, partial(add, results))
    except Exception as error:
        if not failed.exists():
            failed.write_text(words_of(error))
        # The other processes wait for this one: torchrun ends them.
        console.print_exception(max_frames=20)
        sys.stdout.flush()
        os._exit(1)
    working.unlink(missing_ok=True)


def together(gpus: int, arguments: Sequence[str], hard: float, visible: str, share: int) -> bool:
    """Runs this program in so many processes, and ends them at the limit; whether all went well.

    Args:
        gpus: processes.
        arguments: of this program.
        hard: the limit, seconds since the epoch.
        visible: the only GPUs that they see; "" for all.
        share: of the cores, one in so many is theirs.
    """
    cores = str(max(1, len(os.sched_getaffinity(0)) // (gpus * share)))
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_MAX_BACKEND_COMPILE_CORES")
    environment = {**dict.fromkeys(names, cores), "PYTHONPATH": _python_path(), VISIBLE: visible}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command += ["-m", "benchmarks", "distributed", *arguments]
    started = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    _running.append(started)
    try:
        return started.wait(timeout=max(1.0, hard - time.time())) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(started)
        started.wait()
        _running.remove(started)


def _end(started: subprocess.Popen[bytes]) -> None:
    """Ends a run with its processes, where it goes on."""
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)


def _python_path() -> str:
    given = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{given}" if given else str(ROOT)


def measure(
    output: Annotated[Path, typer.Option(help="the result file; rows that it has are not measured again")],
    gpus: Annotated[list[int], typer.Option(min=1, help="processes")] = [1, 2],  # noqa: B006
    model: Annotated[list[str], typer.Option(help=f"any of {', '.join(zoo.MODELS)}")] = list(BATCHES),  # noqa: B006
    engine: Annotated[list[str], typer.Option(help="ddp or fsdp")] = [DDP],  # noqa: B006
    contender: Annotated[list[str], typer.Option(help=f"any of {'; '.join(CHOSEN)}")] = list(CHOSEN),  # noqa: B006
    batch: Annotated[int, typer.Option(min=0, help="images of each process; 0 for the model's own number")] = 0,
    size: Annotated[int, typer.Option(min=0, help="height and width of an image; 0 for the model's own")] = 0,
    device: Annotated[str, typer.Option(help="cuda, with NCCL, or cpu, with gloo")] = "cuda",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "bf16",
    sync_batch_norm: Annotated[bool, typer.Option(help="with DDP; on a GPU only")] = False,
    bucket_mb: Annotated[float, typer.Option(min=0.0, help="DDP's bucket_cap_mb")] = 25.0,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    search: Annotated[bool, typer.Option(help="cuDNN times its kernels first")] = True,
    minutes: Annotated[float, typer.Option(min=0.1, help="the end; what is not measured then is left")] = 60.0,
    until: Annotated[float, typer.Option(hidden=True)] = 0.0,
    only: Annotated[list[str], typer.Option(hidden=True)] = [],  # noqa: B006
) -> None:
    """Measures what is missing in the result file."""
    hard = until or time.time() + 60 * minutes
    zoo.refuse_unknown(model)
    for name, values, allowed in (
        ("engine", engine, (DDP, FSDP)), ("contender", contender, CHOSEN), ("device", [device], ("cpu", "cuda")),
        ("amp", [amp], ("none", "bf16")),
    ):  # fmt: skip
        for value in values:
            if value not in allowed:
                raise typer.BadParameter(f"--{name} is one of {'; '.join(allowed)}, not {value!r}")
    if "LOCAL_RANK" not in os.environ and device == "cuda" and torch.cuda.device_count() < max(gpus):
        raise typer.BadParameter(f"--gpus {max(gpus)}: there are {torch.cuda.device_count()} GPUs")
    if sync_batch_norm and device == "cpu":
        raise typer.BadParameter("--sync-batch-norm needs --device cuda: PyTorch has none on a CPU")
    how = How(device, amp == "bf16", size, steps, bucket_mb, search)
    chosen = Chosen(only or model, engine, contender, batch, sync_batch_norm)
    output.parent.mkdir(parents=True, exist_ok=True)
    if "LOCAL_RANK" in os.environ:
        process(results_of(output, how), chosen, how, hard - ENDING)
        return
    runs = Runs(output, chosen, how, ["--until", str(hard), *sys.argv[1:]], hard)
    left = [case for count in gpus for case in (runs.alone() if count == 1 else runs.all_of(chosen, count))]
    if left:
        console.print(f"left for another run: {'; '.join(map(str, left))}")


@dataclass(frozen=True)
class Runs:
    """The runs of torchrun that one result file needs.

    Attributes:
        output: the result file.
        chosen: what is measured.
        how: it is measured.
        arguments: of this program.
        hard: the end, seconds since the epoch.
    """

    output: Path
    chosen: Chosen
    how: How
    arguments: Sequence[str]
    hard: float

    def alone(self) -> list[Case]:
        """Measures one process's cases, on each GPU another model's; those that are left."""
        places = torch.cuda.device_count() if self.how.device == "cuda" else 1
        free: queue.Queue[int] = queue.Queue()
        for place in range(places):
            free.put(place)
        share = min(places, len(self.chosen.models))

        def measured(model: str) -> list[Case]:
            place = free.get()
            try:
                visible = str(place) if places > 1 else ""
                return self.all_of(replace(self.chosen, models=[model]), 1, visible, share)
            finally:
                free.put(place)

        with ThreadPoolExecutor(places) as threads:
            return [case for left in threads.map(measured, self.chosen.models) for case in left]

    def all_of(self, chosen: Chosen, gpus: int, visible: str = "", share: int = 1) -> list[Case]:
        """Measures all cases of so many processes, which begin anew where a contender fails; those that are left."""
        marks = working, failed = _marks(self.output, visible)
        named = [option for model in chosen.models for option in ("--only", model)]
        while True:
            results = results_of(self.output, self.how)
            left = [case for case in chosen.cases(gpus) if results.get(asdict(case)) is None]
            if not left or self._late():
                return left
            for mark in marks:
                mark.unlink(missing_ok=True)
            fine = together(gpus, [*self.arguments, *named], self.hard, visible, share)
            if not fine and not self._late():
                if not working.exists():
                    raise typer.Exit(1)
                case = Case(**json.loads(working.read_text()))
                reason = failed.read_text() if failed.exists() else "a process ended"
                add(results_of(self.output, self.how), case, {"error": reason})
            for mark in marks:
                mark.unlink(missing_ok=True)

    def _late(self) -> bool:
        return time.time() > self.hard - ENDING


def _ended(number: int, frame: object) -> None:
    for started in _running:
        _end(started)
    os._exit(128 + number)


def main() -> None:
    """Reads the options."""
    # Ended by a signal, it ends the processes that it started; those have the default.
    if "LOCAL_RANK" not in os.environ:
        signal.signal(signal.SIGTERM, _ended)
        signal.signal(signal.SIGINT, _ended)
    typer.run(measure)


if __name__ == "__main__":
    main()
