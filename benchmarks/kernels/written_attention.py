"""Times attention that models write out, forward and backward together: taken as one op, as products, and Inductor's.

    python -m benchmarks written_attention --device cuda --output benchmarks/results/written_attention_h100.json
    python -m benchmarks written_attention --device cpu --only Swin

Each problem is the attention of a published model, written as that model writes it, between its linear layers: queries,
keys and values come as [batch, rows, heads, elements]. ``taken`` is backend="max"; ``products`` is that without the
pass that finds attention; ``inductor`` is PyTorch's own compiler. A call computes the output and all gradients, that of
a learned bias too. Contenders take turns over several sets of inputs that together exceed the cache; medians of the
device's time. Beside the times stands each contender's largest error against float64, over the largest element.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import records
from benchmarks.contenders import INDUCTOR, MAX, compiled
from torch_max_backend import backend
from torch_max_backend.bench.memory import available_bytes, cache_bytes
from torch_max_backend.bench.timing import interleaved, set_count
from torch_max_backend.dtypes import TORCH_TO_MAX

Call = Callable[..., torch.Tensor]


def swin(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Windows with a position bias [heads, M, M] and a shift's mask [windows of an image, M, M]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, rows, size = q.shape
    scores = (q * size**-0.5).matmul(k.transpose(-2, -1)) + bias
    if mask is not None:
        windows = mask.shape[0]
        scores = scores.view(batch // windows, windows, heads, rows, rows) + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(batch, heads, rows, rows)
    return scores.softmax(-1).matmul(v).transpose(1, 2)


def swin_v2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Cosines times a learned number for each head [heads, 1, 1]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).transpose(-2, -1)
    return ((scores * temperature + bias).softmax(-1) @ v).transpose(1, 2)


def maxvit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("BHID,BHJD->BHIJ", q, k * k.shape[-1] ** -0.5)
    return torch.einsum("BHIJ,BHJD->BHID", (scores + bias).softmax(-1), v).transpose(1, 2)


def mvit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, high: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Positions that queries look up: of rows [M high, N high, D] and of columns [M wide, N wide, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, rows, size = q.shape
    scores = (q * size**-0.5) @ k.transpose(-2, -1)
    places = q.view(batch, heads, high.shape[0], wide.shape[0], size)
    of_high = torch.einsum("bhywc,ykc->bhywk", places, high)
    of_wide = torch.einsum("bhywc,wkc->bhywk", places, wide)
    scores = scores.view(batch, heads, high.shape[0], wide.shape[0], high.shape[1], wide.shape[1])
    scores = scores + of_high[..., :, None] + of_wide[..., None, :]
    return (scores.view(batch, heads, rows, -1).softmax(-1) @ v).transpose(1, 2)


def levit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return ((q @ k * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v).transpose(1, 2)


def vit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)


@dataclass(frozen=True)
class Problem:
    """One attention.

    Attributes:
        batch: images, or windows of all images.
        learned: shapes of what is learned in float32.
        mask: the shape of a mask of zeros and -100, () without one.
    """

    name: str
    function: Call
    batch: int
    heads: int
    rows: int
    keys: int
    size: int
    value_size: int
    learned: tuple[tuple[int, ...], ...] = ()
    mask: tuple[int, ...] | None = ()

    def inputs(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> list[Any]:
        """Queries, keys, values, what is learned, and the mask; the output's gradient is the last."""

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator)

        shapes = [(self.rows, self.size), (self.keys, self.size), (self.keys, self.value_size)]
        operands = [drawn(self.batch, rows, self.heads, size).to(dtype) for rows, size in shapes]
        leaves = [each.requires_grad_() for each in (*operands, *(drawn(*shape) for shape in self.learned))]
        hidden = [] if self.mask == () else [None if self.mask is None else (drawn(*self.mask) > 1) * -100.0]
        grad = drawn(self.batch, self.rows, self.heads, self.value_size).to(dtype)
        return [*leaves, *hidden, grad]


def problems(images: int) -> list[Problem]:
    """With so many images."""

    def windows(name: str, number: int, heads: int, function: Call, masked: bool) -> Problem:
        mask = (number, 49, 49) if masked else None
        return Problem(
            name, function, images * number, heads, 49, 49, 32, 32, ((heads, 49, 49),), mask if function is swin else ()
        )

    def pooled(stage: int, side: int, heads: int) -> Problem:
        return Problem(
            f"MViTv2-S, stage {stage}", mvit, images, heads, side**2, 49, 96, 96, ((side, 7, 96), (side, 7, 96))
        )

    return [
        *(windows(f"Swin-T, stage {n + 1}", 64 >> 2 * n, 3 << n, swin, n < 3) for n in range(4)),
        Problem("SwinV2-T, stage 1", swin_v2, images * 64, 3, 64, 64, 32, 32, ((3, 64, 64), (3, 1, 1))),
        *(windows(f"MaxViT-T, stage {n + 1}", 64 >> 2 * n, 2 << n, maxvit, False) for n in range(4)),
        *(pooled(n + 1, 56 >> n, 1 << n) for n in range(4)),
        Problem("LeViT-256, stage 1", levit, images, 4, 196, 196, 32, 64, ((4, 196, 196),)),
        Problem("ViT-B/16", vit, images, 12, 197, 197, 64, 64),
    ]


def _own(function: Call) -> Call:
    """The function with code of its own: Dynamo keeps what it compiled with the code."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _compiled(function: Call, amp: torch.dtype | None, inputs: Sequence[Any]) -> dict[str, Call]:
    contenders = {
        "taken": compiled(_own(function), MAX, dynamic=False),
        "products": compiled(_own(function), MAX, dynamic=False),
        INDUCTOR: compiled(_own(function), INDUCTOR, dynamic=False),
    }
    for name, call in contenders.items():
        # While graphs are recorded the cache, which does not know of the patch, is not asked.
        with backend.recorded_graphs():
            if name == "products":
                with mock.patch.object(backend, "fuse_attention", lambda gm: gm):
                    _step(call, amp, inputs)
            else:
                _step(call, amp, inputs)
    return contenders


def _step(call: Call, amp: torch.dtype | None, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The output and the gradients."""
    *arguments, grad = inputs
    leaves = [each for each in arguments if each is not None and each.requires_grad]
    with torch.autocast(grad.device.type, amp, enabled=amp is not None):
        output = call(*arguments)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def _errors(call: Call, function: Call, amp: torch.dtype | None, inputs: Sequence[Any]) -> list[float]:
    wide = [each if each is None else each.detach().double().requires_grad_(each.requires_grad) for each in inputs]
    pairs = zip(_step(call, amp, inputs), _step(function, None, wide), strict=True)
    return [float(f"{((mine.double() - true).abs().max() / true.abs().max()).item():.3g}") for mine, true in pairs]


def measure(problem: Problem, amp: torch.dtype | None, device: torch.device, runs: int) -> dict[str, Any]:
    """One row of the result file."""
    torch._dynamo.reset()
    generator = torch.Generator(device)
    generator.seed()
    dtype = amp or torch.float32
    first = problem.inputs(dtype, device, generator)
    contenders = _compiled(problem.function, amp, first)
    errors = {name: _errors(call, problem.function, amp, first) for name, call in contenders.items()}
    set_bytes = sum(each.numel() * each.element_size() for each in first if each is not None)
    count = min(8, set_count(2 * set_bytes, cache_bytes(device), available_bytes(device)))
    sets = [first, *(problem.inputs(dtype, device, generator) for _ in range(count - 1))]
    calls = {
        name: [lambda call=call, inputs=inputs: _step(call, amp, inputs) for inputs in sets]  # type: ignore[misc]
        for name, call in contenders.items()
    }
    times = {name: each.median for name, each in interleaved(calls, runs, device).items()}
    return {
        "name": problem.name,
        "shape": f"{problem.batch}x{problem.heads}x{problem.rows}x{problem.keys}x{problem.size}",
        "dtype": TORCH_TO_MAX[dtype].name,
        **{f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in times.items()},
        "over_products": round(times["taken"] / times["products"], 3),
        "over_inductor": round(times["taken"] / times[INDUCTOR], 3),
        "errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="64 on a GPU, 4 on a CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of autocast, or float32 without")
    parser.add_argument("--only", default="", help="problems whose names contain this")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    on_gpu = device.type == "cuda"
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if on_gpu else "float32"))
    rows = []
    for problem in problems(chosen.images or (64 if on_gpu else 4)):
        if chosen.only.lower() in problem.name.lower():
            rows.append(measure(problem, None if dtype == torch.float32 else dtype, device, chosen.runs))
            print(rows[-1], flush=True)
    if chosen.output:
        records.write(chosen.output, {**records.provenance(device), "runs": chosen.runs, "rows": rows})


if __name__ == "__main__":
    main()
