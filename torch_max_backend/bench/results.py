"""Result files: what was measured, on what, when; one row in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_max_backend.bench import hardware
from torch_max_backend.checked import beartype


@beartype
def provenance(device: torch.device) -> dict[str, Any]:
    """What every result file says of its run: date (UTC), hardware, versions (the kernels' by their digest)."""
    return {
        "date": hardware.date(),
        "hardware": hardware.hardware(device),
        "versions": hardware.versions(device),
    }


@beartype
def write(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Writes a result file, and the folder for it.

    Raises:
        ValueError: a figure is infinite or not a number.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(content))


@beartype
def compact(content: Mapping[str, Any] | list[Any]) -> str:
    """JSON in which every row of a table is one line.

    A row is an element of a list of objects, or an entry of an object of objects below the file's own; what holds
    rows is spread over lines.
    """
    return _text(content, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    if not _spread(value, depth):
        return json.dumps(value, allow_nan=False)
    pad = " " * (depth + 1)
    if isinstance(value, Mapping):
        lines = [f"{pad}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        lines = [pad + _text(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * depth + closing


def _spread(value: Any, depth: int) -> bool:
    if not value or not isinstance(value, (Mapping, list, tuple)):
        return False
    if depth == 0:
        return True
    if isinstance(value, Mapping):
        rows = any(isinstance(item, list) and _spread(item, depth + 1) for item in value.values())
        return rows or (depth == 1 and all(isinstance(item, Mapping) for item in value.values()))
    return any(isinstance(item, Mapping) or _spread(item, depth + 1) for item in value)
