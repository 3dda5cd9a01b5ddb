"""What the examples share: the console, progress bars, and reports of what is being compiled."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_max_backend.runtime.events import CompileEvent, listen

matplotlib.use("Agg")
from matplotlib import pyplot

console = Console()


@contextlib.contextmanager
def progress_bars(*, show: bool = True) -> Iterator[Progress]:
    """Progress bars, among them one for each graph that is being compiled."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[tuple[str, ...], int] = {}

    def report(event: CompileEvent) -> None:
        if event.seconds is None:
            tasks[event.graphs] = progress.add_task(f"compiling ({event.ops} aten ops)", total=None)
            return
        progress.remove_task(tasks.pop(event.graphs))
        source = "read from the cache" if event.cached else "compiled"
        progress.console.print(f"{source}: {event.ops} aten ops in {event.seconds:.1f} s")

    with Progress(*columns, console=console, disable=not show) as progress, listen(report):
        yield progress


def autocast(device: torch.device, amp: str) -> contextlib.AbstractContextManager[object]:
    """Autocast to bfloat16 or float16, or nothing."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes[amp]) if amp in dtypes else contextlib.nullcontext()


def draw_curves(curves: Mapping[str, Sequence[float]], target: Path, title: str, *, log: bool = True) -> None:
    """Curves over steps in one picture."""
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=110)
    # Dashes let a curve be seen below another one.
    for (name, values), style in zip(curves.items(), itertools.cycle(("-", "--")), strict=False):
        axes.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.3)
    axes.set(xlabel="step", title=title, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def draw_images(rows: Mapping[str, torch.Tensor], target: Path, title: str) -> None:
    """Rows of images [N, H, W] or [N, 3, H, W] with values in [0, 1], each with its name."""
    most = max(len(images) for images in rows.values())
    figure, axes = pyplot.subplots(len(rows), most, figsize=(1.3 * most, 1.5 * len(rows)), squeeze=False, dpi=110)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        line[0].set_title(name, loc="left", fontsize=9)
        for place in line:
            place.axis("off")
        for place, image in zip(line, images.detach().float().cpu().clamp(0, 1), strict=False):
            place.imshow(image.permute(1, 2, 0) if image.dim() == 3 else image, cmap="gray", vmin=0, vmax=1)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
