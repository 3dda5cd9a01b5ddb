"""Samples of PyTorch's operator database run in MAX, beside eager and float64.

By default some that hold every operator; all with ``TORCH_MAX_BACKEND_CASES=all`` (twelve CPU-minutes).
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import ROOT
from tests.harness import ALL_CASES
from tests.operators import numerics
from tests.operators.database import entries
from tests.operators.numerics import CHOSEN, ENTRIES_IN_A_UNIT, EXCEPTIONS, EXCEPTIONS_ON_A_GPU, Graph, Posed
from torch_max_backend import lowering

PAGE = (ROOT / "docs" / "internals" / "conformance.md").read_text()
NAMES = list(entries())


def _chosen() -> list[Posed]:
    """What is run; another PyTorch's database may lack some."""
    lines = set(CHOSEN.read_text().split())
    return [posed for posed in numerics.every(NAMES) if ALL_CASES or posed.id in lines]


POSED = _chosen()
_compiled: dict[int, dict[Posed, Graph]] = {}


@pytest.fixture
def graph(request: pytest.FixtureRequest, posed: Posed) -> Graph:
    """The sample's graph; what was selected of neighbouring entries is compiled with it."""
    lowering.load_all()
    unit = NAMES.index(posed.entry) // ENTRIES_IN_A_UNIT if ALL_CASES else 0
    if unit not in _compiled:
        selected = [
            item.callspec.params["posed"]
            for item in request.session.items
            if hasattr(item, "callspec") and isinstance(item.callspec.params.get("posed"), Posed)
        ]
        _compiled.clear()
        _compiled[unit] = numerics.together(
            each for each in selected if not ALL_CASES or NAMES.index(each.entry) // ENTRIES_IN_A_UNIT == unit
        )
    if posed not in _compiled[unit]:
        pytest.skip("the entry has fewer samples")
    return _compiled[unit][posed]


@pytest.mark.parametrize("posed", POSED, ids=[posed.id for posed in POSED])
def test_numbers(posed: Posed, graph: Graph) -> None:
    if graph.compiled is None:
        # The page has one sample of each entry, and others may hold what that one does not.
        assert posed.number > 0 or f"`{posed.entry}`" in PAGE, graph.why
        pytest.skip("not lowered whole")
    if numerics.exception(posed) is None:
        numerics.check(graph, posed)
        return
    with pytest.raises(AssertionError):
        numerics.check(graph, posed)


def test_the_page_has_all_exceptions() -> None:
    known = {**EXCEPTIONS, **EXCEPTIONS_ON_A_GPU}
    assert all(f"| `{start}` | {why} |" in PAGE for start, why in known.items())


def test_a_wrong_number_is_noticed() -> None:
    """A sample whose graph computes something else."""
    lowering.load_all()
    posed = Posed("sigmoid", torch.float32, True)
    (graph,) = numerics.together([posed]).values()
    numerics.check(graph, posed)
    right = graph.function
    graph.function = lambda *inputs: [right(*inputs)[0], right(*inputs)[1] * 1.001]
    with pytest.raises(AssertionError, match="exceeds"):
        numerics.check(graph, posed)
