"""Trains a small network for many steps with growing and shrinking batches: does anything grow that should not?

    python -m benchmarks long_run [--device cuda] [--captured] [--steps 20000] [--json FILE]

Each of the rows is a part of the run: the host's resident memory, what PyTorch has allocated and reserved on the GPU,
and what is taken there in all, file descriptors and threads. At the end of each part eager PyTorch computes the loss
and the gradients of the same parameters and the same batch. Then the model is dropped. The exit status is 1 if, in
the second half, anything grew, or a difference is larger than rounding, or memory does not come back.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import sys
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import records
from benchmarks.steps import release
from benchmarks.training.step_memory import give_back, resident

#: Grows and shrinks, and has odd numbers and one.
BATCHES = (1, 2, 5, 8, 16, 24, 32, 27, 16, 9, 4, 2)
#: The C library's heap moves by so much with the order in which batches come.
HOST_SLACK = 16 << 20
#: As ``Row.difference``: float32 sums in another order.
TOLERANCE = 1e-3


@dataclass
class Row:
    """What there was after a part of a run.

    Attributes:
        steps: that were run.
        host: bytes of the resident set.
        allocated: bytes that PyTorch's allocator has given away on the GPU.
        reserved: bytes that it has taken from the GPU.
        taken: bytes of the GPU that are not free, whoever has them.
        descriptors: open files.
        threads: of the process.
        loss: of the last step.
        difference: between the compiled model and eager PyTorch, of the loss or of any gradient's element, in parts of
            the loss or of the largest element.
    """

    steps: int
    host: int
    allocated: int
    reserved: int
    taken: int
    descriptors: int
    threads: int
    loss: float = 0.0
    difference: float = 0.0


class Net(nn.Module):
    """Convolutions, normalization, pooling, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 32, 3, stride=2), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 10] of images [N, 3, H, W]."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.head(F.gelu(self.second(x)).mean((2, 3)))


class Run:
    """A network in training.

    Args:
        device: where it trains.
        captured: as device graphs.
        size: of its images.
    """

    def __init__(self, device: torch.device, *, captured: bool, size: int = 16) -> None:
        torch.manual_seed(0)
        self.device, self.size = device, size
        self.model = Net().to(device)
        self.eager = copy.deepcopy(self.model)
        self.compiled = torch.compile(self.model, backend="max", dynamic=True, options={"capture": captured})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batches = itertools.cycle(BATCHES)
        self.done = 0

    def part(self, steps: int) -> Row:
        """Runs steps, then compares one with eager PyTorch."""
        for _ in range(steps):
            x, classes = self._drawn()
            self.optimizer.zero_grad()
            F.cross_entropy(self.compiled(x), classes).backward()
            self.optimizer.step()
        self.done += steps
        x, classes = self._drawn()
        self.eager.load_state_dict(self.model.state_dict())
        seen = []
        for run, model in ((self.compiled, self.model), (self.eager, self.eager)):
            loss = F.cross_entropy(run(x), classes)
            gradients = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
            seen.append((loss.detach(), gradients))
        difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*seen, strict=True))
        # Batches of different sizes would look like growth.
        del x, classes, gradients
        return row(self.device, self.done, float(seen[0][0]), difference)

    def _drawn(self) -> tuple[Tensor, Tensor]:
        batch = next(self.batches)
        x = torch.randn(batch, 3, self.size, self.size, device=self.device)
        return x, torch.randint(0, 10, (batch,), device=self.device)


def row(device: torch.device, steps: int, loss: float = 0.0, difference: float = 0.0) -> Row:
    """What there is now."""
    gc.collect()
    descriptors, threads = (len(list(Path("/proc/self", each).iterdir())) for each in ("fd", "task"))
    allocated = reserved = taken = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, all_of_it = torch.cuda.mem_get_info()
        taken = all_of_it - free
    return Row(steps, resident(), allocated, reserved, taken, descriptors, threads, loss, difference)


def grown(rows: list[Row], slack: int = HOST_SLACK) -> list[str]:
    """What is wrong, in words: with what was there in the second half of the run, and with each difference.

    In the first half all batch sizes have been there, and allocators have what they keep.

    Args:
        rows: of all parts, at least two.
        slack: bytes that the host's memory may grow by.
    """
    half = (len(rows) + 1) // 2
    found = []
    for name, most in (
        ("host", slack),
        ("allocated", 0),
        ("reserved", 0),
        ("taken", 0),
        ("descriptors", 0),
        ("threads", 0),
    ):
        before, after = (max(getattr(each, name) for each in part) for part in (rows[:half], rows[half:]))
        if after > before + most:
            found.append(f"{name} grew from {before} to {after}")
    for each in rows:
        if not each.difference <= TOLERANCE:
            found.append(
                f"step {each.steps}: differs from eager PyTorch by {each.difference:.1e} of the largest number"
            )
    return found


def trained(device: torch.device, *, captured: bool, steps: int, parts: int) -> tuple[list[Row], Row, list[str]]:
    """Runs, and drops the model: the parts' rows, what there was behind, and what is wrong."""
    before = row(device, 0)
    run = Run(device, captured=captured)
    parameters = [weakref.ref(each) for each in run.model.parameters()]
    rows = [run.part(steps // parts) for _ in range(parts)]
    wrong = grown(rows)
    del run
    torch.compiler.reset()
    release(device)
    if device.type == "cuda":
        # Eager PyTorch's, for its products: 64 MiB on an H200, for good.
        torch._C._cuda_clearCublasWorkspaces()
    give_back()
    after = row(device, steps)
    alive = sum(each() is not None for each in parameters)
    if alive:
        wrong.append(f"{alive} of {len(parameters)} parameters live on after the model was dropped")
    if after.allocated > before.allocated:
        wrong.append(f"{after.allocated - before.allocated} bytes stay allocated after the model was dropped")
    return rows, after, wrong


def main() -> int:
    """Runs, prints a table, and writes a file; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--captured", action="store_true", help="as device graphs; no effect on a CPU")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not 2 <= args.parts <= args.steps // len(BATCHES):
        parser.error(f"--parts {args.parts}: expected at least 2, and {len(BATCHES)} steps in each")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    begun = time.monotonic()
    rows, after, wrong = trained(device, captured=args.captured, steps=args.steps, parts=args.parts)
    seconds = time.monotonic() - begun
    columns = ("steps", "host MiB", "allocated", "reserved", "taken", "descriptors", "threads", "loss", "difference")
    table = Table(*columns)
    for each in (*rows, after):
        sizes = [f"{size / 2**20:.1f}" for size in (each.host, each.allocated, each.reserved, each.taken)]
        others = [each.descriptors, each.threads, f"{each.loss:.4f}", f"{each.difference:.1e}"]
        table.add_row(str(each.steps) if each is not after else "dropped", *sizes, *map(str, others))
    Console(width=120).print(table)
    print("\n".join(wrong) or "nothing grew", f"({seconds:.0f} s)", flush=True)
    if args.json is not None:
        found = {"captured": args.captured, "seconds": round(seconds, 1), "wrong": wrong}
        content = {**records.provenance(device), **found, "rows": [asdict(each) for each in (*rows, after)]}
        records.write(args.json, content)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
