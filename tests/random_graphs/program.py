"""A program that was drawn: text that runs anywhere PyTorch does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision

_NAMES = re.compile(r"\b[av]\d+\b")
#: Kinds of floating-point numbers, wherever a program names one.
_FLOATS = re.compile(r"torch\.(float32|bfloat16|float16)\b")


def names_in(text: str) -> list[str]:
    """The values that a statement names."""
    return _NAMES.findall(text)


@dataclass(frozen=True)
class Argument:
    """A tensor that a program gets.

    Attributes:
        name: in the program.
        shape: of the tensor.
        draw: an expression for its elements, with ``{shape}``.
        layout: what makes its strides of a contiguous tensor, an expression with ``{x}``.
        gradient: it requires one.
        batched: its first extent is the batch's.
    """

    name: str
    shape: tuple[int, ...]
    draw: str
    layout: str = "{x}"
    gradient: bool = False
    batched: bool = False

    def text(self, batch: int | None = None, place: str = "") -> str:
        """An expression that makes the tensor, with another batch if that is given; ``place`` moves it."""
        shape = self.shape if batch is None or not self.batched else (batch, *self.shape[1:])
        made = self.layout.replace("{x}", f"({self.draw.replace('{shape}', str(shape))})")
        return f"{made}{place}.requires_grad_()" if self.gradient else made + place


@dataclass(frozen=True)
class Program:
    """Statements over arguments, and how they are called.

    Attributes:
        seed: of the arguments' elements.
        arguments: in order.
        statements: Python, each names values that stand before it.
        results: the names of what is returned.
        autocast: called under bfloat16's autocast.
        gradient: gradients are computed, else it runs under ``torch.no_grad()``.
        second_batch: compiled with ``dynamic=True``, and called with this batch, too.
    """

    seed: int
    arguments: tuple[Argument, ...]
    statements: tuple[str, ...]
    results: tuple[str, ...]
    autocast: bool = False
    gradient: bool = True
    second_batch: int | None = None

    def text(self, device: str = "cpu", *, wide: bool = False) -> str:
        """Python that defines the function, ``arguments`` for each batch, and what a call of the function is.

        Args:
            device: where it runs.
            wide: with float64 in the place of narrower types.
        """
        context = [] if self.gradient else ["torch.no_grad()"]
        if self.autocast and not wide:
            context.append(f"torch.autocast('{device}', torch.bfloat16)")
        body = [*self.statements, f"return {', '.join(self.results)},"]
        if wide:
            body = [_FLOATS.sub("torch.float64", line) for line in body]
        place = "" if device == "cpu" else f".to('{device}')"
        batches = (None,) if self.second_batch is None else (None, self.second_batch)
        lines = ["import contextlib", "import torch, torchvision", "import torch.nn.functional as F", ""]
        lines.append(f"def f({', '.join(argument.name for argument in self.arguments)}):")
        lines += [f"    {line}" for line in body]
        for number, batch in enumerate(batches):
            lines += ["", f"def arguments_{number}():", f"    torch.manual_seed({self.seed})", "    return ["]
            lines += [f"        {argument.text(batch, place)}," for argument in self.arguments]
            lines += ["    ]"]
        lines += ["", "def call(function, given):"]
        lines += [f"    with {', '.join(context)}:" if context else "    if True:"]
        lines += ["        results = function(*given)"]
        lines += [_BACKWARD if self.gradient else "    return results, ()"]
        return "\n".join(lines)

    def demonstration(self, device: str = "cpu") -> str:
        """A program by itself that shows where eager PyTorch and the backend differ."""
        options = "" if self.second_batch is None else ", dynamic=True"
        calls = [f"arguments_{number}" for number in range(1 if self.second_batch is None else 2)]
        return "\n".join([
            self.text(device),
            "",
            *(() if device == "cpu" else ("torch.backends.cudnn.allow_tf32 = False",)),
            f'compiled = torch.compile(f, backend="max"{options})',
            f"for arguments in {', '.join(calls)},:",
            "    given = arguments(), arguments()",
            "    torch.manual_seed(0)",
            "    ours, our_gradients = call(compiled, given[0])",
            "    torch.manual_seed(0)",
            "    eager, gradients = call(f, given[1])",
            "    for a, b in zip([*ours, *our_gradients, *given[0]], [*eager, *gradients, *given[1]]):",
            "        if b is not None:",
            "            torch.testing.assert_close(a, b)",
            "    for a, b in zip(ours, eager):",
            "        for step, wanted, extent in zip(a.stride(), b.stride(), b.shape):",
            "            assert step == wanted or extent == 1 or not b.numel(), (a.stride(), b.stride())",
        ]) + "\n"  # fmt: skip


_BACKWARD = """\
    ends = [x for x in results if x.requires_grad and x.grad_fn is not None]
    leaves = [x for x in given if x.requires_grad and x.is_leaf]
    if not ends or not leaves:
        return results, ()
    # Uneven, in the strides of what they are the gradients of.
    incoming = [torch.arange(x.numel(), device=x.device).mul(7).remainder(11).sub(5).reshape(x.shape) for x in ends]
    incoming = [torch.empty_like(x).copy_(numbers) for x, numbers in zip(ends, incoming)]
    return results, torch.autograd.grad(ends, leaves, incoming, allow_unused=True)"""

NAMES: dict[str, Any] = {"torch": torch, "F": F, "torchvision": torchvision}
"""What a program's text may name."""


def evaluated(text: str, **values: Any) -> Any:
    """What an expression gives."""
    return eval(text, {**NAMES, **values})
