"""Times attention, forward and backward, beside PyTorch's flash attention, in turns on one stream.

Flash attention takes no float32 on a GPU: the memory-efficient one stands in.

    python -m benchmarks attention --device cuda --output benchmarks/results/attention_h200.json
    python -m benchmarks attention --device cpu --output benchmarks/results/attention_cpu.json

Operands lie as a model's linear layers leave them, [batch, rows, heads, elements], and are drawn anew for every
problem; several sets of them, together larger than the cache, are used in turn. Beside the times stands the largest
error against float64, ours and PyTorch's, over the largest element of the result.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Dim, Graph, Module, TensorType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import records
from benchmarks.kernels.launcher import on_stream
from torch_max_backend.bench.memory import available_bytes, cache_bytes
from torch_max_backend.bench.timing import interleaved, set_count
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops import attention
from torch_max_backend.runtime.engine import session
from torch_max_backend.runtime.engine.execution import execute

aten = torch.ops.aten

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One problem: as many keys as queries."""

    batch: int
    heads: int
    rows: int
    size: int
    causal: bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """In memory."""
        return self.batch, self.rows, self.heads, self.size

    @property
    def flops(self) -> int:
        """Of the forward pass's two products; the backward pass has five."""
        return 4 * self.batch * self.heads * self.rows**2 * self.size // (2 if self.causal else 1)

    def graph(self, pass_: str) -> str:
        words = ("bench_attention", pass_, TORCH_TO_MAX[self.dtype].name, str(self.size), str(int(self.causal)))
        return "_".join(words)


def cases(device: torch.device) -> list[Case]:
    if device.type == "cpu":
        return [Case(8, 12, 197, 64, False, torch.float32), Case(1, 8, 1024, 64, True, torch.float32)]
    sizes = [(64, 12, 197, 64), *((16384 // rows, 16, rows, size) for size in (64, 128) for rows in (1024, 2048, 4096))]
    others = [(16, 12, 197, 64), (4, 16, 2048, 128)]
    return [
        *(Case(*each, causal, torch.bfloat16) for each in sizes for causal in (False, True)),
        *(Case(*each, False, dtype) for each in others for dtype in (torch.float16, torch.float32)),
    ]


def load(wanted: Sequence[Case], device: torch.device) -> dict[str, Model]:
    """Both passes' graphs, which serve any batch, number of heads and of rows."""
    place = DeviceRef.GPU(device.index or 0) if device.type == "cuda" else DeviceRef.CPU()
    module, names = Module(), []
    for case in {case.graph(""): case for case in wanted}.values():
        dtype = TORCH_TO_MAX[case.dtype]
        rows = TensorType(dtype, [Dim("batch"), Dim("rows"), Dim("heads"), case.size], place)
        sums = TensorType(DType.float32, [Dim("batch"), Dim("heads"), Dim("rows")], place)
        options: dict[str, Any] = {
            "axes": ((0, 2, 1),) * 4,
            "scale": 1 / math.sqrt(case.size),
            "is_causal": case.causal,
            "aligned_at_end": False,
        }
        names += [case.graph("fprop"), case.graph("dgrad")]
        with Graph(names[-2], input_types=[rows] * 3, kernel_library=session.kernel_library(), module=module) as graph:
            q, k, v = (value.tensor for value in graph.inputs)
            graph.output(*attention.attention_fprop(q, k, v, None, **options))
        types = [*[rows] * 5, sums]
        with Graph(names[-1], input_types=types, kernel_library=session.kernel_library(), module=module) as graph:
            operands = [value.tensor for value in graph.inputs]
            graph.output(*attention.attention_dgrad(*operands, None, **options)[:3])
    return session.compile_module(module, device, names, len(names), "attention")


def _call(model: Model, tensors: Tensors) -> Callable[[], list[torch.Tensor]]:
    buffers = [Buffer.from_dlpack(tensor) for tensor in tensors]
    return lambda: [torch.from_dlpack(result) for result in execute(model, buffers)]


def _heads_first(tensors: Tensors) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _theirs(case: Case, tensors: Tensors) -> tuple[list[torch.Tensor], Callable[[], Any], Callable[[], Any]]:
    """PyTorch's output and gradients (as ours lie), and calls of its two passes."""
    grad, q, k, v = _heads_first(tensors)
    if grad.device.type == "cpu":
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal)

        def backward() -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, sums, 0.0, case.causal)

        return (
            _heads_first([out, *backward()]),
            lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal),
            backward,
        )
    if case.dtype == torch.float32:
        options = (None, True, 0.0, case.causal)
        out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, *options)

        def efficient_backward() -> Any:
            return aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, None, out, sums, seed, offset, 0.0, [True, True, True, False], case.causal
            )[:3]

        return (
            _heads_first([out, *efficient_backward()]),
            lambda: aten._scaled_dot_product_efficient_attention(q, k, v, *options),
            efficient_backward,
        )
    out, sums, *state = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal)

    def gpu_backward() -> Any:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums, *state[:4], 0.0, case.causal, *state[4:6]
        )

    return (
        _heads_first([out, *gpu_backward()]),
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal),
        gpu_backward,
    )


def _truth(case: Case, tensors: Tensors) -> list[torch.Tensor]:
    """Output and gradients of the first batch in float64."""
    grad, *leaves = [tensor[:1].transpose(1, 2).double() for tensor in tensors]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*leaves, is_causal=case.causal)
        gradients = torch.autograd.grad(out, leaves, grad)
    return _heads_first([out.detach(), *gradients])


def _error(got: Tensors, truth: Tensors) -> list[float]:
    return [
        float(f"{((mine[:1].double() - true).abs().max() / true.abs().max()).item():.3g}")
        for mine, true in zip(got, truth, strict=True)
    ]


def measure(case: Case, models: dict[str, Model], device: torch.device, runs: int) -> dict[str, Any]:
    """One row of the result file."""
    generator = torch.Generator(device)
    generator.seed()
    set_bytes = 4 * math.prod(case.shape) * case.dtype.itemsize
    count = min(8, set_count(2 * set_bytes, cache_bytes(device), available_bytes(device)))
    sets = [
        [torch.randn(case.shape, device=device, generator=generator).to(case.dtype) for _ in range(4)]
        for _ in range(count)
    ]
    contenders: dict[str, list[Callable[[], object]]] = {}
    errors = {}
    for number, tensors in enumerate(sets):
        forward = _call(models[case.graph("fprop")], tensors[1:])
        out, sums = forward()
        backward = _call(models[case.graph("dgrad")], [*tensors, out, sums])
        theirs, their_forward, their_backward = _theirs(case, tensors)
        if number == 0:
            truth = _truth(case, tensors)
            errors = {
                "errors": _error([out, *backward()], truth),
                "torch_errors": _error(theirs, truth),
            }
        calls = (forward, their_forward, backward, their_backward)
        for name, call in zip(("fprop", "torch_fprop", "dgrad", "torch_dgrad"), calls, strict=True):
            contenders.setdefault(name, []).append(call)
    row: dict[str, Any] = {**asdict(case), "dtype": TORCH_TO_MAX[case.dtype].name}
    for pass_, products in (("fprop", 2), ("dgrad", 5)):
        pair = {name: contenders[name] for name in (pass_, f"torch_{pass_}")}
        times = interleaved(pair, runs, device)
        ours, theirs_median = times[pass_].median, times[f"torch_{pass_}"].median
        row[pass_] = {
            "ours_ms": round(ours * 1e3, 4),
            "torch_ms": round(theirs_median * 1e3, 4),
            "ratio": round(ours / theirs_median, 3),
            "ours_tflops": round(case.flops * products / 2 / ours / 1e12, 1),
        }
    return {**row, **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    wanted = cases(device)
    models = load(wanted, device)
    rows = []
    with torch.no_grad(), on_stream(device):
        for case in wanted:
            rows.append(measure(case, models, device, chosen.runs))
            print(rows[-1], flush=True)
    if chosen.output:
        records.write(chosen.output, {**records.provenance(device), "runs": chosen.runs, "rows": rows})


if __name__ == "__main__":
    main()
