"""The convolution kernels for any NVIDIA GPU (depthwise, block-tiled): checks, then times beside cuDNN.

    python -m benchmarks convolution.any_gpu --output results.json
    python -m benchmarks convolution.any_gpu --compile FILE --target sm_90a    # where there is no GPU
    python -m benchmarks convolution.any_gpu --compiled FILE --output results.json

Checks: the problems of the kernels' own tests in every dtype, float32 with and without TF32, whole numbers exact and
normal ones near float64, each twice with equal bits. Times: the suite any_gpu through the product's own dispatch, ours
and cuDNN's (channels_last, our layout, and PyTorch's default) in turns over inputs that together exceed the cache,
medians. In the list "exact" is float32 with TF32 forbidden on both sides.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import records
from benchmarks.kernels import problems

PASSES = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}
"""Two operands and the result of each pass."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "exact": torch.float32}


def models(compiled: Path | None, dtypes: Sequence[str]) -> dict[str, Any]:
    """A model for each pass and dtype."""
    from max.driver import Accelerator
    from max.engine import InferenceSession, read

    from torch_max_backend.runtime.caches import cache

    session = InferenceSession(devices=[Accelerator()])
    artifact = (
        read(compiled) if compiled else session.compile(graphs(dtypes), custom_extensions=[cache.kernel_library_path()])
    )
    # MAX's cache may know the graphs by other names; their order is the module's.
    return dict(zip(graph_names(dtypes), session.init_all(artifact).values(), strict=True))


def graph_names(dtypes: Sequence[str]) -> list[str]:
    return [f"{pass_}_{dtype}" for dtype in dtypes for pass_ in PASSES]


def graphs(dtypes: Sequence[str]) -> Any:
    """A module of graphs with one op, symbolic extents and the geometry as an input: each serves every problem."""
    from max.dtype import DType
    from max.graph import DeviceRef, Dim, Graph, Module, TensorType

    from torch_max_backend.mojo_ops.convolution import FAMILY, conv_with_geometry
    from torch_max_backend.runtime.caches import cache

    letters = {"x": ("n", *"dhw", "c"), "w": ("k", *"trs", "j"), "y": ("n", *"opq", "k")}
    module = Module()
    for name in graph_names(dtypes):
        pass_, dtype = name.split("_")
        first, second, third = OPERANDS[pass_]
        types = [
            TensorType(DType[dtype], [Dim(letter) for letter in letters[operand]], DeviceRef.GPU())
            for operand in (first, second)
        ]
        types.append(TensorType(DType.int64, [len(FAMILY["conv_fprop"].numbers)], DeviceRef.CPU()))
        # The result's own extents, as lengths of host vectors.
        missing = [letter for letter in letters[third] if letter not in {*letters[first], *letters[second]}]
        types += [TensorType(DType.uint8, [Dim(letter)], DeviceRef.CPU()) for letter in missing]
        with Graph(name, input_types=types, module=module, custom_extensions=[cache.kernel_library_path()]) as graph:
            a, b, geometry = (value.tensor for value in graph.inputs[:3])
            shape = [Dim(letter) for letter in letters[third]]
            graph.output(conv_with_geometry(f"conv_{pass_}", a, b, geometry, shape))
    return module


def compile_to(path: Path, target: str, dtypes: Sequence[str]) -> None:
    """Compiles for a GPU that is not there."""
    from max.driver import (
        Accelerator,
        set_virtual_device_api,
        set_virtual_device_count,
        set_virtual_device_target_arch,
    )

    set_virtual_device_api("cuda")
    set_virtual_device_target_arch(target)
    set_virtual_device_count(1)
    from max.engine import InferenceSession

    from torch_max_backend.runtime.caches import cache

    began = time.perf_counter()
    session = InferenceSession(devices=[Accelerator()])
    session.compile(graphs(dtypes), custom_extensions=[cache.kernel_library_path()]).export_mef(str(path))
    print(f"compiled in {time.perf_counter() - began:.0f} s: {path}", flush=True)


class Bound:
    """A pass of a problem on given tensors (the kernels' layout)."""

    def __init__(self, loaded: dict[str, Any], pass_: str, tensors: dict[str, torch.Tensor], geometry: Any) -> None:
        from max.driver import Buffer

        first, second, third = OPERANDS[pass_]
        dtype = str(tensors["x"].dtype).removeprefix("torch.")
        self.model = loaded[f"{pass_}_{dtype}"]
        extents = dict(zip(("n", *"dhw", "c"), tensors["x"].shape, strict=True))
        extents |= dict(zip(("k", *"trs", "j"), tensors["w"].shape, strict=True))
        extents |= dict(zip("opq", tensors["y"].shape[1:4], strict=True))
        letters = {"x": "dhwc", "w": "trsj", "y": "opq"}[third]
        if pass_ == "wgrad":
            letters = "trsj"
        self.keep = [tensors[first], tensors[second], torch.as_tensor(geometry)]
        self.keep += [torch.zeros(extents[letter], dtype=torch.uint8) for letter in letters]
        self.buffers = [Buffer.from_dlpack(tensor) for tensor in self.keep]

    def __call__(self) -> torch.Tensor:
        return torch.from_dlpack(self.model._execute_device_tensors(self.buffers)[0])


def check(loaded: dict[str, Any], pattern: str) -> tuple[int, list[str]]:
    """How many results were compared, and what is wrong in words."""
    from tests.kernels.test_convolution import CASES
    from torch_max_backend.mojo_ops.convolution import Geometry

    wrong: list[str] = []
    count = 0
    for case in CASES:
        name = str(case.dtype).removeprefix("torch.")
        if f"fprop_{name}" not in loaded or not re.search(pattern, case.id):
            continue
        p = case.problem
        for tf32 in (False, True) if case.dtype == torch.float32 else (False,):
            own = Geometry(p.stride, p.padding, p.dilation, p.groups, case.workspace_limit, tf32)
            geometry = np.array(own.numbers())
            for whole in (True, False):
                make = (lambda shape: torch.randint(-2, 3, shape)) if whole else torch.randn
                host = case.inputs(make)
                expected = case.reference(host)
                tensors = dict(zip("xwy", (tensor.cuda() for tensor in host), strict=True))
                for pass_ in PASSES:
                    label = f"{pass_} {case.id} tf32={tf32} whole={whole}"
                    count += 1
                    poison()
                    try:
                        call = Bound(loaded, pass_, tensors, geometry)
                        got, again = call().cpu(), call().cpu()
                    except Exception as error:
                        wrong.append(f"{label}: {error}")
                        continue
                    if not torch.equal(got.view(torch.uint8), again.view(torch.uint8)):
                        wrong.append(f"{label}: two runs differ")
                    reference = expected[pass_]
                    if whole:
                        if not torch.equal(got, reference.to(got.dtype)):
                            wrong.append(f"{label}: {int((got != reference.to(got.dtype)).sum())} of {got.numel()}")
                        continue
                    narrow = torch.finfo(case.dtype).eps
                    length = case.reduction(pass_) + 4
                    # The partial sums of an extreme result are extreme too, and so is what their rounding adds up to.
                    wide = torch.finfo(torch.float32).eps
                    bound = (narrow + wide * math.sqrt(length)) * reference.abs() + 2 * wide * length
                    if tf32:
                        bound = bound + 4 * 2**-10 * math.sqrt(length)
                    error = (got.double() - reference).abs()
                    if not bool((error <= bound).all()):
                        wrong.append(f"{label}: {float((error / bound).max()):.3g} of the bound")
    return count, wrong


def poison() -> None:
    """Leaves NaN in the memory that the next result is likely to get."""
    from max.driver import Buffer

    for size in (2**10, 2**14, 2**18):
        buffer = Buffer.from_dlpack(torch.full((size,), float("nan"), device="cuda"))
        del buffer


class Timed:
    """One problem of the list in one dtype, on `sets` sets of inputs, or as many as exceed the cache."""

    def __init__(self, entry: dict[str, Any], kind: str, sets: int | None = None) -> None:
        from torch_max_backend.mojo_ops.convolution import Geometry
        from torch_max_backend.problems.convolution import ConvolutionProblem

        self.entry, self.kind = entry, kind
        self.problem = ConvolutionProblem.from_sizes(
            entry["n"], entry["c"], entry["k"], entry["size"], entry["filter"],
            stride=entry["stride"], padding=entry["padding"], groups=entry["groups"],
        )  # fmt: skip
        p = self.problem
        geometry = Geometry(p.stride, p.padding, p.dilation, p.groups, allow_tf32=kind == "float32")
        self.geometry = np.array(geometry.numbers())
        shapes = {
            "x": (p.n, *p.input_size, p.c),
            "w": (p.k, *p.filter_size, p.c // p.groups),
            "y": (p.n, *p.output_size, p.k),
        }
        dtype = DTYPES[kind]
        width = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        count = sets or max(2, min(8, math.ceil(3e8 / width)))
        self.sets = [
            {name: torch.randn(shape, device="cuda", dtype=dtype) for name, shape in shapes.items()}
            for _ in range(count)
        ]

    def ours(self, loaded: dict[str, Any], pass_: str) -> list[Callable[[], Any]]:
        return [Bound(loaded, pass_, tensors, self.geometry) for tensors in self.sets]

    def theirs(self, pass_: str, channels_last: bool) -> list[Callable[[], Any]]:
        p = self.problem
        rank = p.spatial_rank
        rest = (list(p.stride[3 - rank :]), list(p.padding[3 - rank :]), [1] * rank, False, [0] * rank, p.groups)

        def logical(tensor: torch.Tensor) -> torch.Tensor:
            n, *spatial, c = tensor.shape
            view = tensor.view(n, *spatial[3 - rank :], c).movedim(-1, 1)
            return view if channels_last else view.contiguous()

        def one(tensors: dict[str, torch.Tensor]) -> Callable[[], Any]:
            x, w, y = (logical(tensors[name]) for name in "xwy")
            if pass_ == "fprop":
                return lambda: torch.ops.aten.convolution(x, w, None, *rest)
            mask = [pass_ == "dgrad", pass_ == "wgrad", False]
            return lambda: torch.ops.aten.convolution_backward(y, x, w, None, *rest, mask)

        return [one(tensors) for tensors in self.sets]


def rows(loaded: dict[str, Any], pattern: str, runs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Times of the list's problems whose names match; after so many seconds no further problem is begun."""
    from benchmarks.kernels.launcher import on_stream
    from torch_max_backend.bench.timing import interleaved

    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    stop = time.perf_counter() + seconds
    for entry in problems.convolutions("any_gpu"):
        for kind in entry["dtypes"]:
            if time.perf_counter() > stop:
                print(f"left out: {entry['name']} {kind}", flush=True)
                continue
            name = str(DTYPES[kind]).removeprefix("torch.")
            if f"fprop_{name}" not in loaded or not re.search(pattern, f"{entry['name']} {kind}"):
                continue
            torch.backends.cudnn.allow_tf32 = kind != "exact"
            with torch.no_grad(), on_stream(device):
                timed = Timed(entry, kind)
                for pass_ in PASSES:
                    contenders: dict[str, Sequence[Callable[[], Any]]] = {"ours": timed.ours(loaded, pass_)}
                    contenders["channels_last"] = timed.theirs(pass_, True)
                    if kind in ("float32", "exact"):
                        contenders["default"] = timed.theirs(pass_, False)
                    times = interleaved(contenders, runs, device)
                    row = {"problem": entry["name"], "dtype": kind, "pass": pass_}
                    row |= {f"{name}_ms": round(value.median * 1e3, 4) for name, value in times.items()}
                    row["tflops"] = round(timed.problem.flops / times["ours"].median / 1e12, 1)
                    ratios = [row["ours_ms"] / row[f"{name}_ms"] for name in times if name != "ours"]
                    print(
                        f"{entry['name']:32} {kind:9} {pass_} {row['ours_ms']:8.4f} ms {row['tflops']:6.1f} TFLOP/s "
                        + " ".join(f"{ratio:6.2f}" for ratio in ratios),
                        flush=True,
                    )
                    yield row
            del timed
            torch.cuda.empty_cache()


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Our time over cuDNN's by kind of problem, dtype and pass: geometric mean and worst."""
    result = {}
    families = {"depthwise": "depthwise", "resnet50": "resnet50", "grouped and 3-d": "resnext|3-d"}
    for family, pattern in families.items():
        for kind in DTYPES:
            for pass_ in PASSES:
                for reference in ("channels_last", "default"):
                    ratios = [
                        row["ours_ms"] / row[f"{reference}_ms"]
                        for row in measured
                        if re.search(pattern, row["problem"])
                        and (row["dtype"], row["pass"]) == (kind, pass_)
                        and f"{reference}_ms" in row
                    ]
                    if ratios:
                        result[f"{family} {kind} {pass_} / {reference}"] = {
                            "geometric mean": round(statistics.geometric_mean(ratios), 3),
                            "worst": round(max(ratios), 3),
                            "problems": len(ratios),
                        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compile", type=Path, help="only compile, into this file")
    parser.add_argument("--target", default="sm_90a", help="with --compile: the GPU's architecture")
    parser.add_argument("--compiled", type=Path, help="take the graphs from this file")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="of the graphs")
    parser.add_argument("--problems", default="", help="regular expression over 'NAME DTYPE'")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem's times after so long")
    parser.add_argument("--cases", default="", help="regular expression over the names of the checks' problems")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--output", type=Path, help="the result file")
    options = parser.parse_args()
    dtypes = options.dtypes.split(",")
    if options.compile:
        compile_to(options.compile, options.target, dtypes)
        return 0
    began = time.perf_counter()
    seed = int(time.time())
    torch.manual_seed(seed)
    loaded = models(options.compiled, dtypes)
    print(f"ready after {time.perf_counter() - began:.0f} s, seed {seed}", flush=True)
    count, wrong = (0, []) if options.no_check else check(loaded, options.cases)
    for line in wrong:
        print("WRONG", line, flush=True)
    print(f"{count} results checked, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s", flush=True)
    measured = [] if options.no_time else list(rows(loaded, options.problems, options.runs, options.seconds))
    table = summary(measured)
    for name, values in table.items():
        print(f"{name:50} {values}", flush=True)
    if options.output:
        document = {
            **records.provenance(torch.device("cuda", 0)),
            "ratio": "our median over cuDNN's, in turns; channels_last is our layout, default PyTorch's",
            "seed": seed,
            "checked": count,
            "wrong": wrong,
            "summary": table,
            "rows": measured,
        }
        records.write(options.output, document)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
