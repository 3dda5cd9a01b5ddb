"""All samples of PyTorch's operator database on a GPU, beside eager and float64 (tests/operators/test_numerics.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.operators import numerics
from tests.operators.database import entries
from tests.operators.numerics import Posed
from torch_max_backend import lowering
from torch_max_backend.graph.unit import CompilationUnit

#: Entries that are compiled together.
LOT = 40
NAMES = list(entries())
#: Why a GPU's graph leaves to PyTorch what a CPU's does not.
ON_GPUS_ALONE = ("float64 runs in MAX on the CPU only", "aten.bernoulli.default")


@pytest.mark.gpu
@pytest.mark.parametrize("start", range(0, len(NAMES), LOT))
def test_numbers(start: int) -> None:
    lowering.load_all()
    # TF32 would hide what a float32 kernel loses.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    graphs = numerics.together(numerics.every(NAMES[start : start + LOT], "cuda"))
    numbers = numerics.Numbers()
    numerics.measure(graphs, numbers)
    print(f"{numbers.agree} agree, {len(numbers.differ)} differ, {numbers.refused} are not lowered whole")
    assert numbers.agree
    differ = {posed: why for posed, why in numbers.differ.items() if numerics.exception(posed) is None}
    assert not differ, _lines(differ)
    refused = {
        posed: graph.why for posed, graph in graphs.items()
        if graph.compiled is None and not any(why in graph.why for why in ON_GPUS_ALONE) and _runs_on_a_cpu(posed)
    }  # fmt: skip
    assert not refused, _lines(refused)


def _runs_on_a_cpu(posed: Posed) -> bool:
    """Whether the sample is lowered whole there."""
    there = replace(posed, device="cpu")
    graph = numerics.pose(entries()[posed.entry], there, numerics.SAMPLES, CompilationUnit("on a CPU"))
    return graph is not None and graph.compiled is not None


def _lines(found: Mapping[Posed, str]) -> str:
    return "\n".join(f"{posed.id}: {why}" for posed, why in found.items())
