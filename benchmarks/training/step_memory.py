"""Peak memory of training steps beside eager PyTorch and Inductor, each in a process of its own.

    python -m benchmarks step_memory [--model resnet18 ...] [--batch 32 ...] [--amp none ...] [--json FILE]
    python -m benchmarks step_memory --device cuda --amp bf16 [--side-by-side 8] [--json FILE]

On a CPU what a step adds to the process is read from Linux: after warm-up all that need not stay is given back
(gradients, our workspaces, the C library's free memory), the peak of the resident set is reset, and steps run. The
figure is that peak less what was resident before: activations, gradients, workspaces and what libraries take for
themselves, whoever's allocator they come from. Parameters, the optimizer's state, the images and the program do not
count.

On a GPU figures are PyTorch's statistics of warmed steps, the peak of what was allocated and of what was reserved from
the device, less what there was before the contender's model: parameters and the optimizer's state count. Memory that a
warmed step does not need is given back to the device first.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import json
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import records, zoo
from benchmarks.contenders import (
    EAGER,
    EAGER_CHANNELS_LAST,
    INDUCTOR,
    INDUCTOR_CAPTURED,
    MAX,
    MAX_CAPTURED,
    PAIRS,
    compiled,
)
from benchmarks.steps import MEMORY_FORMATS, drawn, release, stepper
from benchmarks.training.step_bytes import BATCHES
from benchmarks.training.training_zoo import SIZES
from torch_max_backend.runtime.memory.kept import drop_kept

ON_CPU = (MAX, EAGER, EAGER_CHANNELS_LAST, INDUCTOR)
ON_GPU = (MAX, MAX_CAPTURED, EAGER_CHANNELS_LAST, INDUCTOR, INDUCTOR_CAPTURED)
#: Ours on a GPU, and what each is compared with.
RIVALS = dict(reversed(PAIRS))
WARM, MEASURED = 3, 3
#: A captured step has warm-up steps of its own.
WARM_ON_GPU = 7


def resident(peak: bool = False) -> int:
    """Bytes of this process's resident set, or its peak since ``reset_peak``."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {wanted}")


def reset_peak() -> None:
    """The peak of the resident set begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Returns free memory to the system."""
    gc.collect()
    drop_kept()
    ctypes.CDLL(None).malloc_trim(0)


def rise(model: str, who: str, batch: int, amp: str) -> int:
    """Bytes that a step of one contender adds to this process."""
    base, x, y = drawn(model, batch, SIZES[model], torch.device("cpu"))
    own = copy.deepcopy(base)
    del base
    if who == EAGER_CHANNELS_LAST:
        own, x = own.to(memory_format=MEMORY_FORMATS[x.dim()]), x.to(memory_format=MEMORY_FORMATS[x.dim()])
    step = stepper(own, compiled(own, who), x, y, amp == "bf16")
    for _ in range(WARM):
        step()
    own.zero_grad(set_to_none=True)
    give_back()
    before = resident()
    reset_peak()
    for _ in range(MEASURED):
        step()
    return resident(peak=True) - before


def peaks(model: str, who: str, batch: int, amp: str) -> dict[str, int]:
    """Bytes allocated and reserved on the GPU at the peak of a warmed step of one contender."""
    device = torch.device("cuda")
    base, x, y = drawn(model, batch, 0, device)
    base, x = base.to(memory_format=MEMORY_FORMATS[x.dim()]), x.to(memory_format=MEMORY_FORMATS[x.dim()])
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    own = copy.deepcopy(base)
    step = stepper(own, compiled(own, who), x, y, amp == "bf16")
    for _ in range(WARM_ON_GPU):
        step()
    release(device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEASURED):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": peak[0] - before[0], "reserved": peak[1] - before[1]}


def _apart(measured: str, model: str, who: str, batch: int, amp: str) -> Any:
    """What ``rise`` or ``peaks`` gives in a process of its own; None where it fails."""
    arguments = json.dumps([model, who, batch, amp])
    code = (
        f"import json; from benchmarks.training.step_memory import {measured};"
        f" print('measured', json.dumps({measured}(*json.loads({arguments!r}))))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    lines = [line.removeprefix("measured ") for line in run.stdout.splitlines() if line.startswith("measured ")]
    return json.loads(lines[0]) if run.returncode == 0 and lines else None


def over_eager(row: dict[str, Any]) -> float:
    """Our bytes over those of eager PyTorch, in the memory format that needs less."""
    rises = row["step_bytes"]
    return rises[MAX] / min(rises[EAGER], rises[EAGER_CHANNELS_LAST])


def over_inductor(row: dict[str, Any], who: str, kind: str) -> float | None:
    """Our peak on a GPU over that of Inductor run the same way; None where either failed.

    Args:
        row: of a result file.
        who: ``max`` or ``max, captured``.
        kind: ``allocated`` or ``reserved``.
    """
    ours, theirs = row["peak_bytes"].get(who), row["peak_bytes"].get(RIVALS[who])
    return ours[kind] / theirs[kind] if ours and theirs else None


def _on_cpu(model: list[str], batch: list[int], amp: list[str], json_file: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    console = Console()

    def write() -> None:
        """After each row: a run that is stopped keeps what it has measured."""
        if json_file is not None:
            facts = {"steps": MEASURED, "torch_threads": torch.get_num_threads(), "failed": failed}
            records.write(json_file, {**facts, **records.provenance(torch.device("cpu")), "rows": rows})

    table = Table("model", "batch", "amp", *(f"{who}, MiB" for who in ON_CPU), "ours over eager's")
    for kind, images, name in itertools.product(amp, batch, model):
        found = {who: _apart("rise", name, who, images, kind) for who in ON_CPU}
        if None in found.values():
            failed.append(f"{name}, batch {images}, amp {kind}")
            console.print(f"{failed[-1]}: failed")
            continue
        rows.append({"model": name, "batch": images, "amp": kind, "step_bytes": found})
        write()
        sizes = [f"{(found[who] or 0) / 2**20:.1f}" for who in ON_CPU]
        words = [name, str(images), kind, *sizes, f"{over_eager(rows[-1]):.2f}"]
        console.print(" ".join(words))
        table.add_row(*words)
    console.print(table)
    if rows:
        console.print(f"geometric mean {statistics.geometric_mean(map(over_eager, rows)):.2f}")


def _on_gpu(model: list[str], batch: list[int], amp: list[str], json_file: Path | None, side_by_side: int) -> None:
    if not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU: none is available")
    steps = list(itertools.product(amp, batch, model))
    rows = [
        {"model": name, "batch": images or BATCHES[name], "amp": kind, "peak_bytes": dict.fromkeys(ON_GPU)}
        for kind, images, name in steps
    ]

    def fill(number: int, who: str) -> None:
        row = rows[number]
        row["peak_bytes"][who] = _apart("peaks", row["model"], who, row["batch"], row["amp"])
        if json_file is not None:
            with lock:
                records.write(json_file, {"steps": MEASURED, **records.provenance(torch.device("cuda")), "rows": rows})

    lock = threading.Lock()
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(lambda each: fill(*each), itertools.product(range(len(rows)), ON_GPU)))
    table = Table(
        "model", "batch", "amp", *(f"{who}, GiB" for who in ON_GPU), *(f"{who}, over Inductor" for who in RIVALS)
    )
    for row in rows:
        sizes = ["failed" if each is None else f"{each['reserved'] / 2**30:.2f}" for each in row["peak_bytes"].values()]
        found = (over_inductor(row, who, "reserved") for who in RIVALS)
        words = ["" if ratio is None else f"{ratio:.2f}" for ratio in found]
        table.add_row(row["model"], str(row["batch"]), row["amp"], *sizes, *words)
    Console(width=180).print(table)


def measure(
    model: Annotated[list[str] | None, typer.Option(help="of the zoo; those with figures are the default")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="8 on a CPU, the model's own on a GPU")] = None,
    amp: Annotated[list[str], typer.Option(help="none or bf16")] = ["none"],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    side_by_side: Annotated[int, typer.Option(min=1, help="processes at a time on a GPU")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    known = SIZES if device == "cpu" else BATCHES
    zoo.refuse_unknown(model or (), known)
    if device == "cpu":
        _on_cpu(model or list(known), batch or [8], amp, json_file)
    elif device == "cuda":
        _on_gpu(model or list(known), batch or [0], amp, json_file, side_by_side)
    else:
        raise typer.BadParameter(f"--device is cpu or cuda, not {device!r}")


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
