"""Libraries that came with the package: which are found, and that nothing is built that they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from max.dtype import DType

from torch_max_backend import OptionError
from torch_max_backend.mojo_ops import functions, normalization
from torch_max_backend.mojo_ops.convolution import WGRAD_BIAS
from torch_max_backend.mojo_ops.functions import function_of
from torch_max_backend.mojo_ops.signatures import declared, load_all
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.caches import cache, prebuilt, target

CPU = torch.device("cpu")
FUNCTION = function_of(normalization.FAMILY, "batch_norm_statistics", "cpu", (DType.float32,))
V3, V4 = "x86-64-v3", "x86-64-v4"
SETS = {level: " ".join(sets) for level, sets in target.LEVELS.items()}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the instruction sets of the CPU at hand."""

    def having(flags: str) -> None:
        monkeypatch.setattr(target, "_cpuinfo", lambda: {"vendor_id": "a vendor", "flags": flags})
        target.cpu_name.cache_clear()

    having(SETS[V4])
    yield having
    target.cpu_name.cache_clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_MAX_BACKEND_PREBUILT", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "prebuilt"


def carry(place: Path, level: str, **changed: str) -> Path:
    """A library of FUNCTION for a level, made with other facts where they are ``changed``."""
    folder = place / level
    folder.mkdir(parents=True)
    library = folder / "00.so"
    library.write_bytes(b"code")
    facts = {**libraries.facts_of(FUNCTION, CPU, level), **changed}
    (folder / prebuilt.INDEX).write_text(json.dumps({library.name: [facts]}))
    return library


def found() -> Mapping[Any, Path]:
    return libraries._cached({FUNCTION: libraries.facts_of(FUNCTION, CPU)})


def test_a_cpu_takes_what_was_built_for_its_level(place: Path, cpu: Any) -> None:
    low, high = carry(place, V3), carry(place, V4)
    assert found() == {FUNCTION: high}
    cpu(SETS[V3])
    assert found() == {FUNCTION: low}
    cpu("sse2 avx")
    assert found() == {}
    assert [each.target for each in prebuilt.libraries()] == [V3, V4]


def test_a_chosen_level_takes_the_place_of_the_cpu_s(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = carry(place, V3), carry(place, V4)
    assert target.target_facts(CPU)["cpu"] not in target.LEVELS
    for level, library in ((V3, low), (V4, high)):
        monkeypatch.setenv("TORCH_MAX_BACKEND_CPU_LEVEL", level)
        assert found() == {FUNCTION: library}
        assert target.target_facts(CPU)["cpu"] == level


@pytest.mark.parametrize("level", ["avx2", V4])
def test_a_level_that_the_cpu_does_not_reach_is_refused(level: str, cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(SETS[V3])
    monkeypatch.setenv("TORCH_MAX_BACKEND_CPU_LEVEL", level)
    with pytest.raises(OptionError, match=rf"'{level}': expected a level that this CPU reaches, of \['{V3}'\]"):
        target.target_facts(CPU)


def test_a_cpu_with_wider_vectors_builds_its_own(place: Path) -> None:
    carry(place, V3)
    assert found() == {}


@pytest.mark.parametrize("changed", ["sources", "max", "mojo", "backend", "machine", "function", "device", "code"])
def test_a_library_of_anything_else_is_not_taken(place: Path, changed: str) -> None:
    carry(place, V4, **{changed: "another"})
    assert found() == {}


def test_what_was_built_here_goes_first(place: Path) -> None:
    carry(place, V4)
    facts = libraries.facts_of(FUNCTION, CPU)
    own = cache.store(libraries.LIBRARIES, facts, libraries.FILENAME, lambda path: path.write_bytes(b"own") and None)
    assert own is not None and found() == {FUNCTION: own}


def test_nothing_is_built_that_came_with_the_package(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = carry(place, V4)
    monkeypatch.setattr(libraries, "_build_one", lambda *_: pytest.fail("it is built"))
    assert libraries.build([FUNCTION], CPU) == {FUNCTION: library}
    assert libraries._uncached([FUNCTION], CPU) == []
    assert not (place.parent / "cache").exists()


def test_an_empty_variable_turns_them_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry(place, V4)
    monkeypatch.setenv("TORCH_MAX_BACKEND_PREBUILT", "")
    assert found() == {} and prebuilt.libraries() == ()


def test_a_damaged_index_is_told_of_and_left_out(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    carry(place, V3)
    high = carry(place, V4)
    (place / V3 / prebuilt.INDEX).write_text("{")
    assert found() == {FUNCTION: high}
    assert f"the libraries in {place / V3} are not used" in caplog.text


def test_every_entry_is_enumerated() -> None:
    load_all()
    named = {each.name for family in declared.values() for each in family.signatures}
    listed = functions.all_functions("cpu", (DType.float32,))
    # Hopper's alone.
    assert named - {WGRAD_BIAS} <= {each.entry for each in listed}
    assert len({each.symbol for each in listed}) == len(listed) > 80
