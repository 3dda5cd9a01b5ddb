"""Sliding windows on random problems against PyTorch: library functions called directly."""

from __future__ import annotations

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from benchmarks.kernels.drawn import check, drawn
from benchmarks.kernels.library import LAYOUTS
from benchmarks.kernels.windows import Calls, draw
from tests.kernels.conftest import DEVICES
from torch_max_backend.mojo_ops import windows
from torch_max_backend.mojo_ops.windows import Windows

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device: str) -> None:
    problems = drawn(draw, 0, 20 * len(DTYPES) * len(LAYOUTS), 5000)
    assert not check(Calls(torch.device(device), DTYPES), problems, DTYPES)


def test_what_the_functions_refuse() -> None:
    with pytest.raises(ValueError, match=r"stride=\(0, 1\): must be at least 1 each"):
        Windows((4, 5), (2, 2), (0, 1))
    with pytest.raises(ValueError, match="too small for windows of"):
        Windows((4, 5), (5, 2))
    kind = TensorType(DType.float32, (2, 4, 5, 3), DeviceRef.CPU())
    with Graph("refused", input_types=[kind]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(ValueError, match="axis 3 must have 1 elements"):
            windows.lay_out_windows(x, Windows((4, 5), (2, 2)), taps_first=True)
        with pytest.raises(ValueError, match="axis 2 must have 6 elements"):
            windows.lay_out_windows(x, Windows((4, 6), (2, 2)), taps_first=False)
        with pytest.raises(ValueError, match="must have rank 6"):
            windows.add_up_windows(x, Windows((4, 5), (2, 2)), taps_first=False)
