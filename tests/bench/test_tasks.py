"""Every benchmark task against its own float64 reference and PyTorch, on the CPU, small sizes, one compile."""

from __future__ import annotations

import pytest
import torch
from max.graph import Module

from tests.kernels import together
from torch_max_backend.bench import compiled
from torch_max_backend.bench.arguments import PoolingSizes, RunControl
from torch_max_backend.bench.convolution import ConvolutionTask, kernel_graph
from torch_max_backend.bench.epilogue import Epilogue
from torch_max_backend.bench.pooling import AvgPoolBackward, Form, MaxPoolBackward, max_graph
from torch_max_backend.bench.runner import run_case
from torch_max_backend.bench.task import Task
from torch_max_backend.convolution_problem import ConvolutionProblem, Pass
from torch_max_backend.mojo_ops.convolution import Grouping
from torch_max_backend.pooling_problem import PoolingProblem

CPU = torch.device("cpu")
from_sizes, from_aten = ConvolutionProblem.from_sizes, ConvolutionProblem.from_aten

CONVOLUTIONS = {
    "1d": from_sizes(3, 4, 6, [11], [3], stride=[2], padding=[1]),
    "2d": from_sizes(2, 8, 16, [9, 7], [3, 3], stride=[2], padding=[1], dilation=[1, 2]),
    "3d": from_sizes(2, 3, 5, [4, 6, 5], [2, 3, 3], padding=[0, 1, 1]),
    "grouped": from_sizes(2, 12, 6, [6, 6], [3, 3], padding=[1], groups=3),
    "unequal pads": from_sizes(2, 4, 6, [8, 7], [3, 2], padding=[0, 1], right_padding=[2, 0]),
    "pads on one side": from_sizes(2, 4, 6, [8, 7], [4, 3], stride=[1, 1], padding=[0, 0], right_padding=[1, 2]),
    "transposed": from_aten([2, 6, 5, 4], [6, 2, 3, 3], [2, 2], [1, 1], [1, 1], True, [1, 0], 2),
}
POOLINGS = {
    "overlapping": PoolingSizes(2, 5, PoolingProblem.from_aten([9, 8], 3, 2, 1)),
    "dilated": PoolingSizes(1, 4, PoolingProblem.from_aten([11, 9], [3, 2], [2, 1], [1, 0], [2, 3])),
    "ceil": PoolingSizes(2, 3, PoolingProblem.from_aten([8, 7], 2, 2, 0, 1, True)),
}
AVERAGES = {
    "overlapping": PoolingSizes(2, 3, PoolingProblem.from_aten([5, 6, 7], 3, 2, 1)),
    "exclude pads": PoolingSizes(1, 4, PoolingProblem.from_aten([4, 6, 5], 2, 1, 1, 1, True, False)),
    "divisor": PoolingSizes(1, 4, PoolingProblem.from_aten([4, 4, 4], 2, 2, 0, 1, False, True, 3)),
}


def _tasks() -> dict[str, Task]:
    tasks: list[Task] = []
    for name, problem in CONVOLUTIONS.items():
        tasks += [ConvolutionTask(f"{role.name} {name}", problem, role, torch.float32, CPU) for role in Pass]
    for role in Pass:
        task = ConvolutionTask(f"{role.name} contiguous", CONVOLUTIONS["2d"], role, torch.float32, CPU, "contiguous")
        tasks.append(task)
    for epilogue in Epilogue:
        label = f"dgrad {epilogue.value}"
        problem = CONVOLUTIONS["grouped"]
        tasks.append(ConvolutionTask(label, problem, Pass.DGRAD, torch.float32, CPU, "channels_last", epilogue))
    for name, sizes in POOLINGS.items():
        for form in Form:
            layout = "contiguous" if form is Form.GATHER and name == "ceil" else "channels_last"
            label = f"max {form.value} {name}"
            tasks.append(MaxPoolBackward(label, sizes, torch.float32, CPU, layout, form))
    tasks += [AvgPoolBackward(f"avg {name}", sizes, torch.float32, CPU) for name, sizes in AVERAGES.items()]
    tasks.append(AvgPoolBackward("avg contiguous", AVERAGES["overlapping"], torch.float32, CPU, "contiguous"))
    return {task.name: task for task in tasks}


TASKS = _tasks()
#: By name. Further ones are what the commands in test_cli.py run.
KERNELS = {
    kernel.name: kernel
    for kernel in (
        *(task.kernel for task in TASKS.values() if task.kernel is not None),
        kernel_graph(Pass.DGRAD, torch.float32, grouping=Grouping.ONE),
        max_graph(Form.GATHER, torch.float32),
    )
}


@together.part("tests/bench/test_tasks.py", "tests/test_cli.py")
def add_graphs(module: Module, place: torch.device) -> list[str]:
    if place != CPU:
        return []
    for kernel in KERNELS.values():
        compiled.add_graph(kernel, place, module)
    return list(KERNELS)


def use_common_models() -> None:
    """Lets tasks run what was compiled with the other kernels' tests."""
    models = together.models("cpu")
    for name, kernel in KERNELS.items():
        compiled.hold(kernel, CPU, models[name])


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    use_common_models()


@pytest.mark.parametrize("init", [1, 2], ids=["integers", "decimals"])
@pytest.mark.parametrize("name", TASKS)
def test_matches_float64(name: str, init: int) -> None:
    result = run_case(TASKS[name], RunControl(True, init, 0), CPU, False, seed=0)
    check = result.verification
    assert check is not None
    assert check.passed, check
    exact = init == 1 and not name.startswith("avg") and (not name.startswith("dgrad ") or name == "dgrad none")
    assert check.exact == exact


@pytest.mark.parametrize("name", TASKS)
def test_agrees_with_pytorch_in_its_dtype(name: str) -> None:
    task = TASKS[name]
    inputs = task.inputs(2, torch.Generator().manual_seed(1))
    if "pads" in name and not name.startswith("avg"):
        with pytest.raises(NotImplementedError, match="both sides alike"):
            task.theirs(inputs)
        return
    ours, theirs = task.logical(task.ours(inputs)()), task.theirs(inputs)()
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_wrong_result_does_not_pass() -> None:
    task = TASKS["DGRAD 2d"]
    right = task.ours

    def wrong(inputs: tuple[torch.Tensor, ...]) -> object:
        def call() -> torch.Tensor:
            result = right(inputs)().clone()
            result.view(-1)[7] += 0.01
            return result

        return call

    task.ours = wrong  # type: ignore[method-assign]
    try:
        for init in (1, 2):
            check = run_case(task, RunControl(True, init, 0), CPU, False, seed=0).verification
            assert check is not None
            assert not check.passed
    finally:
        task.ours = right  # type: ignore[method-assign]


def test_figures_are_consistent() -> None:
    result = run_case(TASKS["FPROP 2d"], RunControl(False, 2, 5), CPU, True, seed=0)
    assert result.times is not None
    assert result.torch_times is not None
    assert result.floor is not None
    assert len(result.times.seconds) == len(result.torch_times.seconds) == 5
    assert result.tflops == pytest.approx(CONVOLUTIONS["2d"].flops / result.times.median / 1e12)
    assert result.ratio == pytest.approx(result.times.median / result.torch_times.median)
    assert result.floor.seconds == max(result.floor.flop_seconds, result.floor.byte_seconds)
    assert result.floor_fraction == pytest.approx(result.floor.seconds / result.times.median)
    assert result.verification is None
