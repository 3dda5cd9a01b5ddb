"""A short version of ``python -m benchmarks long_run``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.training.long_run import BATCHES, TOLERANCE, Row, grown, trained
from tests.kernels.conftest import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("captured", [False, True])
def test_a_run_grows_nothing(device: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if captured and device == "cpu":
        pytest.skip("a CPU captures nothing")
    # Products have it off as PyTorch comes.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    rows, _, wrong = trained(torch.device(device), captured=captured, steps=18 * len(BATCHES), parts=3)
    # Other processes may take memory of the same GPU meanwhile.
    assert not [each for each in wrong if not each.startswith("taken")], rows


def test_what_has_grown() -> None:
    first = Row(10, host=100, allocated=5, reserved=8, taken=20, descriptors=4, threads=2)
    assert not grown([first, replace(first, host=110, threads=1)], slack=10)
    for name in ("host", "allocated", "reserved", "taken", "descriptors", "threads"):
        more = replace(first, **{name: getattr(first, name) + 11})
        (said,) = grown([first, first, more], slack=10)
        assert not grown([first, more, more, first], slack=10)
        assert said.startswith(name)
    for difference in (2 * TOLERANCE, float("nan")):
        assert "differs" in grown([first, replace(first, difference=difference)])[0]
