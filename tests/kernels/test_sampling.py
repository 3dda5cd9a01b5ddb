"""grid_sample on random problems against float64: library functions called directly."""

from __future__ import annotations

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from benchmarks.kernels.drawn import check, drawn
from benchmarks.kernels.library import LAYOUTS
from benchmarks.kernels.sampling import Calls, draw
from tests.kernels.conftest import DEVICES
from torch_max_backend.mojo_ops import sampling
from torch_max_backend.mojo_ops.sampling import Padding, Sampling, SamplingMode

DTYPES = (torch.float32,)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device: str) -> None:
    problems = drawn(draw, 0, 30 * len(DTYPES) * len(LAYOUTS), 5000)
    assert not check(Calls(torch.device(device), DTYPES), problems, DTYPES)


def test_what_the_functions_refuse() -> None:
    with pytest.raises(ValueError, match="must be linear or nearest in three dimensions"):
        Sampling((2, 3, 4), SamplingMode.CUBIC, Padding.ZEROS, False, False)
    with pytest.raises(ValueError, match=r"extents=\(0, 3\)"):
        Sampling((0, 3), SamplingMode.CUBIC, Padding.ZEROS, False, False)
    kinds = [TensorType(DType.float32, shape, DeviceRef.CPU()) for shape in ((2, 3, 12), (2, 5, 2), (2, 3, 5))]
    plain = Sampling((3, 4), SamplingMode.NEAREST, Padding.ZEROS, False, False)
    with Graph("refused", input_types=kinds) as graph:
        x, grid, dy = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match=r"x has shape .*: must have 15 pixels"):
            sampling.sample_fprop(x, grid, Sampling((3, 5), SamplingMode.NEAREST, Padding.ZEROS, False, False))
        with pytest.raises(ValueError, match=r"grid has shape .*, points, 2]"):
            sampling.sample_fprop(x, dy, plain)
        with pytest.raises(ValueError, match=r"dy has shape .*: must have as many points"):
            sampling.sample_dgrad_input(x, grid, plain)
        with pytest.raises(ValueError, match="the gradient of the grid is zero"):
            sampling.sample_dgrad_grid(dy, x, grid, plain)
