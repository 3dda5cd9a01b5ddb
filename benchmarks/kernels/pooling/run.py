"""Checks the pooling kernels against PyTorch and times both, side by side in one process.

    python -m benchmarks pooling.run --device cuda
    python -m benchmarks pooling.run --device cpu --dtypes float32 --cases 'stem|vgg'

Every operation and dtype is one graph with symbolic sizes, all compiled together, so that the list costs one
compile. `--export FILE --target sm_90a` makes that compile where there is no GPU and `--compiled FILE` uses it. Times
are those of `torch-max-backend bench`: interleaved, on inputs that the cache does not hold, device time alone on a
GPU. There each is taken twice: of single calls between two events, and of calls queued one behind the other, as a
training step does, each on other inputs. `floor` is the time in which this very device copies as many bytes as the
operation must move once.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine import read as read_artifact
from max.graph import DeviceRef, Graph, Module, TensorType

from benchmarks import records
from benchmarks.kernels import problems
from benchmarks.kernels.launcher import on_stream
from torch_max_backend.bench import memory
from torch_max_backend.bench.ceilings import copy_rate
from torch_max_backend.bench.timing import interleaved, set_count
from torch_max_backend.mojo_ops.pooling import pool_op
from torch_max_backend.problems.pooling import NUMBERS, PoolingProblem
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.engine.execution import execute

PASSES = {"max": ("fprop", "dgrad", "dgrad_offsets"), "avg": ("fprop", "dgrad")}
ROW_SECONDS = 20e-3
MAX_IN_A_ROW = 128
MAX_COPIED = 16
QUEUED = 8
#: Between rounds so many bytes at most stay taken, so that the next round's tensors come to lie elsewhere.
MAX_HELD = 2**24
DTYPES = {"float32": DType.float32, "bfloat16": DType.bfloat16, "float16": DType.float16}
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One line of problems.json: `input` holds the spatial extents, `n` the batch on a GPU, `cpu_n` on a CPU."""

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


@dataclass(frozen=True)
class Queued:
    """Medians in milliseconds of one of QUEUED calls."""

    ours_ms: float
    aten_ms: float
    copy_ms: float


@dataclass
class Row:
    """One measurement: the medians of interleaved runs in milliseconds, ours and ATen's, and the floor by bytes.

    `copy_ms`, on a GPU, is a copy that moves as many bytes: what starting and ending take is no part of the floor.
    `queued`, on a GPU: the same three for each of QUEUED calls one behind the other; between the events of a single
    call lie some microseconds in which it does not run.
    """

    case: str
    kind: str
    layout: str
    dtype: str
    error: str | None
    ours_ms: float
    aten_ms: float
    floor_ms: float
    bytes: int
    copy_ms: float | None = None
    queued: Queued | None = None

    @property
    def speedup(self) -> float:
        return self.aten_ms / self.ours_ms

    @property
    def over_floor(self) -> float:
        return self.ours_ms / self.floor_ms

    @property
    def queued_over_floor(self) -> float:
        return (self.queued or self).ours_ms / self.floor_ms


def build_graphs(dtypes: list[str], kinds: set[str], device: DeviceRef, kernels: Path) -> Module:
    """One graph for each operation and dtype, all sizes symbolic.

    An output's symbolic extents must appear in some input: `extents` are byte vectors as long as what they stand for.
    """
    module = Module()
    host = DeviceRef.CPU()
    numbers = TensorType(DType.int64, (len(NUMBERS),), host)
    extents = [TensorType(DType.uint8, (name,), host) for name in ("e0", "e1", "e2")]
    given, made = ("n", "d", "h", "w", "c"), ("n", "e0", "e1", "e2", "c")
    for dtype in dtypes:
        x, y = TensorType(DTYPES[dtype], given, device), TensorType(DTYPES[dtype], made, device)
        indices, offsets = DType.int64, DType.uint8
        signatures = {
            "max_fprop": ("max_pool_fprop", [x], [y, TensorType(indices, made, device)]),
            "max_fprop_offsets": ("max_pool_fprop", [x], [y, TensorType(offsets, made, device)]),
            "max_dgrad": ("max_pool_dgrad", [x, TensorType(indices, given, device)], [y]),
            "max_dgrad_offsets": ("max_pool_dgrad", [x, TensorType(offsets, given, device)], [y]),
            "avg_fprop": ("avg_pool_fprop", [x], [y]),
            "avg_dgrad": ("avg_pool_dgrad", [x], [y]),
        }
        for kind, (op, inputs, outputs) in signatures.items():
            if kind not in kinds:
                continue
            with Graph(
                f"{kind}_{dtype}",
                input_types=[*inputs, numbers, *extents],
                module=module,
                custom_extensions=[kernels],
            ) as graph:
                operands = [value.tensor for value in graph.inputs[: len(inputs) + 1]]
                graph.output(*pool_op(op, operands[:-1], outputs, operands[-1]))
    return module


def bound(
    model: Model, tensors: list[torch.Tensor], problem: PoolingProblem, made: str
) -> Callable[[], list[torch.Tensor]]:
    """A call of a compiled graph on tensors of the kernels' shape."""
    extents = problem.output if made == "output" else problem.input
    host = [torch.tensor(problem.numbers()), *(torch.zeros(e, dtype=torch.uint8) for e in extents)]
    buffers = [Buffer.from_dlpack(t) for t in [*tensors, *host]]
    return lambda: [torch.from_dlpack(result) for result in execute(model, buffers)]


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


def difference(ours: torch.Tensor, expected: torch.Tensor, length: int) -> str | None:
    """None where `ours` is `expected` up to the rounding of its dtype and of a sum of `length`, else what is wrong."""
    if not ours.dtype.is_floating_point:
        wrong = int((ours != expected).sum())
        return f"{wrong} of {ours.numel()} indices differ" if wrong else None
    rtol = max(torch.finfo(ours.dtype).eps, 4e-6)
    error = (ours.to(expected.dtype) - expected).abs()
    # Addends are of size one, partial sums may be much larger than what remains.
    bound = rtol * (expected.abs() + expected.abs().mean()) + 2 * torch.finfo(torch.float32).eps * length
    worst = (error / bound).max().item() if ours.numel() else 0.0
    return None if worst <= 1 else f"error {worst:.3g} times the tolerance, at most {error.max().item():.3g}"


@dataclass(frozen=True)
class Setting:
    """What all rows share: the device, its copy rate in bytes a second, the compiled graphs, how to time."""

    device: torch.device
    models: dict[str, Model]
    bandwidth: float
    runs: int
    kinds: frozenset[str]
    generator: torch.Generator


def calls_in_a_row(call: Callable[[], Any]) -> int:
    """How many calls to time as one on a CPU, where single calls of a quarter of a millisecond scatter."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return max(1, min(MAX_IN_A_ROW, round(ROW_SECONDS / min(seconds))))


def in_rows(calls: list[Callable[[], Any]], row: int) -> list[Callable[[], Any]]:
    """Calls that make `row` of the given calls each, going round the input sets."""

    def start_at(first: int) -> Callable[[], None]:
        def make() -> None:
            for place in range(row):
                calls[(first + place) % len(calls)]()

        return make

    return [start_at(first) for first in range(0, len(calls), row)]


def one_behind_another(calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Calls that make QUEUED of the given calls each, and keep all results: a tensor that is written again while the
    cache still holds it would cost the memory nothing."""

    def start_at(first: int) -> Callable[[], list[Any]]:
        return lambda: [calls[(first + place) % len(calls)]() for place in range(QUEUED)]

    return [start_at(first) for first in range(len(calls))]


def copies(moved: int, count: int, device: torch.device) -> list[Callable[[], Any]]:
    """Copies of `count` tensors of random bits, each moving `moved` bytes, read and written together."""
    length = max(moved // 8, 1)
    sources = [torch.randint(0, 2**31 - 1, (length,), dtype=torch.int32, device=device) for _ in range(count)]
    return [source.clone for source in sources]


@dataclass(frozen=True)
class _Operands:
    """What one pass reads, what it must return, and how ATen computes it.

    Attributes:
        tensors: what the kernel and ATen read.
        expected: what must come out.
        moved: bytes that must be moved once.
        made: whether the kernel's result has the extents of the "output" or of the "input".
        aten: the same by ATen.
    """

    tensors: list[torch.Tensor]
    expected: list[torch.Tensor]
    moved: int
    made: str
    aten: Callable[..., Any]


def _operands(case: Case, passing: str, x: torch.Tensor, make: Callable[[tuple[int, ...]], torch.Tensor]) -> _Operands:
    """Of one pass over ``x``; ``make`` draws a tensor of a shape in the memory format that is measured."""
    forward, backward = aten_calls(case, case.problem().rank)
    plain = x.contiguous()
    wanted = forward(plain)
    y, indices = wanted if case.op == "max" else (wanted, None)
    # ATen adds up in the storage type, and on a GPU in any order.
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    moved = (x.numel() + y.numel()) * x.element_size()
    if passing == "fprop":
        expected = [y, indices] if case.op == "max" else [forward(plain.to(wide))]
        return _Operands([x], expected, moved + (y.numel() * 8 if case.op == "max" else 0), "output", forward)
    dy = make(tuple(y.shape))
    given = (dy.contiguous().to(wide), plain.to(wide))
    if case.op == "avg":
        return _Operands([dy], [backward(*given)], moved, "input", lambda dy: backward(dy, x))
    stored = torch.empty_like(dy, dtype=torch.int64).copy_(indices)
    moved += y.numel() * (1 if passing == "dgrad_offsets" else 8)
    return _Operands(
        [dy, stored], [backward(*given, indices)], moved, "input", lambda dy, stored: backward(dy, x, stored)
    )


def _times(
    ours: list[Callable[[], Any]], aten: list[Callable[[], Any]], moved: int, setting: Setting
) -> tuple[dict[str, float], Queued | None]:
    """Milliseconds of a call of "ours", "aten" and, on a GPU, a "copy"; there also of queued calls."""
    contenders, device, row, in_queue = {"ours": ours, "aten": aten}, setting.device, 1, None
    if device.type == "cuda":
        contenders["copy"] = copies(moved, min(len(ours), MAX_COPIED), device)
        behind = {name: one_behind_another(calls) for name, calls in contenders.items()}
        each = interleaved(behind, setting.runs, device, QUEUED)
        in_queue = Queued(*(each[name].median * 1e3 / QUEUED for name in ("ours", "aten", "copy")))
    else:
        row = calls_in_a_row(aten[0])
        contenders = {name: in_rows(calls, row) for name, calls in contenders.items()}
    times = interleaved(contenders, setting.runs, device)
    return {name: each.median * 1e3 / row for name, each in times.items()}, in_queue


def _measured(case: Case, passing: str, x: torch.Tensor, operands: _Operands, layout: str, setting: Setting) -> Row:
    """One pass: checked, then timed."""
    problem, device = case.problem(), setting.device
    kind, dtype = f"{case.op}_{passing}", str(x.dtype).removeprefix("torch.")
    count = set_count(operands.moved, memory.cache_bytes(device), min(memory.available_bytes(device), 2**31))
    tensors = operands.tensors
    sets = [tensors, *([t.clone(memory_format=torch.preserve_format) for t in tensors] for _ in range(count - 1))]
    ours = []
    for each in sets:
        shown = [to_physical(t, layout) for t in each]
        if passing == "dgrad_offsets":
            small = bound(setting.models[f"max_fprop_offsets_{dtype}"], [to_physical(x, layout)], problem, "output")
            shown[1] = small()[1].clone()
        ours.append(bound(setting.models[f"{kind}_{dtype}"], shown, problem, operands.made))
    errors = [
        difference(to_logical(got, want, layout), want, max(problem.windows_above, problem.window_size))
        for got, want in zip(ours[0](), operands.expected, strict=True)
    ]
    operands.expected.clear()
    aten = [lambda given=given: operands.aten(*given) for given in sets]
    times, in_queue = _times(ours, aten, operands.moved, setting)
    return Row(
        case.name,
        kind,
        layout,
        dtype,
        "; ".join(e for e in errors if e) or None,
        times["ours"],
        times["aten"],
        operands.moved / setting.bandwidth * 1e3,
        operands.moved,
        times.get("copy"),
        in_queue,
    )


def measure(case: Case, layout: str, dtype: str, setting: Setting) -> list[Row]:
    """Every pass of one case in one layout and dtype."""
    problem, device = case.problem(), setting.device
    rank = max(problem.rank, 2)
    memory_format = torch.contiguous_format
    if layout == "channels_last":
        memory_format = torch.channels_last if rank == 2 else torch.channels_last_3d

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, device=device, generator=setting.generator).to(getattr(torch, dtype))
        return values.to(memory_format=memory_format)

    x = random((case.n if device.type == "cuda" else case.cpu_n, case.c, *problem.input[3 - rank :]))
    return [
        _measured(case, passing, x, _operands(case, passing, x, random), layout, setting)
        for passing in PASSES[case.op]
        if f"{case.op}_{passing}" in setting.kinds and (passing != "dgrad_offsets" or problem.has_byte_offsets)
    ]


def measure_rounds(case: Case, layout: str, dtype: str, setting: Setting, rounds: int) -> list[Row]:
    """Measures with tensors in other places each round: medians of the rounds' medians.

    On a CPU the same kernel may take twice as long in one place as in another, as long as its tensors stay there.
    """
    measured, held = [], []
    for _ in range(rounds):
        if measured:
            size = int(torch.randint(MAX_HELD, (), generator=setting.generator, device=setting.device))
            held.append(torch.empty(size, dtype=torch.uint8, device=setting.device))
        measured.append(measure(case, layout, dtype, setting))
    rows = []
    for same in zip(*measured, strict=True):
        copied = [row.copy_ms for row in same if row.copy_ms is not None]
        rows.append(
            replace(
                same[0],
                error="; ".join(sorted({row.error for row in same if row.error})) or None,
                ours_ms=statistics.median(row.ours_ms for row in same),
                aten_ms=statistics.median(row.aten_ms for row in same),
                copy_ms=statistics.median(copied) if copied else None,
                queued=median_of([row.queued for row in same if row.queued is not None]),
            )
        )
    return rows


def median_of(rounds: list[Queued]) -> Queued | None:
    if not rounds:
        return None
    return Queued(*(statistics.median(getattr(one, field.name) for one in rounds) for field in fields(Queued)))


def line_of(row: Row) -> str:
    return (
        f"{row.case:20} {row.kind:18} {row.layout:13} {row.dtype:8} "
        f"ours {row.ours_ms:9.4f}  aten {row.aten_ms:9.4f}  floor {row.floor_ms:8.4f}  "
        f"{row.speedup:6.2f}x aten  {row.over_floor:6.2f}x floor"
        f"{f', queued {row.queued_over_floor:.2f}x' if row.queued else ''}"
        f"{'  WRONG: ' + row.error if row.error else ''}"
    )


def summary(rows: list[Row], cache_bytes: int) -> list[str]:
    """For each kind: geometric means and worst rows; distance from the floor where the bytes exceed the cache."""
    lines = []
    for kind in sorted({row.kind for row in rows}):
        mine = [row for row in rows if row.kind == kind]
        large = [row for row in mine if row.bytes > cache_bytes] or mine
        slowest = min(mine, key=lambda row: row.speedup)
        farthest = max(large, key=lambda row: row.over_floor)
        close = sum(row.over_floor <= 1.3 for row in large)
        queued = sum(row.queued_over_floor <= 1.3 for row in large)
        lines.append(
            f"{kind:18} {len(mine):4} rows: {statistics.geometric_mean(row.speedup for row in mine):.2f}x ATen (least "
            f"{slowest.speedup:.2f}, {slowest.case} {slowest.layout} {slowest.dtype}); {len(large)} above the cache: "
            f"{statistics.geometric_mean(row.over_floor for row in large):.2f}x floor, {close} within 1.3 "
            f"{f'({queued} queued) ' if mine[0].queued else ''}(most "
            f"{farthest.over_floor:.2f}, {farthest.case} {farthest.layout} {farthest.dtype})"
        )
    return lines


def load_models(args: argparse.Namespace, kinds: set[str], dtypes: list[str]) -> dict[str, Model]:
    """The graphs, compiled here or elsewhere; with `--export` it ends the process once they are written."""
    cuda = args.device == "cuda"
    if args.export and args.target:
        from max.driver import set_virtual_device_api, set_virtual_device_count, set_virtual_device_target_arch

        set_virtual_device_api("cuda")
        set_virtual_device_target_arch(args.target)
        set_virtual_device_count(1)
    device: Device = Accelerator() if cuda else CPU()
    session = InferenceSession(devices=[device])
    # Building the graphs names the kernels that a compiled file needs, too.
    module = build_graphs(dtypes, kinds, DeviceRef.GPU() if cuda else DeviceRef.CPU(), args.kernels)
    if args.compiled:
        with libraries.ready(torch.device(args.device)):
            return session.init_all(read_artifact(args.compiled))
    if args.export:
        session.compile(module, custom_extensions=[args.kernels]).export_mef(args.export)
        raise SystemExit(0)
    with libraries.ready(torch.device(args.device)):
        return session.load_all(module, custom_extensions=[args.kernels])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of " + ", ".join(DTYPES))
    parser.add_argument("--layouts", default="contiguous,channels_last")
    parser.add_argument("--cases", default="", help="regular expression that a case's name must match")
    parser.add_argument("--kinds", default="", help="regular expression, for example 'dgrad'")
    parser.add_argument("--kernels", type=Path, help="Mojo package with other ops of the same names")
    parser.add_argument("--export", type=Path, help="write the compiled graphs here and end")
    parser.add_argument("--target", help="with --export: compile for this GPU architecture, though there is none here")
    parser.add_argument("--compiled", type=Path, help="graphs that --export wrote, of the same kinds and dtypes")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each side in a round")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure, with tensors in other places")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no new case after so long")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()
    args.kernels = args.kernels or cache.kernel_library_path()

    began = time.perf_counter()
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: expected at least 1")
    cases = [Case(**line) for line in problems.poolings(args.cases)]
    dtypes = args.dtypes.split(",")
    kinds = {f"{op}_{p}" for op in {case.op for case in cases} for p in PASSES[op]}
    kinds = {kind for kind in kinds if re.search(args.kinds, kind)}
    needed = kinds | ({"max_fprop_offsets"} if "max_dgrad_offsets" in kinds else set())
    models = load_models(args, needed, dtypes)
    print(f"{len(models)} graphs ready in {time.perf_counter() - began:.1f} s", flush=True)

    device = torch.device(args.device)
    rows: list[Row] = []
    left_out = []
    with torch.no_grad(), on_stream(device):
        generator = torch.Generator(device).manual_seed(0)
        setting = Setting(device, models, copy_rate(device), args.runs, frozenset(kinds), generator)
        print(f"{records.hardware(device)}: copy {setting.bandwidth / 1e9:.0f} GB/s", flush=True)
        for case in cases:
            for dtype in dtypes:
                for layout in args.layouts.split(","):
                    if time.perf_counter() - began > args.seconds:
                        left_out.append(f"{case.name} {dtype} {layout}")
                        continue
                    for row in measure_rounds(case, layout, dtype, setting, args.rounds):
                        rows.append(row)
                        print(line_of(row), flush=True)
    if rows:
        print("\n".join(summary(rows, memory.cache_bytes(device))))
    wrong = [row for row in rows if row.error]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s")
    if left_out:
        print(f"not run for lack of time: {', '.join(left_out)}")
    if args.output:
        document = {
            **records.provenance(device),
            "copy_gb_per_s": round(setting.bandwidth / 1e9, 1),
            "rounds": args.rounds,
            "not_run": left_out,
            "rows": [asdict(row) for row in rows],
        }
        records.write(args.output, document)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
