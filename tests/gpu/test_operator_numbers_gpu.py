"""All samples of PyTorch's operator database on a GPU, beside eager and float64: as tests/test_operator_numbers.py."""

from __future__ import annotations

import pytest

from benchmarks import ROOT
from tests import operator_numbers
from tests.operator_database import entries
from torch_max_backend import lowering

#: Entries that are compiled together.
LOT = 40
NAMES = list(entries())
PAGE = (ROOT / "docs" / "internals" / "conformance.md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("start", range(0, len(NAMES), LOT))
def test_numbers(start: int) -> None:
    lowering.load_all()
    graphs = operator_numbers.together(operator_numbers.every(NAMES[start : start + LOT], "cuda"))
    numbers = operator_numbers.Numbers()
    operator_numbers.measure(graphs, numbers)
    print(f"{numbers.agree} agree, {len(numbers.differ)} differ, {numbers.refused} are not lowered whole")
    assert numbers.agree
    refused = {posed.entry: graph.why for posed, graph in graphs.items() if graph.compiled is None}
    assert not {entry: why for entry, why in refused.items() if f"| {entry} |" not in PAGE}
    assert not {posed.id: why for posed, why in numbers.differ.items() if operator_numbers.exception(posed) is None}
