"""A published architecture, and how those of transformers are made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One model and a call of it.

    Attributes:
        name: what its library calls it.
        library: the package that it comes from.
        kind: what it is for.
        model: makes it.
        call: makes positional and keyword arguments of a training step's forward call.
    """

    name: str
    library: str
    kind: str
    model: Callable[[], nn.Module]
    call: Callable[[], Call]


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}


def tokens(vocabulary: int = 99, length: int = 8, **more: Callable[[], Any]) -> Callable[[], Call]:
    """A call with random tokens."""

    def call() -> Call:
        drawn = torch.randint(3, vocabulary, (2, length))
        return (), {"input_ids": drawn, **{name: make() for name, make in more.items()}}

    return call


def pixels(*shape: int, name: str = "pixel_values") -> Callable[[], Call]:
    """A call with random pixels, or with what else ``name`` says."""
    return lambda: ((), {name: torch.randn(shape)})


def transformers_architecture(
    kind: str,
    prefix: str,
    head: str,
    config: Mapping[str, Any],
    call: Callable[[], Call],
    backbone: tuple[str, Mapping[str, Any]] | None = None,
) -> Architecture:
    """A model of transformers from its configuration, with another's as a part where there is a ``backbone``."""

    def model() -> nn.Module:
        library = importlib.import_module("transformers")
        options = dict(config)
        if backbone is not None:
            options["backbone_config"] = getattr(library, backbone[0])(**backbone[1]).to_dict()
        return getattr(library, prefix + head)(getattr(library, f"{prefix}Config")(**options))

    return Architecture(prefix + head, "transformers", kind, model, call)
