"""PyTorch's partitioner, which imports Inductor for one question that this package answers itself."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
import torch
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend import torch_compat

PROGRAM = """
import sys
import torch
from torch_max_backend.backend import build_only

model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU())
run = torch.compile(model, backend=build_only)
run(torch.randn(2, 1, 5, 5)).sum().backward()
assert "torch._inductor.pattern_matcher" not in sys.modules
from torch._inductor.pattern_matcher import PatternMatcherPass, same_mutation_regions
assert PatternMatcherPass.__module__ == same_mutation_regions.__module__ == "torch._inductor.pattern_matcher"
print("done")
"""


def test_a_training_graph_imports_no_inductor_pass() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_regions_are_those_of_pytorch() -> None:
    from torch._inductor import pattern_matcher

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.sin() + y.sin()
        x.copy_(a)
        b = x.sin() + y.sin()
        y.add_(b)
        return x.sin() + y.sin() + x.shape[0]

    graph = make_fx(function)(torch.randn(3), torch.randn(3)).graph
    torch_compat._Regions.compute_mutation_region_ids(graph)
    pattern_matcher.compute_mutation_region_ids(graph)
    nodes = list(graph.nodes)
    pairs = list(combinations(nodes, 2))
    ours = [torch_compat._Regions.same_mutation_regions(a, b) for a, b in pairs]
    assert ours == [pattern_matcher.same_mutation_regions(a, b) for a, b in pairs]
    assert len({node.meta["max_region"] for node in nodes}) == 3


def test_what_else_is_asked_for_comes_from_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import pattern_matcher

    monkeypatch.setitem(sys.modules, pattern_matcher.__name__, pattern_matcher)
    stand_in = torch_compat._Regions(pattern_matcher.__name__)
    sys.modules[pattern_matcher.__name__] = stand_in
    with pytest.raises(AttributeError):
        _ = stand_in.__nothing__
    assert stand_in.PatternMatcherPass.__name__ == "PatternMatcherPass"
    assert sys.modules[pattern_matcher.__name__] is not stand_in


def test_calls_of_unknown_kinds_may_mutate() -> None:
    graph = symbolic_trace(lambda x: x.sin()).graph
    assert [torch_compat._may_mutate(node) for node in graph.nodes] == [False, True, False]
