"""Every case of the command `bench`, compiled, against its own float64 reference, on the CPU, small sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_max_backend.bench.arguments import PoolingSizes, RunControl
from torch_max_backend.bench.case import Case
from torch_max_backend.bench.convolution import ConvolutionCase
from torch_max_backend.bench.epilogue import Epilogue
from torch_max_backend.bench.pooling import AvgPoolBackward, Form, MaxPoolBackward
from torch_max_backend.bench.runner import run_case
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass
from torch_max_backend.problems.pooling import PoolingProblem

CPU = torch.device("cpu")
from_sizes, from_aten = ConvolutionProblem.from_sizes, PoolingProblem.from_aten

CONVOLUTIONS = {
    "1d": from_sizes(3, 4, 6, [11], [3], stride=[2], padding=[1]),
    "2d": from_sizes(2, 8, 16, [9, 7], [3, 3], stride=[2], padding=[1], dilation=[1, 2]),
    "3d": from_sizes(2, 3, 5, [4, 6, 5], [2, 3, 3], padding=[0, 1, 1]),
    "grouped": from_sizes(2, 12, 6, [6, 6], [3, 3], padding=[1], groups=3),
}
MAXIMA = {
    "overlapping": PoolingSizes(2, 5, from_aten([9, 8], 3, 2, 1)),
    "dilated": PoolingSizes(1, 4, from_aten([11, 9], [3, 2], [2, 1], [1, 0], [2, 3])),
}
AVERAGES = {
    "overlapping": PoolingSizes(2, 3, from_aten([5, 6, 7], 3, 2, 1)),
    "exclude pads": PoolingSizes(1, 4, from_aten([4, 6, 5], 2, 1, 1, 1, True, False)),
    "divisor": PoolingSizes(1, 4, from_aten([4, 4, 4], 2, 2, 0, 1, False, True, 3)),
}


def _tasks() -> dict[str, Case]:
    place = (torch.float32, CPU)
    cases: list[Case] = []
    for name, problem in CONVOLUTIONS.items():
        cases += [ConvolutionCase(f"{role.name} {name}", problem, role, *place) for role in Pass]
    for role in Pass:
        cases.append(ConvolutionCase(f"{role.name} contiguous", CONVOLUTIONS["2d"], role, *place, "contiguous"))
    for epilogue in Epilogue:
        label = f"dgrad {epilogue.value}"
        cases.append(ConvolutionCase(label, CONVOLUTIONS["grouped"], Pass.DGRAD, *place, "channels_last", epilogue))
    for name, sizes in MAXIMA.items():
        for form in Form:
            layout = "contiguous" if form is Form.gather and name == "dilated" else "channels_last"
            cases.append(MaxPoolBackward(f"max {form.value} {name}", sizes, *place, layout, form))
    cases += [AvgPoolBackward(f"avg {name}", sizes, *place) for name, sizes in AVERAGES.items()]
    cases.append(AvgPoolBackward("avg contiguous", AVERAGES["overlapping"], *place, "contiguous"))
    return {case.name: case for case in cases}


CASES = _tasks()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Dynamo counts what it compiled of a function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str) -> None:
    for init in (1, 2):
        check = run_case(CASES[name], RunControl(True, init, 0), CPU, False, seed=0).verification
        assert check is not None
        assert check.passed, check
        exact = init == 1 and not name.startswith("avg") and (not name.startswith("dgrad ") or name == "dgrad none")
        assert check.exact == exact


def test_a_wrong_result_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["DGRAD 2d"]
    right = case.reference

    def wrong(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result = right(inputs).clone()
        result[0, 1, 2, 3] += 0.01
        return result

    monkeypatch.setattr(case, "reference", wrong)
    check = run_case(case, RunControl(True, 2, 0), CPU, False, seed=0).verification
    assert check is not None
    assert not check.passed


def test_figures_are_consistent() -> None:
    result = run_case(CASES["FPROP 2d"], RunControl(False, 2, 5), CPU, True, seed=0)
    assert result.times is not None
    assert result.torch_times is not None
    assert result.floor is not None
    assert len(result.times.seconds) == len(result.torch_times.seconds) == 5
    assert result.tflops == pytest.approx(CONVOLUTIONS["2d"].flops / result.times.median / 1e12)
    assert result.ratio == pytest.approx(result.times.median / result.torch_times.median)
    assert result.floor.seconds == max(result.floor.flop_seconds, result.floor.byte_seconds)
    assert result.floor_fraction == pytest.approx(result.floor.seconds / result.times.median)
    assert result.verification is None
