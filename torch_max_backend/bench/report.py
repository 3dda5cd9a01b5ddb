"""What a benchmark prints and writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torch_max_backend.bench import results as result_files
from torch_max_backend.bench.ceilings import Ceilings
from torch_max_backend.bench.runner import CaseResult
from torch_max_backend.checked import beartype


@beartype
def descriptions(task: Any) -> list[str]:
    """One line for each tensor: rank, lengths and strides in elements, in Composable Kernel's form."""
    lines = []
    for label, lengths in task.operands.items():
        strides = _strides(lengths, task.layout == "contiguous")
        lines.append(f"{label}: dim {len(lengths)}, lengths {_braces(lengths)}, strides {_braces(strides)}")
    return lines


@beartype
def figures(result: CaseResult, rates: Ceilings | None) -> list[str]:
    """The Perf line and what stands beside it."""
    lines = []
    if result.verification is not None:
        check = result.verification
        how = "exact equality" if check.exact else f"{check.excess:.3g} of the tolerance"
        verdict = "passed" if check.passed else "FAILED"
        lines.append(
            f"Verify: {verdict}, against float64: max error {check.error:.3g}, relative {check.relative:.3g}, {how}"
        )
    if result.times is None:
        return lines
    lines.append(f"Perf: {_ms(result.times.median)} ms, {result.tflops:.6g} TFlops, {result.gb_per_s:.6g} GB/s")
    spread = result.times.spread
    if result.floor is not None and rates is not None:
        floor = result.floor
        lines.append(
            f"Floor: {_ms(floor.seconds)} ms by {floor.bound}, reached to {result.floor_fraction:.1%} "
            f"({result.task.flops / 1e9:.6g} GFlop at {rates.flops_per_second / 1e12:.4g} TFlops: "
            f"{_ms(floor.flop_seconds) if result.task.arithmetic else 'no matmul'}"
            f"{' ms' if result.task.arithmetic else ''}; "
            f"{result.task.moved / 1e9:.6g} GB at {rates.bytes_per_second / 1e9:.4g} GB/s: "
            f"{_ms(floor.byte_seconds)} ms)"
        )
    if result.torch_times is not None:
        lines.append(
            f"PyTorch: {_ms(result.torch_times.median)} ms, ratio {result.ratio:.4g} (our time over PyTorch's)"
        )
    if result.torch_error is not None:
        lines.append(f"PyTorch: cannot run it: {result.torch_error}")
    lines.append(f"Runs: {len(result.times.seconds)}, quartiles {spread:.1%} of the median apart")
    return lines


@beartype
def print_table(results: Sequence[CaseResult], title: str, console: Console | None = None) -> None:
    """All cases as a table, then the geometric means."""
    compared = any(result.torch_times or result.torch_error for result in results)
    timed = any(result.times for result in results)
    table = Table(title=title)
    table.add_column("case")
    for column in (*(("ms", "TFlops", "GB/s", "floor ms", "of floor") if timed else ()),):
        table.add_column(column, justify="right")
    for column in (*(("PyTorch ms", "ratio") if compared else ()),):
        table.add_column(column, justify="right")
    verified = any(result.verification for result in results)
    if verified:
        table.add_column("verify")
    for result in results:
        row = [result.task.name]
        if timed and result.times and result.floor:
            row += [
                _ms(result.times.median),
                f"{result.tflops:.4g}",
                f"{result.gb_per_s:.4g}",
                _ms(result.floor.seconds),
                f"{result.floor_fraction:.0%}",
            ]
        if compared:
            row += [_ms(result.torch_times.median), f"{result.ratio:.3f}"] if result.torch_times else ["none", ""]
        if verified and result.verification:
            row.append("passed" if result.verification.passed else f"FAILED, error {result.verification.error:.3g}")
        table.add_row(*row)
    # Where no terminal says how wide it is, columns are never cut.
    console = console or Console(width=None if Console().is_terminal else 160)
    console.print(table)
    for line in summary(results):
        console.print(line)


@beartype
def summary(results: Sequence[CaseResult]) -> list[str]:
    """The geometric means over a list."""
    means = geometric_means(results)
    lines = []
    if means["ratio"] is not None:
        worst = max((result for result in results if result.ratio is not None), key=lambda result: result.ratio or 0)
        lines.append(
            f"geometric mean of our time over PyTorch's: {means['ratio']:.3f} over {means['compared']} cases; "
            f"worst {worst.ratio:.3f}, {worst.task.name}"
        )
    if means["floor_fraction"] is not None:
        lines.append(f"geometric mean of the floor over our time: {means['floor_fraction']:.3f}")
    return lines


@beartype
def geometric_means(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Means over the cases that have the figure."""
    ratios = [result.ratio for result in results if result.ratio is not None]
    return {
        "compared": len(ratios),
        "ratio": _mean(ratios),
        "floor_fraction": _mean(r.floor_fraction for r in results if r.floor_fraction is not None),
    }


@beartype
def document(
    command: str,
    results: Sequence[CaseResult],
    device: torch.device,
    rates: dict[str, Ceilings],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a committed result file holds."""
    return {
        "command": command,
        "device": device.type,
        **result_files.provenance(device),
        "settings": settings,
        "ceilings": {
            dtype: {"gb_per_s": rate.bytes_per_second / 1e9, "tflops": rate.flops_per_second / 1e12}
            for dtype, rate in rates.items()
        },
        "geometric_means": geometric_means(results),
        "cases": [_case(result) for result in results],
    }


def _case(result: CaseResult) -> dict[str, Any]:
    task = result.task
    record: dict[str, Any] = {
        "name": task.name,
        "problem": task.describe(),
        "dtype": str(task.dtype).removeprefix("torch."),
        "flops": task.flops,
        "bytes": task.moved,
    }
    if result.times is not None and result.floor is not None:
        record |= {
            "ms": result.times.median * 1e3,
            "spread": result.times.spread,
            "tflops": result.tflops,
            "gb_per_s": result.gb_per_s,
            "floor_ms": result.floor.seconds * 1e3,
            "floor_bound": result.floor.bound,
            "floor_fraction": result.floor_fraction,
        }
    if result.torch_times is not None:
        record |= {
            "torch_ms": result.torch_times.median * 1e3,
            "torch_spread": result.torch_times.spread,
            "ratio": result.ratio,
        }
    if result.torch_error is not None:
        record["torch_error"] = result.torch_error
    if result.verification is not None:
        check = result.verification
        record["verification"] = {
            "passed": check.passed,
            "exact": check.exact,
            "max_error": _finite(check.error),
            "relative_error": _finite(check.relative),
            "of_tolerance": _finite(check.excess),
        }
    return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.geometric_mean(values) if values else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6g}"


def _braces(values: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def _strides(lengths: Sequence[int], contiguous: bool) -> list[int]:
    """Of a dense tensor whose axis 1 is the channels; a vector's stride is 1."""
    order = list(range(len(lengths)))
    if not contiguous and len(lengths) > 2:
        order = [0, *order[2:], 1]
    strides = [1] * len(lengths)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= lengths[axis]
    return strides
