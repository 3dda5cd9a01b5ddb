"""Numbers that Python reads from the kernels' sources."""

from __future__ import annotations

import pytest

from torch_max_backend.mojo_ops.constants import kernel_constant
from torch_max_backend.mojo_ops.convolution import Geometry


def test_a_number_is_read_from_the_source() -> None:
    assert kernel_constant("convolution.problem", "GEOMETRY_LENGTH") == len(Geometry().values())


def test_a_name_that_is_no_number_is_refused() -> None:
    with pytest.raises(LookupError, match=r"name=Data: must be defined as a number in .*problem\.mojo"):
        kernel_constant("pooling.problem", "Data")
