"""Nothing is left to MAX's constant folding, which compiles a program of its own; no compilation here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import gradients, prepared, trace
from torch_max_backend import explain_ahead, lowering
from torch_max_backend.ahead import trace_ahead
from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.graph.builder import NodesCannotLower, graph_device
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.compiler import compile_graph
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.launch_list import LaunchList
from torch_max_backend.options import Options
from torch_max_backend.runtime.engine import session
from torch_max_backend.torch_compat import FakeTensorMode

#: What MAX folds without compiling, unless the result must lie in memory: for a custom op or as a result of the graph.
FREE = {"rmo.broadcast_to", "rmo.reshape"}
IN_MEMORY = {"mo.custom", "mo.output"}
OPERATION = re.compile(r"^\s*(?:%[\w:]+(?:, %[\w:]+)* = )?\"?([\w.]+)\"?(.*?)(?: : |$)")
RESULT = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*?)(?: : |$)")


def folded(function: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, int]:
    """MAX ops of which every operand is a constant, with how often each occurs; free ones are named after a reader that
    needs them in memory."""
    lowering.load_all()
    unit = CompilationUnit("constants")
    unit.add(trace(function, list(inputs)), "constants", options=Options(run="graph"))
    constants: set[str] = set()
    counts: dict[str, int] = {}
    # Without attributes, which have colons of their own.
    lines = [re.sub(r"\{.*?\}|\[.*?\]", "", line) for line in str(unit.graphs[0].graph._mlir_op).splitlines()]
    matches = [match for line in lines if (match := RESULT.match(line))]
    free: set[str] = set()
    assert any(op == "mo.constant" for _, op, _ in (match.groups() for match in matches)), "nothing to look at"
    for result, op, rest in (match.groups() for match in matches):
        operands = re.findall(r"%\w+", rest)
        if op == "mo.constant" or (operands and constants.issuperset(operands)):
            constants.add(result)
            if op in FREE:
                free.add(result)
            elif op != "mo.constant":
                counts[op] = counts.get(op, 0) + 1
    for op, rest in (match.groups() for line in lines if (match := OPERATION.match(line))):
        if op in IN_MEMORY and free.intersection(re.findall(r"%\w+", rest)):
            counts[op] = counts.get(op, 0) + 1
    return counts


X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 2])
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "power_of_number": (lambda x: 0.7**x, (X,)),
    "power": (lambda x: x**1.7, (X,)),
    "remainder": (lambda x: x % 0.5, (X,)),
    "integer_division": (lambda x: x // 3, (torch.arange(9),)),
    "negated_bytes": (lambda x: -x, (torch.arange(9, dtype=torch.uint8),)),
    "half": (lambda x: x + torch.full((4, 5), 0.5, dtype=torch.bfloat16).float(), (X,)),
    "sign": (torch.sign, (X,)),
    "argmax": (lambda x: x.argmax(1), (X,)),
    "gather": (lambda x: x.gather(3, (x[..., :1] > 0).long()), (X,)),
    "cross_entropy": (gradients(F.cross_entropy, 1), (X[:, :, 0, 0], LABELS)),
    "bilinear": (gradients(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), (X,)),
    "padding": (lambda x: F.pad(x, (1, 2, 0, 1)) + 1, (X,)),
    "circular_padding": (lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"), (X,)),
    "sum_of_nothing": (lambda x: (x[:0].sum(0), x), (X,)),
    "embedding": (gradients(lambda w, i: F.embedding(i, w), 1), (X[0, 0], LABELS)),
    "scattered_number": (lambda x: x.scatter(3, (x[..., :2] > 0).long(), 7.0), (X,)),
    "grid": (lambda x: x * torch.meshgrid(torch.arange(4.0), torch.arange(5.0), indexing="ij")[0].sin(), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_arithmetic_on_constants(name: str) -> None:
    function, inputs = prepared(*CASES[name])
    assert folded(function, *inputs) == {}


def test_arithmetic_on_constants_is_seen() -> None:
    """Of tensors too large to be computed while the graph is built."""
    # A large constant is a broadcast number, which MAX has to write.
    assert folded(lambda x: (x, torch.zeros(300, 300)), torch.randn(3)) == {"mo.output": 1}
    assert folded(lambda x: x + torch.full((300, 300), 2.0).sin().sum(1), torch.randn(300, 300)) != {}


def test_a_graph_of_constants_alone_is_a_launch_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are new at every call."""
    monkeypatch.setattr(session, "compile_module", lambda *arguments: pytest.fail("a graph went to MAX's compiler"))

    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.arange(3), torch.zeros(2, 2), torch.ones(3) * 2, torch.full((2, 3), True)

    torch._dynamo.reset()
    run = torch.compile(constants, backend="max", options={"fallback": "error"})
    for result in run(X):
        result.zero_()
    for result, expected in zip(run(X), constants(X), strict=True):
        torch.testing.assert_close(result, expected)


class RelativePositions(nn.Module):
    """What vision transformers compute on the CPU, whatever the model's device: places in a table, a mask; with ``cut``
    around an op that stays in PyTorch."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.table, self.project, self.cut = nn.Parameter(torch.randn(13, 8)), nn.Linear(8, 8), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(7)[:, None] - (torch.arange(7)[None, :] + (1.0 - 7))
        rows = self.table[distance.long()]
        sign = torch.tensor([[1.0, -1.0] * 4])
        y = torch.einsum("bhc,hkc->bhk", self.project(x), rows)
        if self.cut:
            y = torch.lgamma(y) + rows.sum()
        border = torch.zeros(7, 7, device=x.device)
        border[2:4, 1:] = 3
        border[0] = torch.tensor(2.0)
        return (y + border)[..., :1] * sign.to(y.device)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_constants_of_the_cpu_are_parts_of_a_gpus_graphs(cut: bool) -> None:
    account = explain_ahead(RelativePositions(cut), torch.randn(2, 7, 8), target="sm_90a", quiet=True)
    left = {refusal.op for graph in account.graphs for refusal in graph.refusals}
    assert left == ({"aten.lgamma.default", "aten.digamma.default"} if cut else set())
    assert [(graph.name, graph.max_graphs) for graph in account.graphs] == [("forward", 1 + cut), ("backward", 1 + cut)]
    assert account.graphs[0].launches["gather_rows"] == 1


def test_a_copied_literal_of_the_cpu_is_a_part_of_a_gpus_graph() -> None:
    """As PyTorch 2.11 traces ``mask[rows] = 3``: a literal, copied, then written into a slice."""
    lowering.load_all()
    with FakeTensorMode() as mode:
        x = torch.empty(4, 4, device="cuda")
    graph = torch.fx.Graph()
    root = nn.Module()
    root.register_buffer("literal", torch.tensor(3.0))

    def add(target: Any, *args: Any, **options: Any) -> torch.fx.Node:
        node = graph.call_function(target, args, options)
        with mode:
            given = torch.fx.map_arg((args, options), lambda source: source.meta["val"])
            node.meta["val"] = target(*given[0], **given[1])
        return node

    argument = graph.placeholder("x")
    argument.meta["val"] = x
    literal = graph.get_attr("literal")
    literal.meta["val"] = mode.from_tensor(root.literal)
    aten = torch.ops.aten
    copied = add(aten.lift_fresh_copy.default, literal)
    mask = add(aten.full.default, [4, 4], 0.0, device=torch.device("cuda:0"), pin_memory=False)
    rows = add(aten.slice.Tensor, mask, 0, 1, 3)
    written = add(aten.copy.default, rows, copied)
    mask = add(aten.slice_scatter.default, mask, written, 0, 1, 3)
    graph.output((add(aten.add.Tensor, argument, mask),))
    with session.virtual_accelerator("cuda", "sm_90a"):
        unit = CompilationUnit("literal")
        compiled = compile_graph(torch.fx.GraphModule(root, graph), unit, Options(fallback="error"), "forward")
    (executable,) = compiled.executables
    listing = executable.built.listing
    assert isinstance(listing, LaunchList) and len(listing.launches) == 1
    (mask_content,) = (constant.content for constant in listing.constants)
    values = np.frombuffer(mask_content, np.float32)
    assert values.reshape(4, 4).tolist() == [[0.0] * 4, [3.0] * 4, [3.0] * 4, [0.0] * 4]


class Coordinates(nn.Module):
    """As ConViT makes them: on the CPU, written slice by slice, then moved."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.project = count, nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(1, self.count, self.count, 3)
        places[..., 2] = torch.arange(self.count, dtype=torch.float32).square().unsqueeze(0)
        places[..., 0] = torch.arange(self.count)[:, None] - torch.arange(self.count)[None]
        return x * self.project(places.to(x.device))


def test_large_constants_of_the_cpu_are_parts_of_a_gpus_graphs_up_to_a_limit() -> None:
    account = explain_ahead(Coordinates(196), torch.randn(196, 196, 2), target="sm_90a", quiet=True)
    assert not account.fallback_count and [graph.max_graphs for graph in account.graphs] == [1, 1]
    # Nothing but the product and the factor: whatever the CPU computes is there before.
    assert sum(account.graphs[0].launches.values()) <= 2
    account = explain_ahead(Coordinates(2400), torch.randn(1, 1, 2), target="sm_90a", quiet=True)
    assert "aten._to_copy.default" in {refusal.op for graph in account.graphs for refusal in graph.refusals}


def test_a_constant_that_leaves_the_graph_keeps_its_device() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(4)
        return x[places] + 1, places + 1

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return function(x)

    account = explain_ahead(Module(), torch.randn(5, 3), target="sm_90a", quiet=True)
    (graph,) = account.graphs
    assert {refusal.reason for refusal in graph.refusals} == {"a tensor on cpu in a graph on cuda:0"}


class Applied(nn.Module):
    """A function of tensors, some of which a model holds: on the CPU, wherever the model is."""

    def __init__(self, function: Callable[..., Any], *held: torch.Tensor) -> None:
        super().__init__()
        self.function, self.held = function, held

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given, *self.held)


def traced(model: nn.Module, *inputs: torch.Tensor, dynamic: bool | None = None) -> list[CompiledGraph]:
    """The graphs of a call on a GPU."""
    with recorded_graphs() as graphs:
        trace_ahead(build_only, model, inputs, {}, target="sm_90a", dynamic=dynamic)
    return graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
def test_a_number_of_the_host_enters_a_gpus_graph(dtype: torch.dtype) -> None:
    number = torch.ones((), dtype=dtype)

    def function(x: torch.Tensor, w: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return torch.where(F.conv2d(x * number, w) > number, x[:, :4], number)

    inputs = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(4, 4, 1, 1, requires_grad=True)
    graphs = traced(Applied(function, number), *inputs)
    assert [(graph.name, len(graph.executables), graph.refusals) for graph in graphs] == [
        ("forward", 1, []), ("backward", 1, []),
    ]  # fmt: skip
    listing = graphs[0].executables[0].listing
    assert listing is not None and len(listing.moved) == 1 and "conv" in str(listing.launches)


def test_a_number_made_of_sizes_is_a_part_of_a_gpus_graph() -> None:
    """PyTorch computes 1 / (N * C), by which a mean's gradient is multiplied, on the CPU."""
    x = torch.randn(4, 5, requires_grad=True)
    for graph in traced(Applied(lambda x: F.mse_loss(x, x * 0.3) + (x * (1.0 / x.numel())).sum()), x, dynamic=True):
        assert not graph.refusals and len(graph.executables) == 1


def test_constants_between_operators_that_stay_in_pytorch_are_made_where_these_run() -> None:
    model = Applied(lambda x: (x * x).new_zeros(x.shape) + x * x)
    (graph,) = traced(model, torch.randn(4, 5, dtype=torch.float64))
    assert graph.refusals and {executable.device for executable in graph.executables} == {torch.device("cuda:0")}


def test_constants_of_the_cpu_that_pytorch_computes_from_too() -> None:
    """What depends on a constant that stays in PyTorch stays there until it is on the GPU."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(4.0)
        return x.sin() + (places * 2 + 1).to(x.device), torch.linalg.matrix_exp(places.outer(places))

    (graph,) = traced(Applied(function), torch.randn(4, 4))
    assert {executable.device for executable in graph.executables} == {torch.device("cuda:0")}
    assert {"aten.linalg_matrix_exp.default", "aten.arange.start_step"} <= {refusal.op for refusal in graph.refusals}
    assert not {"aten.sin.default", "aten.add.Tensor"} - {op for each in graph.executables for op in each.built.ops}


def test_what_is_on_another_device_than_a_graph_is_refused() -> None:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(3, device=device) for device in ("meta", "cpu")]
    x, other = (graph.placeholder(name) for name in ("x", "other"))
    near, far = (graph.call_function(torch.ops.aten.sin.default, (each,)) for each in (x, other))
    for node, value in ((x, values[0]), (other, values[1]), (near, values[0]), (far, values[1])):
        node.meta["val"] = value
    graph.output((near, far))
    with pytest.raises(NodesCannotLower, match="another device than meta") as raised:
        graph_device(list(graph.nodes))
    assert set(raised.value.refused) == {far}
