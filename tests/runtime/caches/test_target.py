"""The instruction sets that kernels for the CPU at hand may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_max_backend.runtime.caches import target


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    def forget() -> None:
        target.cpu_features.cache_clear()
        target.cpu_name.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("permitted", [True, False])
def test_tile_registers_need_the_system_s_permission(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that knows the CPU's model takes them for granted."""
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(target, "has_bfloat16_pairs", lambda: True)
    monkeypatch.setattr(target, "takes_tile_registers", lambda: permitted)
    sign = "+" if permitted else "-"
    assert target.cpu_features() == ("+avx512bf16", f"{sign}amx-tile", f"{sign}amx-bf16")


def test_code_with_other_instruction_sets_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for features in ((), ("+avx512bf16",), ("+avx512bf16", "+amx-bf16")):
        monkeypatch.setattr(target, "cpu_features", lambda features=features: features)
        target.cpu_name.cache_clear()
        names.add(target.cpu_name())
    monkeypatch.undo()
    assert len(names) == 3


def test_other_processors_have_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: "aarch64")
    assert target.cpu_features() == ()
