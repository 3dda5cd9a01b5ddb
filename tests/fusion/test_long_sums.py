"""Sums of many values: where a partial sum is stored."""

from __future__ import annotations

import pytest
import torch
from max.graph import DeviceRef

from tests.fusion.test_groups import fused
from torch_max_backend.fusion import groups, long_sums
from torch_max_backend.launch_list import LaunchList, launch_list

COUNT, SIDE = 8, 16


def _total(*factors: torch.Tensor) -> torch.Tensor:
    total = factors[0] @ factors[0]
    for factor in factors[1:]:
        total = total + factor @ factor
    return total


def _listed() -> tuple[str, LaunchList]:
    """For each launch of the sum of products whether it is a product (p) or a sum (s), and the list."""
    listing = launch_list(fused(_total, *[(SIDE, SIDE)] * COUNT), DeviceRef.CPU())
    return "".join("s" if "pointwise" in each.function else "p" for each in listing.launches), listing


def test_partial_sums_of_large_values_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products wait for a sum at most, beside the sum of those before; small ones are added at once."""
    kinds, listing = _listed()
    size = SIDE * SIDE * 4
    assert kinds == "p" * COUNT + "s" and listing.workspace == COUNT * size
    monkeypatch.setattr(long_sums, "MIN_BYTES", size)
    kinds, listing = _listed()
    assert kinds == "pppspppspps" and listing.workspace == 4 * size


def test_sums_are_joined_with_what_makes_the_next_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values wait at most where a kernel's store adds; the last sum is left for the program that reads it."""
    size = SIDE * SIDE * 4
    monkeypatch.setattr(long_sums, "MIN_BYTES", size)
    monkeypatch.setattr(groups, "takes_part", lambda _: True)
    monkeypatch.setattr(groups, "is_suitable", lambda _: True)
    kinds, listing = _listed()
    assert kinds == "pp" + "sp" * (COUNT - 2) + "s" and listing.workspace == 2 * size


def test_joined_sums_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum of 16 bits is rounded, stored or not."""
    torch.manual_seed(0)
    factors = [torch.randn(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(5)]

    def total(tag: str) -> torch.Tensor:
        torch.compiler.reset()
        # Another graph in the cache for each.
        with torch.compiler.config.patch(cache_key_tag=tag):
            return torch.compile(_total, backend="max")(*factors)

    apart = total("apart")
    monkeypatch.setattr(long_sums, "MIN_BYTES", 1)
    monkeypatch.setattr(groups, "takes_part", lambda _: True)
    monkeypatch.setattr(groups, "is_suitable", lambda _: True)
    assert torch.equal(total("joined"), apart)
