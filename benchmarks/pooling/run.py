"""Checks the pooling kernels against PyTorch and times both, side by side in one process.

    python benchmarks/pooling/run.py --device cuda
    python benchmarks/pooling/run.py --device cpu --dtypes float32 --cases 'stem|vgg'

Every operation and dtype is one graph with symbolic sizes, all compiled together, so that the list costs one
compile. `floor` is the time in which this very device copies as many bytes as the operation must move once.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from max.driver import CPU, Accelerator, Buffer  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession, Model  # noqa: E402
from max.graph import DeviceRef, Graph, Module, TensorType, ops  # noqa: E402

from torch_max_backend.pooling_problem import PoolingProblem  # noqa: E402

PASSES = {"max": ("fprop", "dgrad", "dgrad_offsets"), "avg": ("fprop", "dgrad")}
DTYPES = {"float32": DType.float32, "bfloat16": DType.bfloat16, "float16": DType.float16}
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One line of cases.json: `input` holds the spatial extents, `n` the batch on a GPU, `cpu_n` on a CPU."""

    name: str
    op: str
    n: int
    cpu_n: int
    c: int
    input: list[int]
    kernel_size: int | list[int]
    stride: int | list[int]
    padding: int | list[int]
    dilation: int = 1
    ceil_mode: bool = False
    count_include_pad: bool = True

    def problem(self) -> PoolingProblem:
        return PoolingProblem.from_aten(
            self.input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.count_include_pad,
        )


@dataclass
class Row:
    """One measurement: milliseconds of a call, ours and ATen's, and the floor by bytes.

    Calls are the median of interleaved groups on a GPU and the least of interleaved calls on a CPU.
    """

    case: str
    kind: str
    layout: str
    dtype: str
    error: str | None
    ours_ms: float
    aten_ms: float
    floor_ms: float
    ours_kernel_ms: float | None = None
    aten_kernel_ms: float | None = None

    @property
    def speedup(self) -> float:
        ours, theirs = self.best()
        return theirs / ours

    def best(self) -> tuple[float, float]:
        """Time on the device alone where a profiler saw both sides, else the time of a call."""
        if self.ours_kernel_ms and self.aten_kernel_ms:
            return self.ours_kernel_ms, self.aten_kernel_ms
        return self.ours_ms, self.aten_ms


def build_graphs(dtypes: list[str], kinds: set[str], device: DeviceRef, kernels: Path) -> Module:
    """One graph for each operation and dtype, all sizes symbolic.

    An output's symbolic extents must appear in some input: `extents` are byte vectors as long as what they stand for.
    """
    module = Module()
    host = DeviceRef.CPU()
    geometry = TensorType(DType.int64, (15,), host)
    extents = [TensorType(DType.uint8, (name,), host) for name in ("e0", "e1", "e2")]
    given, made = ("n", "d", "h", "w", "c"), ("n", "e0", "e1", "e2", "c")
    for dtype in dtypes:
        x, y = TensorType(DTYPES[dtype], given, device), TensorType(DTYPES[dtype], made, device)
        indices, offsets = DType.int64, DType.uint8
        signatures = {
            "max_fprop": ("max_pool_fprop", [x], [y, TensorType(indices, made, device)]),
            "max_fprop_offsets": ("max_pool_fprop_offsets", [x], [y, TensorType(offsets, made, device)]),
            "max_dgrad": ("max_pool_dgrad", [x, TensorType(indices, given, device)], [y]),
            "max_dgrad_offsets": ("max_pool_dgrad_offsets", [x, TensorType(offsets, given, device)], [y]),
            "avg_fprop": ("avg_pool_fprop", [x], [y]),
            "avg_dgrad": ("avg_pool_dgrad", [x], [y]),
        }
        for kind, (op, inputs, outputs) in signatures.items():
            if kind not in kinds:
                continue
            with Graph(
                f"{kind}_{dtype}",
                input_types=[*inputs, geometry, *extents],
                module=module,
                custom_extensions=[kernels],
            ) as graph:
                operands = [value.tensor for value in graph.inputs[: len(inputs) + 1]]
                graph.output(*ops.custom(op, device, operands, outputs))
    return module


class Runner:
    """Executes one compiled graph on torch tensors."""

    def __init__(self, model: Model, tensors: list[torch.Tensor], problem: PoolingProblem, made: str) -> None:
        extents = problem.output if made == "output" else problem.input
        self.model = model
        self.keep = tensors
        host = [torch.from_numpy(problem.geometry()), *(torch.zeros(e, dtype=torch.uint8) for e in extents)]
        self.buffers = [Buffer.from_dlpack(t) for t in [*tensors, *host]]

    def __call__(self) -> list[Any]:
        return self.model.execute(*self.buffers)

    def tensors(self) -> list[torch.Tensor]:
        return [torch.from_dlpack(result) for result in self()]


def to_physical(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The kernels' [N, D, H, W, C] view of a logical NC... tensor; a copy only where the strides ask for one."""
    while t.dim() < 5:
        t = t.unsqueeze(2)
    if layout == "channels_last":
        return t.permute(0, 2, 3, 4, 1).contiguous()
    n, c, d, h, w = t.shape
    return t.contiguous().view(n * c, d, h, w, 1)


def to_logical(t: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels_last":
        t = t.permute(0, 4, 1, 2, 3)
    return t.reshape(like.shape)


def aten_calls(case: Case, rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """ATen's forward and backward of the case with everything bound but the tensors; 1-D runs as 2-D."""
    problem = case.problem()
    axes = max(rank, 2)
    k, s, p, d = (list(v[3 - axes :]) for v in (problem.window, problem.stride, problem.padding, problem.dilation))
    if case.op == "max":
        forward = aten.max_pool3d_with_indices if axes == 3 else aten.max_pool2d_with_indices
        backward = aten.max_pool3d_with_indices_backward if axes == 3 else aten.max_pool2d_with_indices_backward
        return (
            lambda x: forward(x, k, s, p, d, case.ceil_mode),
            lambda dy, x, indices: backward(dy, x, k, s, p, d, case.ceil_mode, indices),
        )
    forward = aten.avg_pool3d if axes == 3 else aten.avg_pool2d
    backward = aten.avg_pool3d_backward if axes == 3 else aten.avg_pool2d_backward
    tail = (case.ceil_mode, case.count_include_pad, None)
    return (lambda x: forward(x, k, s, p, *tail), lambda dy, x: backward(dy, x, k, s, p, *tail))


def difference(ours: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None where `ours` is `expected` up to the rounding of its dtype, else what is wrong."""
    if not ours.dtype.is_floating_point:
        wrong = int((ours != expected).sum())
        return f"{wrong} of {ours.numel()} indices differ" if wrong else None
    rtol = max(torch.finfo(ours.dtype).eps, 4e-6)
    error = (ours.float() - expected.float()).abs()
    bound = rtol * (expected.float().abs() + expected.float().abs().mean()) + 1e-30
    worst = (error / bound).max().item() if ours.numel() else 0.0
    return None if worst <= 1 else f"error {worst:.3g} times the tolerance, at most {error.max().item():.3g}"


class Clock:
    """Interleaved timing of two calls; on a GPU with events around groups of calls and, once, with a profiler."""

    def __init__(self, device: str, profile: bool) -> None:
        self.cuda = device == "cuda"
        self.profile = profile and self.cuda

    def once(self, call: Callable[[], Any], repeats: int) -> float:
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) * 1e3 / repeats
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            result = call()
        if isinstance(result, list):  # MAX's results: the hand-over makes PyTorch's stream wait for them
            torch.from_dlpack(result[0])
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / repeats

    def pair(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
        estimate = max(self.once(call, 1) for call in (ours, theirs, ours, theirs))
        budget, rounds, most = (10.0, 5, 20) if self.cuda else (100.0, 8, 50)
        repeats = max(1, min(most, int(budget / max(estimate, 1e-3))))
        if not self.cuda:  # the least of many calls: what else runs on the machine only ever adds
            calls = [(self.once(ours, 1), self.once(theirs, 1)) for _ in range(max(2 * repeats, rounds))]
            return min(c[0] for c in calls), min(c[1] for c in calls)
        times = [(self.once(ours, repeats), self.once(theirs, repeats)) for _ in range(rounds)]
        return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

    def kernels(self, call: Callable[[], Any], calls: int = 4) -> float | None:
        """Milliseconds that the device works for one call, as the profiler sees it; None where it sees nothing."""
        if not self.profile:
            return None
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
            total = sum(event.device_time_total for event in profiler.events() if "CUDA" in str(event.device_type))
        except (RuntimeError, AttributeError) as error:
            print(f"no kernel times: {error}", file=sys.stderr)
            self.profile = False
            return None
        return total / calls / 1e3 or None


def copy_bandwidth(device: str, clock: Clock) -> float:
    """Bytes read and written a second by a large copy."""
    size = 2**31 if device == "cuda" else 2**28
    source = torch.empty(size // 4, device=device).fill_(1.0)
    target = torch.empty_like(source)
    ms = min(clock.once(lambda: target.copy_(source), 3) for _ in range(5))
    return 2 * size / (ms / 1e3)


def measure(
    case: Case,
    layout: str,
    dtype: str,
    device: str,
    models: dict[str, Model],
    clock: Clock,
    bandwidth: float,
    kinds: set[str],
) -> list[Row]:
    problem = case.problem()
    rank = max(problem.rank, 2)
    forward, backward = aten_calls(case, problem.rank)
    memory_format = torch.contiguous_format
    if layout == "channels_last":
        memory_format = torch.channels_last if rank == 2 else torch.channels_last_3d
    batch = case.n if device == "cuda" else case.cpu_n
    shape = (batch, case.c, *problem.input[3 - rank :])
    x = torch.randn(shape, device=device).to(getattr(torch, dtype)).to(memory_format=memory_format)
    plain = x.contiguous()
    wanted = forward(plain)
    y, indices = wanted if case.op == "max" else (wanted, None)
    dy = torch.randn(y.shape, device=device).to(x.dtype).to(memory_format=memory_format)
    rows = []
    for passing in PASSES[case.op]:
        kind = f"{case.op}_{passing}"
        if kind not in kinds:
            continue
        model = models[f"{kind}_{dtype}"]
        if passing == "fprop":
            ours = Runner(model, [to_physical(x, layout)], problem, "output")
            expected = [y] if case.op == "avg" else [y, indices]
            if case.op == "avg":  # in float32: ATen may add up in the storage type
                expected = [forward(plain.float())]
            theirs: Callable[[], Any] = lambda: forward(x)  # noqa: E731
            moved = (x.numel() + y.numel()) * x.element_size() + (y.numel() * 8 if case.op == "max" else 0)
        else:
            tensors = [to_physical(dy, layout)]
            moved = (x.numel() + y.numel()) * x.element_size()
            if case.op == "max":
                stored = indices.to(memory_format=memory_format)
                theirs = lambda stored=stored: backward(dy, x, stored)  # noqa: E731
                expected = [backward(dy.contiguous().float(), plain.float(), indices)]
                if passing == "dgrad_offsets":
                    if problem.offset_bits != 8:
                        continue
                    small = Runner(models[f"max_fprop_offsets_{dtype}"], [to_physical(x, layout)], problem, "output")
                    tensors.append(small.tensors()[1].clone())
                    moved += y.numel()
                else:
                    tensors.append(to_physical(stored, layout))
                    moved += y.numel() * 8
            else:
                theirs = lambda: backward(dy, x)  # noqa: E731
                expected = [backward(dy.contiguous().float(), plain.float())]
            ours = Runner(model, tensors, problem, "input")
        if device == "cuda":
            torch.cuda.synchronize()
        errors = [
            difference(to_logical(got, want, layout), want) for got, want in zip(ours.tensors(), expected, strict=True)
        ]
        del expected
        ours_ms, aten_ms = clock.pair(ours, theirs)
        rows.append(
            Row(
                case.name,
                kind,
                layout,
                dtype,
                "; ".join(e for e in errors if e) or None,
                ours_ms,
                aten_ms,
                moved / bandwidth * 1e3,
                clock.kernels(ours),
                clock.kernels(theirs),
            )
        )
    return rows


def report(row: Row) -> str:
    ours, theirs = row.best()
    return (
        f"{row.case:20} {row.kind:18} {row.layout:13} {row.dtype:8} "
        f"ours {ours:9.4f}  aten {theirs:9.4f}  floor {row.floor_ms:8.4f}  "
        f"{theirs / ours:6.2f}x aten  {ours / row.floor_ms:6.2f}x floor"
        f"{'  call ' + format(row.ours_ms, '.3f') if row.ours_kernel_ms else ''}"
        f"{'  WRONG: ' + row.error if row.error else ''}"
    )


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of " + ", ".join(DTYPES))
    parser.add_argument("--layouts", default="contiguous,channels_last")
    parser.add_argument("--cases", default="", help="regular expression that a case's name must match")
    parser.add_argument("--kinds", default="", help="regular expression, for example 'dgrad'")
    parser.add_argument("--kernels", type=Path, default=ROOT / "kernels", help="Mojo package or .mojoc")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no new case after so long")
    parser.add_argument("--no-profile", action="store_true", help="time calls only, not kernels")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()

    began = time.perf_counter()
    listed = json.loads((Path(__file__).parent / "cases.json").read_text())
    cases = [case for case in (Case(**line) for line in listed) if re.search(args.cases, case.name)]
    dtypes = args.dtypes.split(",")
    kinds = {f"{op}_{p}" for op in {case.op for case in cases} for p in PASSES[op]}
    kinds = {kind for kind in kinds if re.search(args.kinds, kind)}
    needed = kinds | ({"max_fprop_offsets"} if "max_dgrad_offsets" in kinds else set())

    torch.manual_seed(0)
    cuda = args.device == "cuda"
    session = InferenceSession(devices=[Accelerator() if cuda else CPU()])
    module = build_graphs(dtypes, needed, DeviceRef.GPU() if cuda else DeviceRef.CPU(), args.kernels)
    models = session.load_all(module, custom_extensions=[args.kernels])
    print(f"{len(models)} graphs compiled in {time.perf_counter() - began:.1f} s", flush=True)

    clock = Clock(args.device, not args.no_profile)
    bandwidth = copy_bandwidth(args.device, clock)
    print(f"{hardware(args.device)}: copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows: list[Row] = []
    left_out = []
    for case in cases:
        for dtype in dtypes:
            for layout in args.layouts.split(","):
                if time.perf_counter() - began > args.seconds:
                    left_out.append(f"{case.name} {dtype} {layout}")
                    continue
                for row in measure(case, layout, dtype, args.device, models, clock, bandwidth, kinds):
                    rows.append(row)
                    print(report(row), flush=True)
    for kind in sorted(kinds):
        mine = [row for row in rows if row.kind == kind]
        if mine:
            speedups = [row.speedup for row in mine]
            floors = [row.best()[0] / row.floor_ms for row in mine]
            print(
                f"{kind:18} {len(mine):4} rows: {statistics.geometric_mean(speedups):.2f}x ATen "
                f"(least {min(speedups):.2f}), {statistics.geometric_mean(floors):.2f}x floor (most {max(floors):.2f})"
            )
    wrong = [row for row in rows if row.error]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s")
    if left_out:
        print(f"not run for lack of time: {', '.join(left_out)}")
    if args.output:
        document = {
            "hardware": hardware(args.device),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"torch": torch.__version__, "max": version("max"), "python": platform.python_version()},
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
            "not_run": left_out,
            "rows": [asdict(row) for row in rows],
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
