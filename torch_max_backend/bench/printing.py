"""The lines that a benchmark prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_max_backend.bench.ceilings import Ceilings
from torch_max_backend.bench.runner import CaseResult
from torch_max_backend.checked import beartype


@beartype
def descriptions(case: Any) -> list[str]:
    """One line for each tensor: rank, lengths and strides in elements, in Composable Kernel's form."""
    lines = []
    for label, lengths in case.operands.items():
        strides = _strides(lengths, case.layout == "contiguous")
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
            f"({result.case.flops / 1e9:.6g} GFlop at {rates.flops_per_second / 1e12:.4g} TFlops: "
            f"{_ms(floor.flop_seconds) if result.case.arithmetic else 'no matmul'}"
            f"{' ms' if result.case.arithmetic else ''}; "
            f"{result.case.moved / 1e9:.6g} GB at {rates.bytes_per_second / 1e9:.4g} GB/s: "
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6g}"


def _braces(values: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def _strides(lengths: Sequence[int], contiguous: bool) -> list[int]:
    """The strides of a dense tensor whose axis 1 is the channels; a vector's stride is 1."""
    order = list(range(len(lengths)))
    if not contiguous and len(lengths) > 2:
        order = [0, *order[2:], 1]
    strides = [1] * len(lengths)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= lengths[axis]
    return strides
