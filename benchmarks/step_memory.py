"""Peak memory of training steps on a CPU beside eager PyTorch and Inductor, each in a process of its own.

    python -m benchmarks step_memory [--model resnet18 ...] [--batch 32 ...] [--amp none ...] [--json FILE]

What a step adds to the process is read from Linux: after warm-up all that need not stay is given back (gradients, our
workspaces, the C library's free memory), the peak of the resident set is reset, and steps run. The figure is that peak
less what was resident before: activations, gradients, workspaces and what libraries take for themselves, whoever's
allocator they come from. Parameters, the optimizer's state, the images and the program do not count.
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
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import records, zoo
from benchmarks.training_step import CHANNELS_LAST, MEMORY_FORMATS, compiled, drawn, stepper
from benchmarks.training_zoo import SIZES
from torch_max_backend.runtime.launches import drop_workspaces

CONTENDERS = ("max", "eager", CHANNELS_LAST, "inductor")
WARM, MEASURED = 3, 3


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
    drop_workspaces()
    ctypes.CDLL(None).malloc_trim(0)


def rise(model: str, who: str, batch: int, amp: str) -> int:
    """Bytes that a step of one contender adds to this process."""
    base, x, y = drawn(model, batch, SIZES[model], torch.device("cpu"))
    own = copy.deepcopy(base)
    del base
    if who == CHANNELS_LAST:
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


def _apart(model: str, who: str, batch: int, amp: str) -> int | None:
    arguments = json.dumps([model, who, batch, amp])
    code = f"import json; from benchmarks.step_memory import rise; print('rise', rise(*json.loads({arguments!r})))"
    run = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    lines = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("rise ")]
    return int(lines[0]) if run.returncode == 0 and lines else None


def over_eager(row: dict[str, Any]) -> float:
    """Our bytes over those of eager PyTorch, in the memory format that needs less."""
    rises = row["step_bytes"]
    return rises["max"] / min(rises["eager"], rises[CHANNELS_LAST])


def measure(
    model: Annotated[list[str], typer.Option(help=f"one of {', '.join(SIZES)}")] = list(SIZES),  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1)] = [8],  # noqa: B006
    amp: Annotated[list[str], typer.Option(help="none or bf16")] = ["none"],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown(model, SIZES)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    console = Console()

    def write() -> None:
        """After each row: a run that is stopped keeps what it has measured."""
        if json_file is not None:
            facts = {"steps": MEASURED, "torch_threads": torch.get_num_threads(), "failed": failed}
            records.write(json_file, {**facts, **records.provenance(torch.device("cpu")), "rows": rows})

    table = Table("model", "batch", "amp", *(f"{who}, MiB" for who in CONTENDERS), "ours over eager's")
    for kind, images, name in itertools.product(amp, batch, model):
        found = {who: _apart(name, who, images, kind) for who in CONTENDERS}
        if None in found.values():
            failed.append(f"{name}, batch {images}, amp {kind}")
            console.print(f"{failed[-1]}: failed")
            continue
        rows.append({"model": name, "batch": images, "amp": kind, "step_bytes": found})
        write()
        sizes = [f"{(found[who] or 0) / 2**20:.1f}" for who in CONTENDERS]
        words = [name, str(images), kind, *sizes, f"{over_eager(rows[-1]):.2f}"]
        console.print(" ".join(words))
        table.add_row(*words)
    console.print(table)
    if rows:
        console.print(f"geometric mean {statistics.geometric_mean(map(over_eager, rows)):.2f}")


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
