"""Proves that elementwise successors run inside the Hopper kernels' store, and measures what they cost.

    python -m benchmarks convolution.sm90_epilogue

For each problem: the data gradient alone; the data gradient plus a residual under ReLU's mask, as one kernel; and the
time in which a copy moves the tensors that the epilogue reads. fprop gets a bias and ReLU. Other epilogues are checked
and counted, not timed: a D broadcast along the channels and one along the pixels, and a view in between. Graphs are
fused as a compiled model's are. The kernels that a call launches are counted with the profiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops

from benchmarks import records
from benchmarks.kernels.convolution.sm90_check import Problem, reference, use_virtual_hopper
from benchmarks.kernels.listed import ListedGraph
from torch_max_backend.bench.timing import interleaved
from torch_max_backend.lowering import numerics
from torch_max_backend.mojo_ops.convolution import Grouping, conv_with_geometry
from torch_max_backend.runtime.building import libraries

PROBLEMS = (
    Problem("ck_default", 128, 128, 256, 71, 71, 3, 3, 2, 1, 1),
    Problem("l3", 256, 256, 256, 14, 14, 3, 3, 1, 1, 1),
    Problem("l1", 256, 64, 64, 56, 56, 3, 3, 1, 1, 1),
)
SMALL = Problem("small", 3, 72, 40, 15, 17, 3, 3, 1, 1, 1)
"""The problem of the epilogues that are not timed."""


def build() -> dict[str, ListedGraph]:
    """The graphs by their names. Sizes are known, as fusion demands."""
    device, dtype = DeviceRef.GPU(), DType.bfloat16
    graphs: dict[str, ListedGraph] = {}

    def add(name: str, problem: Problem, types: list[TensorType], make: Callable[..., TensorValue]) -> None:
        x, y = image(problem, "x"), image(problem, "y")
        w = TensorType(dtype, (problem.k, 1, problem.r, problem.s, problem.c), device)
        forward = name.startswith("fprop")

        def whole(values: list[TensorValue]) -> list[TensorValue]:
            source, weight, *extra = values
            result = conv_with_geometry(
                "conv_fprop" if forward else "conv_dgrad",
                source,
                weight,
                problem.geometry(),
                (y if forward else x).shape,
                grouping=Grouping.ONE,
            )
            return [make(result, *extra)]

        inputs = [x if forward else y, w, *types]
        graphs[f"{name}_{problem.name}"] = ListedGraph(inputs, whole, torch.device("cuda", 0))

    def image(problem: Problem, name: str) -> TensorType:
        extents = (problem.h, problem.w, problem.c) if name == "x" else (problem.p, problem.q, problem.k)
        return TensorType(dtype, (problem.n, 1, *extents), device)

    zero = partial(ops.constant, 0, dtype, device)
    for problem in PROBLEMS:
        x = image(problem, "x")
        add("dgrad", problem, [], lambda dx: dx)
        add(
            "dgrad_residual_mask",
            problem,
            [x, x],
            lambda dx, skip, activation: ops.where(ops.greater(activation, zero()), dx + skip, zero()),
        )
        vector = TensorType(dtype, (problem.k,), device)
        add("fprop_bias_relu", problem, [vector], lambda y, bias: numerics.relu(y + bias))

    x = image(SMALL, "x")
    pixels = TensorType(dtype, (SMALL.n, 1, SMALL.h, SMALL.w, 1), device)
    channels = TensorType(dtype, (SMALL.c,), device)
    add("dgrad_broadcast", SMALL, [pixels, channels], lambda dx, d, e: ops.max(dx * d + e, zero()))
    flat = TensorType(dtype, (SMALL.n, SMALL.h * SMALL.w, SMALL.c), device)
    add("dgrad_view", SMALL, [flat], lambda dx, skip: ops.reshape(dx, [SMALL.n, SMALL.h * SMALL.w, SMALL.c]) + skip)
    return graphs


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that one call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if "CUDA" in str(event.device_type)]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def bind(graphs: dict[str, ListedGraph], name: str, problem: Problem, *tensors: torch.Tensor) -> Callable[[], Any]:
    run = graphs[f"{name}_{problem.name}"].load()
    return lambda: run(*tensors)[0]


def check_small(graphs: dict[str, ListedGraph]) -> list[dict[str, Any]]:
    """The epilogues that are not timed."""
    t = SMALL.tensors(torch.bfloat16, integers=False)
    dx = reference("dgrad", SMALL, {name: v.double() for name, v in t.items()})
    skip = torch.randn_like(t["x"])
    pixels = torch.randn(SMALL.n, 1, SMALL.h, SMALL.w, 1, device="cuda").bfloat16()
    channels = torch.randn(SMALL.c, device="cuda").bfloat16()
    flat = skip.reshape(SMALL.n, -1, SMALL.c)
    cases = {
        "dgrad_broadcast": ([pixels, channels], (dx * pixels.double() + channels.double()).clamp_min(0)),
        "dgrad_view": ([flat], dx.reshape(flat.shape) + skip.double().reshape(flat.shape)),
    }
    rows = []
    for name, (extra, want) in cases.items():
        call = bind(graphs, name, SMALL, t["y"], t["w"], *extra)
        row = {"epilogue": name, "error": error_of(call(), want), "kernels": kernels_of(call)}
        row["ok"] = row["error"] < 1e-2 and len(row["kernels"]) == 1
        rows.append(row)
        verdict = "" if row["ok"] else "  WRONG"
        print(f"{name:16} error {row['error']:.2e}  kernels {len(row['kernels'])}{verdict}", flush=True)
    return rows


def measure(graphs: dict[str, ListedGraph], problem: Problem) -> dict[str, Any]:
    """One problem's residual and mask, beside the plain gradient and the time of reading D."""
    t = problem.tensors(torch.bfloat16, integers=False)
    x, y, w = (t[name] for name in "xyw")
    skip, activation = torch.randn_like(x), torch.randn_like(x)
    bias = torch.randn(problem.k, device="cuda").bfloat16()
    plain = bind(graphs, "dgrad", problem, y, w)
    fused = bind(graphs, "dgrad_residual_mask", problem, y, w, skip, activation)
    forward = bind(graphs, "fprop_bias_relu", problem, x, w, bias)

    wide = {name: v.double() for name, v in t.items()}
    dx = reference("dgrad", problem, wide)
    error = error_of(fused(), torch.where(activation > 0, dx + skip.double(), 0.0))
    del dx
    error_forward = error_of(forward(), torch.relu(reference("fprop", problem, wide) + bias.double()))
    del wide
    launches, launches_forward = kernels_of(fused), kernels_of(forward)

    d_tensors = torch.cat([skip.flatten(), activation.flatten()])
    target = torch.empty_like(d_tensors)
    calls = {"dgrad": [plain], "fused": [fused], "copy": [partial(target.copy_, d_tensors)]}
    times = {name: each.median * 1e3 for name, each in interleaved(calls, 28, torch.device("cuda")).items()}
    # The copy reads and writes; the epilogue only reads.
    allowed = times["dgrad"] + times["copy"] / 2
    ok = max(error, error_forward) < 6e-3 and len(launches) == 1 and len(launches_forward) == 1
    print(
        f"{problem.name:12} error {error:.2e} fprop {error_forward:.2e}  kernels {len(launches)} and "
        f"{len(launches_forward)}  dgrad {times['dgrad']:.4f} fused {times['fused']:.4f} "
        f"reading D {times['copy'] / 2:.4f} ms: {times['fused'] / allowed:.3f} of their sum"
        f"{'' if ok else '  WRONG'}",
        flush=True,
    )
    return {
        "problem": problem.name,
        "error": error,
        "error_fprop": error_forward,
        "kernels": launches,
        "kernels_fprop": launches_forward,
        "dgrad_ms": times["dgrad"],
        "fused_ms": times["fused"],
        "read_d_ms": times["copy"] / 2,
        "cost": times["fused"] / allowed,
        "ok": ok,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="for a Hopper GPU that need not be there")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()

    if args.compile_only:
        use_virtual_hopper()
    graphs = build()
    libraries.load(torch.device("cuda", 0))
    if args.compile_only:
        return 0
    torch.manual_seed(0)
    others = check_small(graphs)
    rows = [measure(graphs, problem) for problem in PROBLEMS]
    if args.output:
        device = torch.device("cuda", 0)
        document = {
            **records.provenance(device),
            "rows": rows,
            "others": others,
        }
        records.write(args.output, document)
    return 0 if all(row["ok"] for row in (*rows, *others)) else 1


if __name__ == "__main__":
    sys.exit(main())
