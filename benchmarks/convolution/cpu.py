"""Convolution passes beside PyTorch eager on the CPU: python -m benchmarks convolution.cpu [--dtype bfloat16]

Our kernels and eager, in its default layout and in channels_last, take turns on the same inputs; the best time of
each counts. Ends with a table and writes a result file. With --problems only some are measured, and the file keeps the
rows that it has of others, if they are of the same versions and machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Dim, Graph, TensorType

from benchmarks import RESULTS, problems
from torch_max_backend.bench import results
from torch_max_backend.convolution_problem import ConvolutionProblem, Pass
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.convolution import GEOMETRY_LENGTH, conv_with_geometry, geometry_values
from torch_max_backend.runtime.execution import execute

PASSES = ("forward", "grad_input", "grad_weight")
LETTERS = {"x": ("n", *"dhw", "c"), "w": ("k", *"trs", "j"), "y": ("n", *"opq", "k")}
OPERANDS = {Pass.FPROP: ("x", "w", "y"), Pass.DGRAD: ("y", "w", "x"), Pass.WGRAD: ("x", "y", "w")}


def compile_pass(pass_: Pass, dtype: DType, session: InferenceSession) -> Any:
    """One op with symbolic extents and its geometry as an input: it serves every problem."""
    first, second, result = OPERANDS[pass_]
    host = DeviceRef.CPU()
    types = [TensorType(dtype, [Dim(letter) for letter in LETTERS[name]], host) for name in (first, second, result)]
    types.append(TensorType(DType.int64, [GEOMETRY_LENGTH], host))
    with Graph(pass_.value, input_types=types, custom_extensions=[KERNELS_PATH]) as graph:
        a, b, like, geometry = (value.tensor for value in graph.inputs)
        graph.output(conv_with_geometry(pass_.value, a, b, geometry, like.shape))
    return session.load(graph)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 5, channels last, contiguous."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor.movedim(1, -1).contiguous()


def seconds(function: Callable[[], Any], pause: float) -> float:
    """One call, after a pause: an idle thread pool spins for a while and would take the other contender's core."""
    time.sleep(pause)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    entry: dict[str, Any], models: dict[Pass, Any], dtype: torch.dtype, budget: float, pause: float
) -> dict[str, Any]:
    """Best times in ms, and the largest error against eager, for the three passes of one problem."""
    weight_shape = (
        [entry["c"], entry["k"] // entry["groups"], *entry["filter"]]
        if entry["transposed"]
        else [entry["k"], entry["c"] // entry["groups"], *entry["filter"]]
    )
    arguments = (
        entry["stride"],
        entry["padding"],
        entry["dilation"],
        entry["transposed"],
        entry["output_padding"],
    )
    problem = ConvolutionProblem.from_aten(
        [entry["n"], entry["c"], *entry["size"]], weight_shape, *arguments, entry["groups"]
    )
    given = torch.randn(problem.aten_input_shape).to(dtype)
    weight = torch.randn(problem.aten_weight_shape).to(dtype)
    gradient = torch.randn(problem.aten_output_shape).to(dtype)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
    layouts = {"eager": (given, weight, gradient)}
    if last is not None:
        layouts["eager channels_last"] = tuple(
            tensor.contiguous(memory_format=last) for tensor in (given, weight, gradient)
        )
    role = {"w": weight, "x": gradient, "y": given} if problem.transposed else {"w": weight, "x": given, "y": gradient}
    ours = {name: channels_last(tensor) for name, tensor in role.items()}
    geometry = Buffer.from_numpy(geometry_values(problem.stride, problem.padding, problem.dilation, problem.groups))
    passes = dict(zip(PASSES, (problem.forward_pass, problem.grad_input_pass, Pass.WGRAD), strict=True))
    result: dict[str, Any] = {}
    for index, (name, pass_) in enumerate(passes.items()):
        buffers = [Buffer.from_dlpack(ours[operand]) for operand in OPERANDS[pass_]]
        model = models[pass_]
        mask = [index == 1, index == 2, False]

        def run_eager(tensors: tuple[torch.Tensor, ...], index: int = index, mask: list[bool] = mask) -> torch.Tensor:
            x, w, dy = tensors
            if index == 0:
                return torch.ops.aten.convolution(x, w, None, *arguments, entry["groups"])
            return torch.ops.aten.convolution_backward(dy, x, w, None, *arguments, entry["groups"], mask)[index - 1]

        def run_ours(model: Any = model, buffers: list[Buffer] = buffers) -> Any:
            return execute(model, [*buffers, geometry])

        contenders: dict[str, Callable[[], Any]] = {"ours": run_ours}
        for layout, tensors in layouts.items():
            contenders[layout] = lambda tensors=tensors, run_eager=run_eager: run_eager(tensors)
        error = difference(torch.from_dlpack(run_ours()[0]), channels_last(run_eager(layouts["eager"])))
        best = dict.fromkeys(contenders, math.inf)
        rounds, stop = 0, time.perf_counter() + budget
        while rounds < 5 or (time.perf_counter() < stop and rounds < 200):
            for contender, function in contenders.items():
                best[contender] = min(best[contender], seconds(function, pause))
            rounds += 1
        result[name] = {
            **{f"{contender} ms": round(value * 1e3, 4) for contender, value in best.items()},
            "GFLOP/s": round(problem.flops / best["ours"] / 1e9, 1),
            "error": error,
        }
    return result


def difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    """Largest difference, as a part of eager's largest value."""
    return float((ours.double() - eager.double()).abs().max() / eager.double().abs().max())


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each pass of each problem")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two contenders")
    parser.add_argument("--problems", help="regular expression over the names: measure these again")
    parser.add_argument("--json", type=Path, help="where the result file goes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = os.getloadavg()[0]
    session = InferenceSession(devices=[CPU()])
    models = {pass_: compile_pass(pass_, DType[options.dtype], session) for pass_ in Pass}
    target = options.json or RESULTS / f"convolution_cpu_{options.dtype}.json"
    record = results.provenance(torch.device("cpu"))
    date, kernels = record["date"], record["versions"]["kernels"]
    made_with = {
        "dtype": options.dtype,
        "hardware": {key: record["hardware"][key] for key in ("cpu", "threads")},
        "versions": {key: record["versions"][key] for key in ("torch", "max", "mojo")},
    }
    kept = rows_to_keep(target, made_with) if options.problems else {}
    rows = []
    for entry in problems.convolutions("cpu"):
        if options.problems and not re.search(options.problems, entry["name"]):
            rows += kept.get(entry["name"], [])
            continue
        times = measure(entry, models, getattr(torch, options.dtype), options.budget, options.pause)
        row = {"problem": entry, "date": date, "kernels": kernels, **times}
        rows.append(row)
        cells = []
        for name in PASSES:
            times = row[name]
            ratios = [times["ours ms"] / value for key, value in times.items() if key.startswith("eager")]
            cells.append(f"{times['ours ms']:9.3f} ms " + " ".join(f"{ratio:5.2f}" for ratio in ratios))
        print(f"{entry['name']:42}" + " | ".join(cells), flush=True)
    summary = {}
    for name in PASSES:
        for layout in ("eager", "eager channels_last"):
            ratios = [row[name]["ours ms"] / row[name][f"{layout} ms"] for row in rows if f"{layout} ms" in row[name]]
            summary[f"{name} / {layout}"] = {
                "geometric mean": round(geometric_mean(ratios), 3),
                "worst": round(max(ratios), 3),
            }
            print(f"{name:12} / {layout:20} geometric mean {geometric_mean(ratios):.3f}, worst {max(ratios):.2f}")
    report = {
        **record,
        "dtype": options.dtype,
        "load average": [round(value, 1) for value in (before, os.getloadavg()[0])],
        "ratio": "our best time over eager's best, interleaved",
        "summary": summary,
        "problems": rows,
    }
    results.write(target, report)
    print(f"written to {target}")


def rows_to_keep(file: Path, made_with: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By name, the rows of an earlier result file."""
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text())
    for name, value in made_with.items():
        # Of the kernels that a row was measured with its own record says which.
        then = {key: earlier[name].get(key) for key in value} if isinstance(value, dict) else earlier[name]
        if then != value:
            raise SystemExit(f"{file} has {name} = {then}, this run {value}: measure every problem")
    return {row["problem"]["name"]: [row] for row in earlier["problems"]}


if __name__ == "__main__":
    main()
