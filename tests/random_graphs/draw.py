"""Draws one program after the other."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator

import torch

from tests.random_graphs.drawing import Rejected
from tests.random_graphs.elements import ELEMENTS, start
from tests.random_graphs.layers import LAYERS
from tests.random_graphs.program import Program

_OPERATORS = {**ELEMENTS, **LAYERS}
#: Mostly float32: each dtype has libraries of its own, the large ones of convolution among them.
_DTYPES = (torch.float32,) * 16 + (torch.bfloat16, torch.bfloat16, torch.float16, torch.float64)


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    while True:
        with contextlib.suppress(Rejected), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _attempt(rng)


def _attempt(rng: random.Random) -> Program:
    autocast = rng.random() < 0.12
    dtype = torch.float32 if autocast else rng.choice(_DTYPES)
    gradient = rng.random() < 0.85
    g = start(rng, dtype)
    wanted = rng.choice((2, 3, 4, 5, 6, 8, 10, 12, 16))
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.set_grad_enabled(gradient), context:
        for _ in range(4 * wanted):
            with contextlib.suppress(Rejected):
                rng.choices(list(_OPERATORS), list(_OPERATORS.values()))[0](g)
            if len(g.statements) >= wanted:
                break
    if not any(name.startswith("v") for name in g.values):
        raise Rejected("empty")
    dynamic = rng.random() < 0.15 and any(argument.batched for argument in g.arguments)
    return g.program(autocast=autocast, gradient=gradient, dynamic=dynamic)


def programs(seed: int) -> Iterator[Program]:
    """Programs without an end."""
    rng = random.Random(seed)
    while True:
        yield draw(rng.randrange(1 << 60))
