"""The committed problems of each family, one list each: FAMILY/problems.json.

A line has the fields that its reader names. Convolutions come in suites: `sm90` is timed on Hopper,
`sm90_check` only checked, `any_gpu` timed on any NVIDIA GPU in the line's dtypes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

CONVOLUTIONS = Path(__file__).parent / "convolution" / "problems.json"
POOLINGS = Path(__file__).parent / "pooling" / "problems.json"


def convolutions(suite: str, pattern: str = "") -> list[dict[str, Any]]:
    """The suite's problems whose names match the regular expression."""
    lines = json.loads(CONVOLUTIONS.read_text())
    return [line for line in lines if line["suite"] == suite and re.search(pattern, line["name"])]


def poolings(pattern: str = "") -> list[dict[str, Any]]:
    """The problems whose names match the regular expression."""
    return [line for line in json.loads(POOLINGS.read_text()) if re.search(pattern, line["name"])]
