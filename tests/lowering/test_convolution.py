"""aten.convolution and aten.convolution_backward against PyTorch, every geometry that PyTorch accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe, trace
from tests.launched import launched_functions
from torch_max_backend import backend, lowering
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.fusion.terms import in_memory
from torch_max_backend.graph.partition import refusals
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.lowering.convolution import _is_multiplied, allows_tf32, is_widened
from torch_max_backend.typed_graph.operations import Call

aten = torch.ops.aten

Maker = Callable[[torch.Generator], torch.Tensor]


def conv(
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Callable[..., torch.Tensor]:
    """``aten.convolution`` of any rank with these arguments."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        rank = x.dim() - 2

        def spread(value: Any) -> list[int]:
            return [value] * rank if isinstance(value, int) else list(value)

        return aten.convolution(
            x, w, b, spread(stride), spread(padding), spread(dilation), transposed,
            spread(output_padding), groups,
        )  # fmt: skip

    return run


def channels_last(make: Maker) -> Maker:
    """The same channels-last, as the kernels have it: another order is a kernel more to compile for each tensor."""

    def made(generator: torch.Generator) -> torch.Tensor:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        tensor = make(generator)
        return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))

    return made


def _case(
    name: str, x: tuple[int, ...], w: tuple[int, ...], bias: int | None = None, dtype: Any = torch.float32,
    exact: bool = False, **geometry: Any,
) -> Case:  # fmt: skip
    make = integers if exact else randn
    makers = [channels_last(make(*shape, dtype=dtype)) for shape in (x, w)]
    if bias is not None:
        makers.append(make(bias, dtype=dtype))
    pixels = x[0]
    for extent in x[2:]:
        pixels *= extent
    return Case(name, gradients(conv(**geometry)), recipe(*makers), exact=exact, length=max(pixels, 1))


GEOMETRIES: list[tuple[str, tuple[int, ...], tuple[int, ...], int | None, dict[str, Any]]] = [
    ("1d_strided_dilated", (2, 4, 23), (6, 2, 3), None, {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
    ("2d_3x3", (2, 8, 9, 10), (12, 8, 3, 3), 12, {"padding": 1}),
    ("2d_stem", (2, 3, 20, 22), (16, 3, 7, 7), None, {"stride": 2, "padding": 3}),
    ("2d_uneven", (2, 5, 11, 8), (7, 5, 3, 2), 7, {"stride": (2, 1), "padding": (2, 0), "dilation": (1, 3)}),
    ("2d_grouped", (2, 12, 8, 8), (18, 4, 3, 3), 18, {"padding": 1, "groups": 3}),
    ("2d_depthwise", (2, 16, 9, 9), (16, 1, 3, 3), 16, {"padding": 1, "groups": 16, "stride": 2}),
    ("3d", (2, 3, 5, 6, 7), (4, 3, 3, 3, 3), 4, {"padding": 1}),
    ("transposed_2d", (2, 6, 5, 5), (6, 4, 3, 3), 4,
     {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1}),
    ("transposed_grouped", (2, 6, 5, 4), (6, 2, 3, 3), 4,
     {"transposed": True, "stride": 2, "groups": 2, "dilation": 2}),
    ("transposed_3d", (1, 4, 3, 4, 4), (4, 3, 2, 2, 2), 3, {"transposed": True, "stride": 2}),
]  # fmt: skip

#: The kernels' own tests pose many more problems, cheaply: one compiled graph serves them. Here every call is a node
#: of its own to compile, so each kind of problem stands once. Other dtypes are kernels' matter, not the lowering's:
#: they stand in the kernels' tests, and float16 on a CPU in test_linear.py.
CASES = [
    *(_case(f"{name}_exact", x, w, b, exact=True, **geometry) for name, x, w, b, geometry in GEOMETRIES),
    *(
        _case(f"2d_3x3_{dtype}", *GEOMETRIES[2][1:4], dtype, **GEOMETRIES[2][4])
        for dtype in (torch.float32, torch.bfloat16)
    ),
    Case(
        "channels_last",
        conv(padding=1),
        recipe(channels_last(randn(2, 8, 6, 6)), channels_last(randn(4, 8, 3, 3))),
        length=72,
        strides=True,
    ),
    Case("contiguous_strides", conv(padding=1), recipe(randn(2, 8, 6, 6), randn(4, 8, 3, 3)), length=72,
         strides=True),
    Case(
        "mask_weight_only",
        lambda g, x, w: aten.convolution_backward(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1],
        recipe(*map(channels_last, (integers(2, 4, 6, 6), integers(2, 3, 6, 6), integers(4, 3, 3, 3)))),
        exact=True,
    ),
    Case(
        "expanded_gradient",
        lambda g, x, w: aten.convolution_backward(
            g.expand(2, 4, 6, 6), x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
        recipe(integers(2, 4, 1, 1), integers(2, 3, 6, 6), integers(4, 3, 3, 3)),
        exact=True,
    ),
    Case(
        "same_padding",
        lambda x, w: torch.nn.functional.conv2d(x, w, padding="same", dilation=(1, 2)),
        recipe(channels_last(integers(1, 3, 7, 8)), channels_last(integers(4, 3, 4, 2))),
        exact=True,
    ),
    Case(
        "double_backward",
        lambda x, w: _penalty(x, w),
        recipe(channels_last(randn(2, 3, 6, 6)), channels_last(randn(4, 3, 3, 3))),
        length=288,
        slack=8.0,  # two passes deep
    ),
    Case("empty_batch", gradients(conv(padding=1)), recipe(randn(0, 3, 6, 6), randn(4, 3, 3, 3)), exact=True),
]  # fmt: skip


def _penalty(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = torch.nn.functional.conv2d(x, w, padding=1)
    (gradient,) = torch.autograd.grad((y * y).sum(), [x], create_graph=True)
    return list(torch.autograd.grad((gradient * gradient).sum(), [x, w]))


#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "2d_stem_exact", "2d_depthwise_exact", "transposed_grouped_exact", "transposed_3d_exact",
    "2d_3x3_torch.float32", "contiguous_strides",
    "2d_3x3_torch.bfloat16",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="convolution")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


BACKWARD = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])

BAD = [
    ("grad_output", (2, 4, 5, 5), (2, 3, 6, 6), (4, 3, 3, 3), BACKWARD),
    ("stride", (2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3), (None, [0, 1], *BACKWARD[2:])),
    ("dilation", (2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3), (*BACKWARD[:3], [1, -1], *BACKWARD[4:])),
    ("padding", (2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3), (*BACKWARD[:2], [-1, 0], *BACKWARD[3:])),
    ("groups", (2, 4, 4, 4), (2, 4, 6, 6), (4, 3, 3, 3), BACKWARD),
    ("output_padding", (2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3), (*BACKWARD[:5], [1, 1], *BACKWARD[6:])),
]  # fmt: skip


@pytest.mark.parametrize(("word", "grad", "x", "w", "rest"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_arguments_raise_before_anything_is_built(
    word: str, grad: tuple[int, ...], x: tuple[int, ...], w: tuple[int, ...], rest: tuple[Any, ...]
) -> None:
    graph = torch.fx.Graph()
    nodes = []
    for name, shape in (("grad", grad), ("x", x), ("w", w)):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        nodes.append(node)
    call = graph.call_function(aten.convolution_backward.default, (*nodes, *rest))
    call.meta["val"] = (nodes[1].meta["val"], nodes[2].meta["val"], None)
    graph.output(call)
    with pytest.raises(InvalidArgumentError, match=word):
        refusals(torch.fx.GraphModule(torch.nn.Module(), graph), {}, listed=True)


def test_dtype_mismatch_raises() -> None:
    gm = trace(conv(padding=1), [torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)])
    _x, w = gm.graph.find_nodes(op="placeholder")
    w.meta["val"] = w.meta["val"].to(torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=r"weight has dtype torch\.bfloat16"):
        refusals(gm, {}, listed=True)


def test_tf32_follows_pytorchs_setting_for_cudnn() -> None:
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            assert allows_tf32() is allowed


@pytest.mark.parametrize(
    ("x", "w", "geometry"),
    [
        ((2, 8, 9, 9), (24, 1, 3, 3), {"padding": 1, "stride": 2, "groups": 8}),
        ((2, 24, 5, 5), (24, 2, 3, 3), {"transposed": True, "stride": 2, "groups": 12}),
        ((2, 6, 15), (12, 1, 4), {"groups": 6}),
    ],
    ids=["2d", "groups of two", "1d"],
)
def test_repeated_channels_give_the_same(
    x: tuple[int, ...], w: tuple[int, ...], geometry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several filters for each channel, as on a GPU a plain depthwise convolution of repeated channels."""
    calls: list[bool] = []

    def multiplied(filters: int, group_channels: int, groups: int, on_gpu: bool) -> bool:
        calls.append(_is_multiplied(filters, group_channels, groups, True))
        return calls[-1]

    monkeypatch.setattr("torch_max_backend.lowering.convolution._is_multiplied", multiplied)
    torch.compiler.reset()
    torch.manual_seed(0)
    operands = [torch.randint(-2, 3, shape).float().requires_grad_() for shape in (x, w)]
    wanted = conv(**geometry)(*operands)
    found = torch.compile(conv(**geometry), backend="max", options={"fallback": "error"})(*operands)
    assert torch.equal(found, wanted) and any(calls) is (w[1] == 1)
    dy = torch.randint(-2, 3, wanted.shape).float()
    gradients_of = [torch.autograd.grad(each, operands, dy) for each in (found, wanted)]
    assert all(map(torch.equal, *gradients_of))


@pytest.mark.parametrize("transposed", [False, True])
def test_data_gradients_of_few_channels_and_many_phases_are_widened(transposed: bool) -> None:
    """On a GPU, whose kernels for 16 bits have up to sixteen phases; a CPU stands for one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 24, 32), torch.randn(16, 3, 8, 8) / 8
    if transposed:
        x = torch.randn(2, 16, 3, 4)
    operands = [each.bfloat16().requires_grad_() for each in (x, w)]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv_transpose2d(x, w, stride=8) if transposed else torch.conv2d(x, w, stride=(8, 4))

    name = "torch_max_backend.lowering.convolution.is_widened"
    widened = mock.patch(name, lambda problem, dtype, _: is_widened(problem, dtype, True))
    with widened, backend.recorded_graphs() as graphs:
        found = torch.compile(function, backend="max", options={"fallback": "error"})(*operands)
        gradients = torch.autograd.grad(found, operands, torch.ones_like(found))
    # Eager PyTorch's own gradient may be further from float64: it adds up in bfloat16 on a CPU without AVX512.
    exact = [each.detach().double().requires_grad_() for each in operands]
    wanted = function(*exact)
    for result, expected in zip(
        (found, *gradients), (wanted, *torch.autograd.grad(wanted, exact, torch.ones_like(wanted))), strict=True
    ):
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)
    kernels = {each.symbol for each in launched_functions(graphs) if "conv_dgrad" in each.symbol}
    assert kernels and all("float32" in symbol for symbol in kernels)


def test_data_gradients_run_after_the_others() -> None:
    """MAX reuses a gradient's memory when all its readers are known to have run: no gradient of a filter or a bias may
    be left to the end. No compilation here."""

    def function(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            y = torch.conv2d(y, w, b, padding=1)
        return torch.autograd.grad(y.square().sum(), parameters)

    parameters = [torch.randn(shape, requires_grad=True) for shape in ((4, 4, 3, 3), (4,)) * 3]
    lowering.load_all()
    unit = CompilationUnit("order")
    unit.add(trace(function, [torch.randn(2, 4, 8, 8), *parameters]), "order")
    typed = unit.graphs[0].typed
    assert typed is not None
    calls = [operation for operation in typed.operations if isinstance(operation, Call)]
    # A bias's gradient is a reduction.
    made = [[call.results[0] for call in calls if kind in call.function.symbol] for kind in ("conv_wgrad", "reduction")]
    taken = [call.operands[-2:] for call in calls if call.kernel == "conv_dgrad"]
    expected = list(zip(*made, strict=True))
    assert len(expected) == 3
    assert [(first, in_memory(second)) for first, second in taken] == expected[:2]
