"""What the kernel tests compile once for all of them."""

from __future__ import annotations

import pytest

from tests.kernels.test_pooling import Compiled


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """The pooling ops on one device, all sizes symbolic."""
    return Compiled(request.param)
