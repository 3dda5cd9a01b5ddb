"""A kernel has one name: what a table calls it is what profilers show, behind the name of its family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_max_backend.mojo_ops import KERNELS_PATH

#: By family with tables of kernels, what profilers' names begin with.
_PREFIXES = {"convolution": "conv_", "interpolation": "interpolate_", "pooling": "pool_(?:fprop_|dgrad_)?"}

_TABLE_NAME = re.compile(r'NAME: StaticString = "(\w+)"')
_PROFILER_NAME = re.compile(r'@__name\(\s*t?"([^"]+)"')


def _sources(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.rglob("*.mojo")) if "cpu" not in path.parts]


@pytest.mark.parametrize("family", _PREFIXES)
def test_profilers_show_the_names_of_tables(family: str) -> None:
    sources = _sources(KERNELS_PATH / family)
    tables = {name for source in sources for name in _TABLE_NAME.findall(source)}
    # Up to the first parameter: "conv_halo_gather_{dtype}".
    shown = {name.partition("{")[0].rstrip("_") for source in sources for name in _PROFILER_NAME.findall(source)}
    algorithms = {re.sub(rf"^{_PREFIXES[family]}", "", name) for name in shown}
    assert len(tables) > 2
    for table in tables:
        assert any(f"{table}_".startswith(f"{each}_") or f"{each}_".startswith(f"{table}_") for each in algorithms), (
            table
        )


def test_every_kernel_has_a_profiler_name() -> None:
    launched, named = set(), set()
    for source in _sources(KERNELS_PATH):
        named |= set(re.findall(r"@__name\((?s:.*?)\ndef (\w+)", source))
        # A launch may name an instance of a kernel first.
        instances = dict(re.findall(r"comptime (\w+) = (\w+)\[", source))
        launched |= {instances.get(name, name) for name in re.findall(r"\.enqueue_function\[\s*(\w+)", source)}
    assert len(launched) > 50
    assert launched <= named
