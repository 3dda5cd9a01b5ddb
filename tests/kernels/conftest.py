"""Library functions that several files test."""

from __future__ import annotations

import pytest

from tests.kernels.test_convolution import Convolutions
from tests.kernels.test_pooling import Pools

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", params=DEVICES)
def convolutions(request: pytest.FixtureRequest) -> Convolutions:
    """The passes of convolution on one device."""
    return Convolutions(request.param)


@pytest.fixture(scope="session", params=DEVICES)
def pools(request: pytest.FixtureRequest) -> Pools:
    """Pooling on one device."""
    return Pools(request.param)
