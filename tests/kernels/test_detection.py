"""Operators of detection on random problems against float64: library functions called directly."""

from __future__ import annotations

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from benchmarks.kernels.detection import Calls, draw
from benchmarks.kernels.drawn import check, drawn
from benchmarks.kernels.library import LAYOUTS
from tests.kernels.conftest import DEVICES
from torch_max_backend.mojo_ops import detection
from torch_max_backend.mojo_ops.detection import Deformable, Regions

DTYPES = (torch.float32,)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device: str) -> None:
    problems = drawn(draw, 0, 30 * len(DTYPES) * len(LAYOUTS), 5000)
    assert not check(Calls(torch.device(device), DTYPES), problems, DTYPES)


def test_what_the_functions_refuse() -> None:
    with pytest.raises(ValueError, match=r"bins=\(0, 2\): must be at least 1"):
        Regions((4, 4), (0, 2), 2, True, 1.0)
    with pytest.raises(ValueError, match=r"stride=\(0, 1\): must be at least 1"):
        Deformable((4, 4), (3, 3), (0, 1), (1, 1), (1, 1), 4, 1, 1, False)
    with pytest.raises(ValueError, match="offset_groups=3: must divide the number of channels, 4"):
        Deformable((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 4, 1, 3, False)
    with pytest.raises(ValueError, match=r"no window of \(5, 5\) taps fits"):
        Deformable((4, 4), (5, 5), (1, 1), (0, 0), (1, 1), 4, 1, 1, False)
    regions = Regions((4, 4), (2, 2), 2, True, 1.0)
    windows = Deformable((4, 4), (1, 1), (1, 1), (0, 0), (1, 1), 3, 1, 1, True)
    shapes = (2, 16, 3), (5, 5), (5, 4, 3), (2, 16, 2)
    with Graph("refused", input_types=[TensorType(DType.float32, shape, DeviceRef.CPU()) for shape in shapes]) as graph:
        x, rois, dy, offset = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match=r"x has shape .*: must have 20 pixels"):
            detection.roi_align_fprop(x, rois, Regions((4, 5), (2, 2), 2, True, 1.0))
        with pytest.raises(ValueError, match="channels must be a multiple of the 6 bins"):
            detection.ps_roi_fprop(x, rois, Regions((1, 3), (3, 2), 2, True, 1.0), align=True)
        with pytest.raises(ValueError, match=r"regions has shape .*: must have rank 2"):
            detection.roi_pool_fprop(x, dy, regions)
        with pytest.raises(ValueError, match=r"places is .*: must be int32"):
            detection.roi_pool_dgrad(dy, rois, dy, regions, 2)
        with pytest.raises(ValueError, match="mask is None: masked is True"):
            detection.deformable_columns(x, offset, None, windows)
        with pytest.raises(ValueError, match=r"mask is .*: must be DType\.float32"):
            detection.deformable_columns(x, offset, offset, windows)
