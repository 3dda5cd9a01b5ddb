"""Which programs a graph gets: read off the built graph, nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from max.graph import Module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.fusion.terms import MOVES
from torch_max_backend.graph.builder import GraphBuilder, NodesCannotLower
from torch_max_backend.lowering import load_all
from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.runtime.engine import session
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Operand, Pointwise, Reduction

aten = torch.ops.aten
Shape = tuple[int, ...]


@in_mlir_context
def fused(function: Callable[..., Any], *shapes: Shape, dtype: torch.dtype = torch.float32) -> TypedGraph:
    """The graph of ``function`` over tensors of ``shapes``, fused."""
    load_all()
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(shape, dtype=dtype) for shape in shapes))
    built = GraphBuilder(graph, "fused", Module(), session.library_to_build_with(), listed=True).build()
    assert built.typed is not None
    return built.typed


def called(graph: TypedGraph) -> list[Call]:
    """The calls of library functions, in their order."""
    return [operation for operation in graph.operations if isinstance(operation, Call)]


def calls(graph: TypedGraph) -> list[str]:
    """What they are known as."""
    return [call.kernel for call in called(graph)]


def programs(graph: TypedGraph) -> list[str]:
    """The generated functions that are called."""
    return [symbol for symbol in functions(graph) if symbol.startswith("torch_max_pointwise")]


def functions(graph: TypedGraph) -> list[str]:
    """The library functions that are called."""
    return [call.function.symbol for call in called(graph)]


def remaining(graph: TypedGraph) -> list[str]:
    """Operations that no call computes."""
    return [each.name for each in graph.operations if isinstance(each, (*MOVES, Pointwise, Reduction))]


def test_an_expression_is_one_program() -> None:
    graph = fused(lambda x, y: torch.relu(torch.tanh(x) * y + 1), (8, 24), (24,))
    assert calls(graph) == ["program"]
    assert not remaining(graph)


def test_sizes_do_not_make_programs() -> None:
    """Layers of other sizes, and of rows that vectors fill or not, share a function on the CPU."""

    def shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * y

    found = {programs(fused(shifted, (n, c), (c,)))[0] for n, c in ((8, 24), (4, 64), (3, 7))}
    assert len(found) == 1


def test_other_expressions_are_other_programs() -> None:
    first = programs(fused(lambda x: torch.tanh(x) * 2, (8, 24)))
    second = programs(fused(lambda x: torch.tanh(x) * 3, (8, 24)))
    assert len({*first, *second}) == 2


def test_results_that_read_alike_are_one_call() -> None:
    graph = fused(lambda x, y: (x * y, x > y, (x - y).exp()), (8, 24), (8, 24))
    assert calls(graph) == ["program"]


def test_a_result_behind_another_op_waits_for_it() -> None:
    """``a * 2`` and ``a + product`` read alike, but the second one depends on the first through a product."""
    graph = fused(lambda a, b: (lambda twice: (twice, a + twice @ b))(torch.tanh(a)), (16, 16), (16, 16))
    assert [each for each in calls(graph) if each.startswith("program")] == ["program", "program"]
    assert not remaining(graph)


def test_conversions_of_arguments_are_one_call() -> None:
    graph = fused(lambda *weights: [weight.half() for weight in weights], *[(n, 3) for n in range(1, 60)])
    assert calls(graph) == ["programs"]


def test_beginnings_of_larger_arguments_are_not_read_whole() -> None:
    """Their elements follow one another from the first on, as a whole tensor's do."""
    graph = fused(lambda *rows: [torch.tanh(row[:1]) for row in rows], *[(n, 3) for n in range(2, 6)])
    (function,) = {*functions(graph)}
    assert function.startswith("torch_max_pointwise_many")
    assert [word.offset for word in called(graph)[0].words if isinstance(word, Operand)] == [0] * 4


def test_many_inputs_are_several_programs() -> None:
    """Twenty addends: no op takes as many."""
    graph = fused(lambda *addends: sum(torch.tanh(each) for each in addends), *[(8, 24)] * 20)
    assert 2 <= len(calls(graph)) <= 8
    assert not remaining(graph)


def test_long_expressions_are_cut() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(500):
            x = torch.sqrt(x) + 0.5
        return x

    graph = fused(long, (8, 24))
    assert 4 <= len(calls(graph)) <= 16
    assert not remaining(graph)


@pytest.mark.parametrize(
    ("shape", "function"), [((512, 256), "transpose"), ((64, 32), "pointwise"), ((3, 70_000), "transpose")]
)
def test_large_transposes_go_through_tiles(shape: Shape, function: str) -> None:
    """Small ones are programs."""
    graph = fused(lambda x: aten.clone(aten.permute(x, [1, 0]), memory_format=torch.contiguous_format), shape)
    assert calls(graph) == ["program"]
    assert functions(graph)[0].startswith(f"torch_max_{function}_")


@pytest.mark.parametrize("count", [19, 200])
def test_many_tensors_are_concatenated_by_one_call(count: int) -> None:
    graph = fused(lambda *parts: torch.cat(parts, 1) * 2, *[(6, n) for n in range(1, 1 + count)])
    assert calls(graph) == ["concatenate", "program"]
    assert not remaining(graph)


def test_what_asks_for_many_guards_is_cut() -> None:
    """Eight parts, each of them padded: sixteen conditions in one program."""
    graph = fused(lambda *parts: torch.cat([aten.constant_pad_nd(x, [1, 1]) for x in parts], 1), *[(6, 7)] * 8)
    assert len(calls(graph)) > 1
    assert not remaining(graph)


def test_numbers_alone_are_a_program() -> None:
    graph = fused(lambda x: (x + 1, torch.full((300, 1000), 2.5)), (8,))
    assert calls(graph) == ["program"] * 2


@pytest.mark.parametrize("shape", [(0, 4), (1,)])
def test_empty_and_single_tensors(shape: Shape) -> None:
    """Nothing is fused for no elements."""
    expected = ["program"] if shape == (1,) else []
    assert calls(fused(lambda x: torch.tanh(x) * 2, shape)) == expected


def test_nothing_is_fused_beyond_32_bit_offsets() -> None:
    with pytest.raises(NodesCannotLower, match=r"tanh.*has no library function"):
        fused(lambda x: torch.tanh(x) * 2, (2**16, 2**15))


def _convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of images [N, H, W, C], as the kernels take them."""
    result = aten.convolution(x.permute(0, 3, 1, 2), w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return result.permute(0, 2, 3, 1)


def _scaled(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return torch.relu(_convolved(x, w) * scale + residual)


def _kept(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
    result = _convolved(x, w)
    return [result, torch.relu(result * scale + residual)]


@pytest.mark.parametrize(
    ("function", "side", "taken"),
    [(_scaled, 256, True), (_scaled, 32, False), (_kept, 256, False)],
    ids=["large", "small", "kept"],
)
def test_a_convolution_takes_in_what_reads_it_alone(function: Callable[..., Any], side: int, taken: bool) -> None:
    """On a CPU, where the result is large."""
    found = functions(fused(function, (2, side, side, 8), (16, 8, 3, 3), (16,), (2, side, side, 16)))
    entries = ["conv_pointwise"] if taken else ["conv_fprop", "pointwise"]
    assert len(found) == len(entries)
    assert all(name.startswith(f"torch_max_{entry}") for name, entry in zip(found, entries, strict=True))


def test_programs_do_not_wait_for_each_other() -> None:
    """exp(x) and x times the sums of sin(y) are one program; sin(y) and y plus the sums of exp(x) must not be one
    then."""

    def crossed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        e = torch.exp(x)
        sums = e.cumsum(0)
        s = torch.sin(y)
        return e, s, s.cumsum(0) * x, sums + y

    assert calls(fused(crossed, (8, 8), (8, 8))).count("program") == 3
