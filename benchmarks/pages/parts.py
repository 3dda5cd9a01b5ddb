"""What the tables of the pages are made of: result files, rows, and where figures come from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import RESULTS


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def origin(*names: str) -> str:
    """Which machine, versions and day the figures of these files are from."""
    lines = []
    for name in names:
        document = read(name)
        document = document[0] if isinstance(document, list) else document
        hardware, versions = document.get("hardware", {}), document["versions"]
        machine = hardware if isinstance(hardware, str) else hardware.get("gpu")
        if not machine and hardware:
            machine = f"{hardware['cpu'].replace('(R)', '')}, {hardware['threads']} threads"
        parts = [machine or "any machine", f"PyTorch {versions['torch'].partition('+')[0]}", f"MAX {versions['max']}"]
        if "cudnn" in versions:
            major, minor = divmod(versions["cudnn"], 10_000)
            parts.append(f"cuDNN {major}.{minor // 100}")
        lines.append(f"`benchmarks/results/{name}.json`: {', '.join(parts)}, {document['date'][:10]}.")
    return "\n" + "\n".join(lines) + "\n"


def mean_and_worst(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} ({max(ratios):.2f})" if ratios else ""


def mean(ratios: Iterable[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}"
