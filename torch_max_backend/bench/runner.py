"""One case: inputs, verification, interleaved timing, figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torch_max_backend.bench.arguments import ArgumentError, RunControl
from torch_max_backend.bench.case import Case
from torch_max_backend.bench.ceilings import Floor, ceilings
from torch_max_backend.bench.memory import available_bytes, cache_bytes
from torch_max_backend.bench.timing import Times, interleaved, set_count
from torch_max_backend.checked import beartype

#: Float64 copies of the operands, the reference and temporaries, in multiples of one set and its result.
_VERIFY_COPIES = 16


@dataclass(frozen=True)
class Verification:
    """How far a result is from float64.

    Attributes:
        error: the largest difference; infinite where the result has a NaN or the wrong shape.
        relative: the norm of the difference over the reference's norm.
        excess: the largest difference over its own tolerance; at most 1 passes.
        exact: equality to the bit was asked for.
    """

    error: float
    relative: float
    excess: float
    exact: bool

    @property
    def passed(self) -> bool:
        return self.excess <= 1.0


@dataclass(frozen=True)
class CaseResult:
    """The figures of one case; what was not asked for is None."""

    case: Case
    times: Times | None
    torch_times: Times | None
    torch_error: str | None
    floor: Floor | None
    verification: Verification | None

    @property
    def tflops(self) -> float | None:
        return None if self.times is None else self.case.flops / self.times.median / 1e12

    @property
    def gb_per_s(self) -> float | None:
        return None if self.times is None else self.case.moved / self.times.median / 1e9

    @property
    def floor_fraction(self) -> float | None:
        """The floor over the time: 1 is the physical limit."""
        return None if self.times is None or self.floor is None else self.floor.seconds / self.times.median

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's."""
        if self.times is None or self.torch_times is None:
            return None
        return self.times.median / self.torch_times.median


@beartype
def check_memory(case: Any, verify: bool, device: torch.device) -> None:
    """Raises before anything is compiled where the case cannot fit.

    Raises:
        ArgumentError: names the need and what there is.
    """
    need = (_VERIFY_COPIES if verify else 2) * case.moved
    there = available_bytes(device)
    if need > there:
        what = f"{case.name}, {need / 2**30:.1f} GiB{' with verification' if verify else ''}"
        raise ArgumentError("the problem's size", what, f"at most the {there / 2**30:.1f} GiB that {device} has free")


@beartype
def run_case(case: Any, control: RunControl, device: torch.device, compare: bool, seed: int) -> CaseResult:
    """Verifies and times one case as `control` asks: compiled as a model is, beside PyTorch's operator."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad(), _benchmarking():
        first = case.inputs(control.init, generator)
        ours = torch.compile(case.ours, backend="max", fullgraph=True, dynamic=False, options={"fallback": "error"})
        verification = _verify(case, ours, first, control.init) if control.verify else None
        if control.runs == 0:
            return CaseResult(case, None, None, None, None, verification)
        measured = ceilings(device, case.dtype)
        count = set_count(case.set_bytes, cache_bytes(device), available_bytes(device))
        copies = [tuple(tensor.clone() for tensor in first[: case.read]) for _ in range(count - 1)]
        sets = [first, *((*read, *first[case.read :]) for read in copies)]
        contenders: dict[str, list[Callable[[], torch.Tensor]]] = {"ours": [partial(ours, *inputs) for inputs in sets]}
        error = None
        if compare:
            try:
                contenders["torch"] = [partial(case.theirs, *inputs) for inputs in sets]
                contenders["torch"][0]()
            except (RuntimeError, NotImplementedError) as failure:
                del contenders["torch"]
                error = str(failure).splitlines()[0]
        times = interleaved(contenders, control.runs, device)
    floor = measured.floor(case.flops, case.moved, arithmetic=case.arithmetic)
    return CaseResult(case, times["ours"], times.get("torch"), error, floor, verification)


@contextlib.contextmanager
def _benchmarking() -> Iterator[None]:
    """cuDNN searches for its fastest algorithm, as it should where it is the reference."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _verify(case: Case, ours: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], init: int) -> Verification:
    result = ours(*inputs)
    reference = case.reference(inputs).to(result.device)
    tolerance = case.tolerance(init, reference)
    if result.shape != reference.shape:
        return Verification(float("inf"), float("inf"), float("inf"), tolerance.exact)
    if tolerance.exact:
        # Sums are exact: the one rounding left is that of the result.
        reference = reference.to(result.dtype).double()
    difference = (result.double() - reference).abs()
    if not bool(torch.isfinite(difference).all()):
        return Verification(float("inf"), float("inf"), float("inf"), tolerance.exact)
    if not difference.numel():
        return Verification(0.0, 0.0, 0.0, tolerance.exact)
    error = float(difference.max())
    relative = float(difference.norm() / reference.norm().clamp_min(1e-300))
    if tolerance.exact:
        return Verification(error, relative, 0.0 if error == 0 else float("inf"), True)
    allowed = tolerance.absolute + tolerance.relative * reference.abs()
    return Verification(error, relative, float((difference / allowed).max()), False)
