"""Batched matrix products of published models: random checks, and times beside PyTorch's own.

    python -m benchmarks matmul --check 10000 [--device cuda]           # random products against float64
    python -m benchmarks matmul --device cuda --output FILE             # times, ours over torch.bmm

The products are those of attention that is written out, forward and backward, and of linear and channel attention. On a
GPU each contender's launches are queued together, ours by one launch list, PyTorch's by a CUDA graph; on a CPU they are
calls. Contenders take turns over inputs that together exceed the cache; medians.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.launcher import Launcher
from benchmarks.kernels.library import words_of
from torch_max_backend.bench.memory import cache_bytes
from torch_max_backend.bench.timing import interleaved
from torch_max_backend.dtypes import TORCH_TO_MAX, device_ref
from torch_max_backend.mojo_ops.matmul import STRIDED, MatmulGeometry, MatrixStrides, matmul_function

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float64: 4e-15}
"""||result - reference|| / ||reference|| of a sum of up to 1,024 products, in float32 (float64), rounded once."""


def _limit(dtype: torch.dtype, length: int) -> float:
    return ERRORS[dtype] * max(1.0, math.sqrt(length / 1024))


@dataclass(frozen=True)
class Attention:
    """Heads of queries [rows, size], keys [keys, size] and values [keys, value_size]."""

    name: str
    heads: int
    """In all images."""
    rows: int
    keys: int
    size: int
    value_size: int

    def products(self) -> Iterator[tuple[str, Product]]:
        """The products of the forward and the backward pass."""
        m, n, d, e = self.rows, self.keys, self.size, self.value_size
        shapes = {
            "Q K^T": (m, d, n, False, True),
            "P V": (m, n, e, False, False),
            "dO V^T": (m, e, n, False, True),
            "P^T dO": (n, m, e, True, False),
            "dS K": (m, n, d, False, False),
            "dS^T Q": (n, m, d, True, False),
        }
        for what, shape in shapes.items():
            yield f"{self.name} {what}", Product(self.heads, *shape)


@dataclass(frozen=True)
class Product:
    """[batch, m, k] @ [batch, k, n], of which either may lie transposed."""

    batch: int
    m: int
    k: int
    n: int
    a_turned: bool = False
    b_turned: bool = False

    def operands(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Normal numbers."""
        a = torch.randn(self.batch, *((self.k, self.m) if self.a_turned else (self.m, self.k)), device=device)
        b = torch.randn(self.batch, *((self.n, self.k) if self.b_turned else (self.k, self.n)), device=device)
        a, b = a.to(dtype), b.to(dtype)
        return (a.mT if self.a_turned else a), (b.mT if self.b_turned else b)

    def elements(self) -> int:
        """The number of elements of the operands and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


#: 64 images.
ATTENTION = [
    Attention("Swin-T, stage 1", 64 * 64 * 3, 49, 49, 32, 32),
    Attention("Swin-T, stage 4", 64 * 24, 49, 49, 32, 32),
    Attention("SwinV2-T, 256x256", 64 * 64 * 3, 64, 64, 32, 32),
    Attention("ViT-B/16", 64 * 12, 197, 197, 64, 64),
    Attention("LeViT-256", 64 * 4, 196, 196, 32, 64),
    Attention("MViTv2-S, stage 1", 64, 3137, 50, 96, 96),
    Attention("CaiT-S24, class attention", 64 * 8, 1, 197, 48, 48),
    Attention("SegFormer-B0, stage 1", 8, 16384, 256, 32, 32),
]
OTHERS = [
    ("XCiT-T12 Q K^T", Product(64 * 4, 48, 784, 48, True, False)),
    ("XCiT-T12 A V", Product(64 * 4, 48, 48, 784, False, True)),
    ("EfficientViT-B1 K^T V", Product(64 * 16, 16, 196, 17, True, False)),
    ("EfficientViT-B1 Q KV", Product(64 * 16, 196, 16, 17)),
    ("BoTNet-50 Q K^T", Product(64 * 4, 196, 128, 196, False, True)),
    ("DETR Q K^T", Product(8 * 8, 850, 32, 850, False, True)),
    ("512 x 512 x 512", Product(96, 512, 512, 512)),
]


def problems() -> list[tuple[str, Product]]:
    """All of the list."""
    return [each for attention in ATTENTION for each in attention.products()] + OTHERS


def geometry_of(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tf32: bool = False) -> MatmulGeometry:
    """Of tensors of rank 2 to 5, the batch of each broadcast to C's."""
    missing = 5 - c.dim()
    size = (1,) * missing + tuple(c.shape[:-2])

    def matrices(x: torch.Tensor) -> MatrixStrides:
        steps = (0,) * missing + tuple(x.expand(*c.shape[:-2], *x.shape[-2:]).stride()[:-2])
        return MatrixStrides((steps[0], steps[1], steps[2]), x.stride(-2), x.stride(-1))

    return MatmulGeometry(
        c.shape[-2], c.shape[-1], a.shape[-1], (size[0], size[1], size[2]), matrices(c), matrices(a), matrices(b), tf32
    )


class Products:
    """Library functions of every dtype on one device."""

    def __init__(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self.functions = {each: matmul_function(device_ref(device), TORCH_TO_MAX[each]) for each in dtypes}
        self.launcher = Launcher(self.functions.values(), device)

    def bind(self, *calls: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Calls that write each C = A B."""
        words = []
        for c, a, b in calls:
            words.append(words_of(STRIDED, c, a, b, numbers=geometry_of(c, a, b).numbers()))
        return self.launcher.bind(self.functions[calls[0][0].dtype], *words)


# Random checks.


def _extent(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 7, 8, 16, 17, 31, 32, 48, 49, 63, 64, 65, 100, 128, 130, 197, 200, rng.randint(1, 300)])


def _laid(rng: random.Random, batch: Sequence[int], rows: int, columns: int, dtype: torch.dtype, device: torch.device,
          whole: bool = False) -> torch.Tensor:  # fmt: skip
    """A tensor in a random order: transposed, with its batch inside or outside, a part of a larger one, at any address;
    broadcast along some of the batch unless ``whole``."""
    shape = [*batch, rows, columns]
    own = [1 if not whole and rng.random() < 0.15 else size for size in batch] + [rows, columns]
    order = list(range(len(own)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    room = [own[axis] + (rng.choice([1, 3, 8]) if rng.random() < 0.2 else 0) for axis in order]
    offset = rng.choice([0, 0, 0, 1, 2, 8])
    memory = torch.randn(math.prod(room) + offset, device=device).to(dtype)[offset:].view(room)
    part = memory[tuple(slice(0, own[axis]) for axis in order)]
    inverse = [order.index(axis) for axis in range(len(own))]
    return part.permute(inverse).expand(shape)


def check(count: int, seed: int, device: torch.device, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Compares random products with float64; what is wrong, in words."""
    ours, wrong = Products(device, dtypes), []
    for number in range(count):
        rng = random.Random(seed + number)
        torch.manual_seed(seed + number)
        dtype = rng.choice(list(dtypes))
        batch = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 3))]
        m, k, n = (_extent(rng) for _ in range(3))
        if rng.random() < 0.03:
            m, k, n = rng.choice([(0, k, n), (m, 0, n), (m, k, 0)])
        a, b = _laid(rng, batch, m, k, dtype, device), _laid(rng, batch, k, n, dtype, device)
        c = _laid(rng, batch, m, n, dtype, device, whole=True)
        c.fill_(math.nan)
        ours.bind((c, a, b))()
        first = c.clone()
        expected = a.double() @ b.double()
        error = float((first.double() - expected).norm() / expected.norm().clamp_min(1e-30)) if first.numel() else 0.0
        c.fill_(math.nan)
        ours.bind((c, a, b))()
        if not error <= _limit(dtype, k) or not torch.equal(first, c):
            wrong.append(
                f"{number}: {dtype} batch {batch} {m}x{k}x{n} a {a.stride()} b {b.stride()} c {c.stride()}: {error}"
            )
    return wrong


# Times.


def _measured(
    name: str, product: Product, dtype: torch.dtype, ours: Products, device: torch.device, runs: int
) -> dict[str, Any]:
    bytes_ = product.elements() * dtype.itemsize
    count = max(2, min(16, math.ceil(3 * cache_bytes(device) / bytes_)))
    sets = []
    for _ in range(count):
        a, b = product.operands(dtype, device)
        c = torch.empty(product.batch, product.m, product.n, dtype=dtype, device=device)
        sets.append((c, a, b))
    mine = ours.bind(*sets)

    def theirs() -> None:
        for c, a, b in sets:
            torch.bmm(a, b, out=c)

    mine()
    reference = torch.bmm(sets[0][1].double(), sets[0][2].double())
    error = float((sets[0][0].double() - reference).norm() / reference.norm())
    assert error <= _limit(dtype, product.k), f"{name}: error {error}"
    del reference
    calls: dict[str, Callable[[], None]] = {"ours": mine, "torch": theirs}
    if device.type == "cuda":
        theirs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            theirs()
        calls["torch"] = graph.replay
    times = interleaved({each: [call] for each, call in calls.items()}, runs, device, queued=count)
    medians = {each: found.median / count for each, found in times.items()}
    return {
        "problem": name, "batch": product.batch, "m": product.m, "k": product.k, "n": product.n,
        "a_turned": product.a_turned, "b_turned": product.b_turned, "dtype": str(dtype).removeprefix("torch."),
        "ours_us": round(medians["ours"] * 1e6, 2), "torch_us": round(medians["torch"] * 1e6, 2),
        "ratio": round(medians["ours"] / medians["torch"], 3), "bytes": bytes_,
        "gb_per_s": round(bytes_ / medians["ours"] / 1e9), "error": float(f"{error:.2g}"),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks matmul", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", type=int, default=0, help="compare so many random products instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=None)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    names = given.dtype or (list(DTYPES) if given.check else ["bfloat16"] if device.type == "cuda" else ["float32"])
    dtypes = [DTYPES[name] for name in names]
    if given.check:
        wrong = check(given.check, given.seed, device, dtypes)
        print(f"{given.check} random products on {device}, {len(wrong)} wrong", *wrong[:20], sep="\n", flush=True)
        sys.exit(bool(wrong))
    ours, rows = Products(device, dtypes), []
    for dtype in dtypes:
        for name, product in problems():
            rows.append(_measured(name, product, dtype, ours, device, given.runs))
            row = rows[-1]
            print(
                f"{row['ratio']:6.2f} {row['ours_us']:10.1f} us {row['gb_per_s']:6d} GB/s  {row['dtype']} {name}",
                flush=True,
            )
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean {mean:.3f}, worst {max(row['ratio'] for row in rows):.2f} over {len(rows)} products")
    if given.output:
        records.write(given.output, {**records.provenance(device), "mean": round(mean, 3), "products": rows})


if __name__ == "__main__":
    main()
