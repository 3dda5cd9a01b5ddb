"""The contenders of every benchmark: their names in result files, what pages call them, and how each one compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

EAGER = "eager"
EAGER_CHANNELS_LAST = "eager, channels_last"
EAGER_FOREACH, EAGER_FUSED = "eager foreach", "eager fused"
MAX, MAX_CAPTURED, MAX_SPLIT = "max", "max, captured", "max, split"
INDUCTOR, INDUCTOR_CAPTURED, INDUCTOR_FROZEN = "inductor", "inductor, CUDA graphs", "inductor, frozen"


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes:
        label: what pages call it.
        backend: ``torch.compile``'s; "" for eager PyTorch.
        captured: it replays device graphs (``mode="reduce-overhead"``).
        options: the backend's.
    """

    label: str
    backend: str = ""
    captured: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def compiled(self, function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        """A function or model as the contender runs it; ``how`` are further arguments of ``torch.compile``."""
        if not self.backend:
            return function
        if self.captured:
            how["mode"] = "reduce-overhead"
        if self.options:
            how["options"] = dict(self.options)
        return torch.compile(function, backend=self.backend, **how)


CONTENDERS: dict[str, Contender] = {
    EAGER: Contender("eager"),
    # The model and its images are channels_last.
    EAGER_CHANNELS_LAST: Contender("channels_last"),
    # How an optimizer computes.
    EAGER_FOREACH: Contender("eager, foreach"),
    EAGER_FUSED: Contender("eager, fused"),
    MAX: Contender("ours", "max"),
    MAX_CAPTURED: Contender("ours, captured", "max", captured=True),
    # DistributedDataParallel compiled, not the model in it: Dynamo cuts its graph at the ends of buckets.
    MAX_SPLIT: Contender("ours, split", "max"),
    INDUCTOR: Contender("Inductor", "inductor"),
    INDUCTOR_CAPTURED: Contender("Inductor, CUDA graphs", "inductor", captured=True),
    # The weights are constants: filters are scaled and laid out once, and new weights are not seen.
    INDUCTOR_FROZEN: Contender("Inductor, frozen", "inductor", options={"freezing": True}),
}
"""By their names in result files."""
PAIRS = ((MAX_CAPTURED, INDUCTOR_CAPTURED), (MAX, INDUCTOR))
"""Ours and Inductor's that are compared, device graphs first."""


def compiled(function: Callable[..., Any], name: str, **how: Any) -> Callable[..., Any]:
    """A function or model as the contender of that name runs it."""
    return CONTENDERS[name].compiled(function, **how)


def label(name: str) -> str:
    """The name of a contender on pages."""
    return CONTENDERS[name].label


def caches_in(folder: Path) -> dict[str, str]:
    """Environment variables with which whatever contenders keep on disk lies in a folder of its own, without the
    kernels that a wheel carries."""
    kept = {"TORCH_MAX_BACKEND_CACHE_DIR": "max", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    # MAX keeps compiled kernels there.
    kept |= {"HOME": "home", "XDG_CACHE_HOME": "home"}
    return {**{name: str(folder / part) for name, part in kept.items()}, "TORCH_MAX_BACKEND_PREBUILT": ""}
