"""What a program asserts of its tensors, as ``F.one_hot`` does, is checked inside the graph on a CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from torch_max_backend import backend
from torch_max_backend.mojo_ops.checks import assert_true


def _dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of segmentation: one minus twice the overlap over the sum."""
    wanted = F.one_hot(target, 5).movedim(-1, 1).float()
    given = logits.softmax(1)
    return 1 - (2 * (given * wanted).sum((2, 3)) / (given + wanted).sum((2, 3)).clamp_min(1e-6)).mean()


def test_one_hot_cuts_no_graph() -> None:
    logits, target = torch.randn(2, 5, 4, 4, requires_grad=True), torch.randint(0, 5, (2, 4, 4))
    compiled = torch.compile(_dice, backend="max", options={"fallback": "error"}, fullgraph=True)
    with backend.recorded_graphs() as graphs:
        loss = compiled(logits, target)
        (found,) = torch.autograd.grad(loss, logits)
    wanted = _dice(logits, target)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0])
    assert [(len(graph.executables), graph.host_ops) for graph in graphs] == [(1, [])] * 2
    for value, message in ((5, "Class values must be smaller than num_classes"), (-1, "Class values must be non-neg")):
        wrong = torch.full((2, 4, 4), value)
        # Under PyTorch 2.11 nothing is asserted in a compiled program.
        with contextlib.suppress(RuntimeError):
            torch.compile(_dice, backend="aot_eager")(logits, wrong)
            continue
        with pytest.raises(RuntimeError, match=message):
            compiled(logits, wrong)
    torch.testing.assert_close(compiled(logits, target), wanted)


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(x.min() > 0, "must be positive")
    return (x + 1).log().sum(1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_assertions_run_in_a_cpus_graph_and_beside_a_gpus(device: str) -> None:
    x = torch.rand(4, 9, device=device) + 1
    compiled = torch.compile(_checked, backend="max", options={"fallback": "error"}, fullgraph=True)
    with backend.recorded_graphs() as graphs:
        torch.testing.assert_close(compiled(x), _checked(x))
    assert [(len(graph.executables), len(graph.host_ops)) for graph in graphs] == [(1, int(device == "cuda"))]


def test_what_the_function_refuses() -> None:
    kinds = [TensorType(DType.bool, [2], DeviceRef.CPU()), TensorType(DType.bool, [1], DeviceRef.CPU())]
    with Graph("refused", input_types=kinds) as graph:
        pair, single = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match=r"condition is .*\[Dim\(2\)\]: must be one bool"):
            assert_true(pair, "wrong")
        with pytest.raises(ValueError, match="must have no zero in it"):
            assert_true(single, "wr\0ng")
