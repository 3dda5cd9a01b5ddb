"""Pictures of the pages, from the result files: `python -m benchmarks figures` draws them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contenders import EAGER, INDUCTOR, INDUCTOR_CAPTURED, MAX, MAX_CAPTURED, label
from benchmarks.pages.gpu_step_tables import STEPS
from benchmarks.pages.parts import read
from benchmarks.pages.suite_tables import speeds
from benchmarks.pages.tables import kind_of, zoo_rows
from benchmarks.training.training_zoo import ratio

#: The color and the opacity of a contender's bars.
_LOOKS = {INDUCTOR: ("C7", 0.6), INDUCTOR_CAPTURED: ("C7", 1.0), MAX: ("C0", 0.6), MAX_CAPTURED: ("C0", 1.0)}


@contextlib.contextmanager
def _bars(target: Path, height: float, models: list[str]) -> Iterator[Any]:
    """Axes with a place for each model and a line at 1, which are saved to ``target``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, height), layout="constrained")
    yield axis
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(models)), models, rotation=20, ha="right")
    figure.savefig(target, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def steps_of_models(target: Path) -> None:
    """Our time over the best contender's on a CPU, by model: a mark for each kind of step and batch."""
    groups = zoo_rows()
    models = list(dict.fromkeys(row["model"] for rows in groups.values() for row in rows))
    kinds = sorted({kind[:2] for kind in groups}, reverse=True)
    width = 0.8 / max(1, len(groups))
    with _bars(target, 3.6, models) as axis:
        for number, (kind, rows) in enumerate(sorted(groups.items(), key=lambda each: kinds.index(each[0][:2]))):
            places = [models.index(row["model"]) + (number + 0.5) * width - 0.4 for row in rows]
            # One color for each kind of step, paler the larger the batch.
            pale = 1.0 - 0.25 * [each for each in groups if each[:2] == kind[:2]].index(kind)
            axis.bar(
                places, [ratio(row) for row in rows], width, color=f"C{kinds.index(kind[:2])}", alpha=max(pale, 0.3),
                label=kind_of(*kind),
            )  # fmt: skip
        axis.set_ylabel("our time over the best other's")
        axis.legend(fontsize="x-small", ncols=3, loc="upper left")
        axis.set_ylim(0, 1.45)


def steps_on_a_gpu(target: Path) -> None:
    """Images a second of training steps over eager PyTorch's, by model: a bar for each contender."""
    rows = read(STEPS)["rows"]
    steps = [row["median_seconds"] for row in rows]
    width = 0.8 / len(_LOOKS)
    with _bars(target, 3.6, [f"{row['model']}, {row['batch']}" for row in rows]) as axis:
        for number, (who, (color, alpha)) in enumerate(_LOOKS.items()):
            places = [model + (number + 0.5) * width - 0.4 for model in range(len(rows))]
            speeds = [step[EAGER] / step[who] for step in steps]
            axis.bar(places, speeds, width, color=color, alpha=alpha, label=label(who))
        axis.set_ylabel("images/s over eager's")
        axis.legend(fontsize="x-small", ncols=4, loc="upper left")
        axis.set_ylim(0, 3.2)


def suites(target: Path) -> None:
    """The mean speed over eager PyTorch's, by suite: a bar for each contender."""
    if not (found := speeds()):
        return
    width = 0.8 / len(_LOOKS)
    with _bars(target, 3.6, list(found)) as axis:
        for number, (who, (color, alpha)) in enumerate(_LOOKS.items()):
            bars = [(place, each[label(who)]) for place, each in enumerate(found.values()) if label(who) in each]
            places = [place + (number + 0.5) * width - 0.4 for place, _ in bars]
            axis.bar(places, [speed for _, speed in bars], width, color=color, alpha=alpha, label=label(who))
        axis.set_ylabel("speed over eager's, geometric mean")
        axis.legend(fontsize="x-small", ncols=4, loc="upper left")


CHARTS = {"steps_cpu.png": steps_of_models, "steps_gpu.png": steps_on_a_gpu, "suites.png": suites}
"""By the file below docs/images."""
