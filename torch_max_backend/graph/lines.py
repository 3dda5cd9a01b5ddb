"""Lines of the user's code."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_TORCH = f"{Path(torch.__file__).parent}/"


def user_line(node: Node) -> str | None:
    """The user's own source line that the node came from: the innermost one that is not PyTorch's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line, function, code = (own or frames)[-1]
    return f"{file}:{line} in {function}: {code.strip()}"
