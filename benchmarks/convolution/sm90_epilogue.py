"""Proves that elementwise successors run inside the Hopper kernels' store, and measures what they cost.

    python benchmarks/convolution/sm90_epilogue.py

For each problem: the data gradient alone; the data gradient plus a residual under ReLU's mask, as one kernel; and the
time in which a copy moves the tensors that the epilogue reads. fprop gets a bias and ReLU. The kernels that a call
launches are counted with the profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from max.driver import Accelerator, Buffer  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef, Graph, Module, TensorType, ops  # noqa: E402
from sm90_check import ROOT, Problem, interleaved, reference  # noqa: E402

PROBLEMS = (
    Problem("ck_default", 128, 128, 256, 71, 71, 3, 3, 2, 1, 1),
    Problem("l3", 256, 256, 256, 14, 14, 3, 3, 1, 1, 1),
    Problem("l1", 256, 64, 64, 56, 56, 3, 3, 1, 1, 1),
)


def build(problem: Problem, module: Module, kernels: Path) -> None:
    """Channels, filter and image are known when a model is compiled; only the batch is symbolic."""
    device, host, dtype = DeviceRef.GPU(), DeviceRef.CPU(), DType.bfloat16
    x = TensorType(dtype, ("n", 1, problem.h, problem.w, problem.c), device)
    w = TensorType(dtype, (problem.k, 1, problem.r, problem.s, problem.c), device)
    y = TensorType(dtype, ("n", 1, problem.p, problem.q, problem.k), device)
    geometry = TensorType(DType.int64, (12,), host)

    def graph(name: str, inputs: list[TensorType]) -> Graph:
        full = f"{name}_{problem.name}"
        return Graph(full, input_types=inputs, module=module, custom_extensions=[kernels])

    with graph("dgrad", [y, w, geometry]) as g:
        operands = [value.tensor for value in g.inputs]
        g.output(ops.custom("conv_dgrad_sm90_fused", device, operands, [x])[0])
    with graph("dgrad_residual_mask", [y, w, geometry, x, x]) as g:
        operands = [value.tensor for value in g.inputs[:3]]
        skip, activation = g.inputs[3].tensor, g.inputs[4].tensor
        zero = ops.constant(0, dtype, device)
        dx = ops.custom("conv_dgrad_sm90_fused", device, operands, [x])[0].tensor
        g.output(ops.where(ops.greater(activation, zero), dx + skip, zero))
    with graph("fprop_bias_relu", [x, w, geometry, TensorType(dtype, (problem.k,), device)]) as g:
        operands = [value.tensor for value in g.inputs[:3]]
        out = ops.custom("conv_fprop_sm90_fused", device, operands, [y])[0].tensor
        g.output(ops.relu(out + g.inputs[3].tensor))


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that one call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if "CUDA" in str(event.device_type)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", type=Path, default=ROOT / "kernels", help="Mojo package or .mojoc")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()

    session = InferenceSession(devices=[Accelerator()])
    module = Module()
    for problem in PROBLEMS:
        build(problem, module, args.kernels)
    models = session.load_all(module, custom_extensions=[args.kernels])
    rows, wrong = [], 0
    for problem in PROBLEMS:
        t = problem.tensors(torch.bfloat16, integers=False)
        skip, activation = torch.randn_like(t["x"]), torch.randn_like(t["x"])
        bias = torch.randn(problem.k, device="cuda").bfloat16()
        geometry = problem.geometry()

        def call(name: str, *tensors: torch.Tensor, problem: Problem = problem) -> Any:
            buffers = [Buffer.from_dlpack(v) for v in tensors]
            model = models[f"{name}_{problem.name}"]
            return lambda: model.execute(*buffers)[0]

        plain = call("dgrad", t["y"], t["w"], geometry)
        fused = call("dgrad_residual_mask", t["y"], t["w"], geometry, skip, activation)
        forward = call("fprop_bias_relu", t["x"], t["w"], geometry, bias)

        dx = reference("dgrad", problem, {name: v.double() for name, v in t.items()})
        want = torch.where(activation > 0, dx + skip.double(), 0.0)
        error = ((torch.from_dlpack(fused()).double() - want).norm() / want.norm()).item()
        del dx, want
        y = reference("fprop", problem, {name: v.double() for name, v in t.items()})
        want = torch.relu(y + bias.double())
        error_forward = ((torch.from_dlpack(forward()).double() - want).norm() / want.norm()).item()
        del y, want
        launches, launches_forward = kernels_of(fused), kernels_of(forward)

        d_tensors = torch.cat([skip.flatten(), activation.flatten()])
        target = torch.empty_like(d_tensors)
        times = interleaved({"dgrad": plain, "fused": fused, "copy": partial(target.copy_, d_tensors)}, 7)
        # The copy reads and writes; the epilogue only reads.
        allowed = times["dgrad"] + times["copy"] / 2
        ok = max(error, error_forward) < 6e-3 and len(launches) == 1 and len(launches_forward) == 1
        wrong += not ok
        rows.append(
            {
                "problem": problem.name,
                "error": error,
                "error_fprop": error_forward,
                "kernels": launches,
                "kernels_fprop": launches_forward,
                "dgrad_ms": times["dgrad"],
                "fused_ms": times["fused"],
                "read_d_ms": times["copy"] / 2,
                "cost": times["fused"] / allowed,
            }
        )
        print(
            f"{problem.name:12} error {error:.2e} fprop {error_forward:.2e}  kernels {len(launches)} and "
            f"{len(launches_forward)}  dgrad {times['dgrad']:.4f} fused {times['fused']:.4f} "
            f"reading D {times['copy'] / 2:.4f} ms: {times['fused'] / allowed:.3f} of their sum"
            f"{'' if ok else '  WRONG'}",
            flush=True,
        )
    if args.output:
        document = {
            "hardware": torch.cuda.get_device_name(),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"torch": torch.__version__, "max": version("max")},
            "rows": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
