"""Draws programs: every statement is run by eager PyTorch as it is added, and left out where PyTorch refuses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.random_graphs.program import NAMES, Argument, Program, evaluated, names_in

#: Elements of a value, at most.
MAX_ELEMENTS = 6000
#: Values beyond this are not computed with: sums of what they give would be infinite.
LARGEST = 300.0

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Rejected(Exception):
    """An operator does not fit what there is."""


class Drawing:
    """A program that grows.

    Args:
        rng: makes all choices.
        dtype: of the arguments.

    Attributes:
        values: what there is, by name, as eager PyTorch has computed it.
    """

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        self.rng, self.dtype = rng, dtype
        self.seed = rng.randrange(1 << 30)
        self.arguments: list[Argument] = []
        self.statements: list[str] = []
        self.values: dict[str, Tensor] = {}
        self.batch = rng.choice((1, 2, 2, 3, 4, 4, 5))
        self.unread: list[str] = []
        torch.manual_seed(self.seed)

    def argument(
        self,
        shape: Sequence[int],
        draw: str = "torch.randn({shape})",
        layout: str = "{x}",
        *,
        gradient: bool = False,
        batched: bool = False,
    ) -> str:
        """A new argument; one of floating-point numbers has the program's dtype."""
        name = f"a{len(self.arguments)}"
        if gradient or draw.startswith(("torch.randn", "torch.rand(")):
            draw = draw if self.dtype is torch.float32 else f"({draw}).to({self.dtype})"
        made = Argument(name, tuple(shape), draw, layout, gradient, batched)
        self.arguments.append(made)
        self.values[name] = evaluated(made.text())
        return name

    def parameter(self, *shape: int, scale: float = 1.0) -> str:
        """A new argument with a gradient."""
        return self.argument(shape, f"torch.randn({{shape}}) * {scale:.3g}", gradient=True)

    def pick(self, accepts: Callable[[Tensor], bool] = lambda value: True) -> str:
        """A value, preferably one that nothing has read so far.

        Raises:
            Rejected: there is none.
        """
        fresh = [name for name in self.unread if accepts(self.values[name])]
        if fresh and self.rng.random() < 0.6:
            return self.rng.choice(fresh)
        found = [name for name, value in self.values.items() if accepts(value)]
        if not found:
            raise Rejected("no such value")
        weights = [1 + 3 * (number / len(found)) for number in range(len(found))]
        return self.rng.choices(found, weights)[0]

    def number(self, rank: Sequence[int] = (1, 2, 3, 4, 5), least: int = 0) -> str:
        """A value of floating-point numbers with so many dimensions, and elements at least."""
        return self.pick(lambda x: x.is_floating_point() and x.dim() in rank and x.numel() >= least)

    def whole(self) -> str:
        """A value of integers or truth values."""
        return self.pick(lambda x: not x.is_floating_point())

    def truth(self) -> str:
        """A value of truth values."""
        return self.pick(lambda x: x.dtype is torch.bool)

    def partner(self, name: str) -> str:
        """A value that broadcasts with another."""
        like = self.values[name]

        def fits(x: Tensor) -> bool:
            try:
                shape = torch.broadcast_shapes(x.shape, like.shape)
            except RuntimeError:
                return False
            return x.is_floating_point() and shape.numel() <= MAX_ELEMENTS

        return self.pick(fits)

    def add(self, text: str, results: int = 1) -> tuple[str, ...]:
        """A statement that computes new values.

        Raises:
            Rejected: PyTorch refuses it, or its numbers are nothing to compute with.
        """
        count = sum(name.startswith("v") for name in self.values)
        names = tuple(f"v{count + number}" for number in range(results))
        try:
            found = evaluated(text, **self.values)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise Rejected(str(error)) from error
        made = (found,) if results == 1 else tuple(found)
        if len(made) != results or not all(isinstance(each, Tensor) and _is_good(each) for each in made):
            raise Rejected("no good numbers")
        self.statements.append(f"{', '.join(names)} = {text}")
        self.values.update(zip(names, made, strict=True))
        read = names_in(text)
        self.unread = [name for name in self.unread if name not in read] + list(names)
        return names

    def update(self, text: str) -> None:
        """A statement that changes values in place.

        Raises:
            Rejected: PyTorch refuses it; the drawing is of no use then.
        """
        try:
            exec(text, {**NAMES, **self.values})
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise Rejected(str(error)) from error
        self.statements.append(text)
        if not all(_is_good(value) for value in self.values.values()):
            raise Rejected("no good numbers")

    def program(self, *, autocast: bool, gradient: bool, dynamic: bool) -> Program:
        """The program: it returns what nothing reads, and some of the rest."""
        rest = [name for name in self.values if name.startswith("v") and name not in self.unread]
        results = [*self.unread, *self.rng.sample(rest, min(len(rest), self.rng.choice((0, 0, 1, 2))))]
        read = {name for statement in self.statements for name in names_in(statement)}
        second = self.rng.choice((2, 3, 4, 6)) if dynamic else None
        return Program(
            self.seed,
            tuple(argument for argument in self.arguments if argument.name in read),
            tuple(self.statements),
            tuple(results),
            autocast,
            gradient,
            None if second is None else second + (second == self.batch),
        )


def _is_good(value: Tensor) -> bool:
    if value.numel() > MAX_ELEMENTS or value.dim() > 6 or value.dtype.is_complex or value.layout is not torch.strided:
        return False
    if not value.is_floating_point():
        return value.numel() == 0 or bool(value.abs().max() < 1 << 30) if value.dtype is not torch.bool else True
    value = value.detach()
    return value.numel() == 0 or bool(torch.isfinite(value).all() and value.abs().max() < LARGEST)
