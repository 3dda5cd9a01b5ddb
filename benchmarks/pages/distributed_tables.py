"""The table of several GPUs' training steps, from every result file that `benchmarks distributed` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import RESULTS
from benchmarks.contenders import EAGER, INDUCTOR, MAX, MAX_CAPTURED, MAX_SPLIT, label
from benchmarks.distributed.process import NONE
from benchmarks.pages.parts import grid, origin, read

LABELS = {
    EAGER: label(EAGER), INDUCTOR: label(INDUCTOR), MAX: "ours, `DDP(compile(model))`",
    MAX_CAPTURED: "the same, captured", MAX_SPLIT: "ours, `compile(DDP(model))`",
}  # fmt: skip
Row = Mapping[str, Any]
Setting = tuple[str, int, str, bool, int]
"""A row of the table: model, images of each process, engine, SyncBatchNorm, processes."""


def distributed() -> str:
    """One row for each model, engine and number of GPUs."""
    names = sorted(path.stem for path in RESULTS.glob("distributed_*.json"))
    if not names:
        return "Not measured with this benchmark yet.\n"
    rows: list[list[str]] = []
    for name in names:
        rows += rows_of(read(name)["rows"])
    return grid(["ms (scaling), GiB, overlap", "GPUs", *LABELS.values(), "ours over Inductor"], rows) + origin(*names)


def rows_of(found: list[Row]) -> list[list[str]]:
    """A file's rows."""
    settings: dict[Setting, dict[str, Row]] = {}
    for row in found:
        key = row["model"], row["batch"], row["engine"], row["sync"], row["gpus"]
        settings.setdefault(key, {})[row["contender"]] = row
    rows = []
    for (model, batch, engine, sync, gpus), by_contender in settings.items():
        alone = settings.get((model, batch, NONE, False, 1), {})
        words = [model, str(batch), *([] if engine == NONE else [engine.upper()]), *(["SyncBatchNorm"] if sync else [])]
        cells = [_cell(by_contender.get(who), alone.get(MAX if who == MAX_SPLIT else who)) for who in LABELS]
        rows.append([", ".join(words), str(gpus), *cells, _over_inductor(by_contender)])
    # One process, then the engines.
    return sorted(rows, key=lambda cells: (cells[0].split(",")[0], cells[0], int(cells[1])))


def _cell(row: Row | None, alone: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "fails"
    parts = [f"{row['queued_seconds'] * 1e3:.1f}"]
    if row["gpus"] > 1 and alone and "error" not in alone:
        parts[0] += f" ({alone['queued_seconds'] / row['queued_seconds']:.0%})"
    if "peak_bytes" in row:
        parts.append(f"{row['peak_bytes'] / 2**30:.1f}")
    if row.get("communication_seconds"):
        parts.append(f"{row['overlapped_seconds'] / row['communication_seconds']:.0%}")
    return ", ".join(parts)


def _over_inductor(by_contender: Mapping[str, Row]) -> str:
    ours, theirs = by_contender.get(MAX), by_contender.get(INDUCTOR)
    if not ours or not theirs or "error" in ours or "error" in theirs:
        return ""
    return f"{ours['queued_seconds'] / theirs['queued_seconds']:.2f}"
