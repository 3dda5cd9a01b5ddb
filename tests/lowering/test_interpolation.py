"""Interpolation, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe
from torch_max_backend import backend

F = torch.nn.functional
Maker = Callable[[torch.Generator], torch.Tensor]


def last(make: Maker) -> Maker:
    """Channels-last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def made(generator: torch.Generator) -> torch.Tensor:
        x = make(generator)
        return x.contiguous(memory_format=formats[x.dim()])

    return made


def case(name: str, make: Maker, *, exact: bool = False, **options: object) -> Case:
    """Both passes of one call of F.interpolate."""
    function = gradients(lambda x: F.interpolate(x, **options))
    return Case(name, function, recipe(make), exact=exact, length=1 if exact else 64, slack=1 if exact else 4)


CASES = [
    case("nearest", last(integers(2, 3, 4, 5)), exact=True, scale_factor=2.0),
    case("nearest_exact_factor", integers(2, 3, 4, 5), exact=True, scale_factor=1.7, mode="nearest-exact"),
    case("nearest_1d", integers(2, 3, 5), exact=True, scale_factor=3.0),
    case("nearest_3d", last(integers(1, 2, 2, 3, 2)), exact=True, scale_factor=2.0),
    case("linear", randn(2, 3, 7), size=(4,), mode="linear"),
    case("bilinear", last(randn(2, 3, 4, 5)), scale_factor=2.0, mode="bilinear"),
    case("bilinear_corners", randn(2, 3, 4, 5), size=(7, 9), mode="bilinear", align_corners=True),
    case("bilinear_down", randn(1, 8, 9, 11, dtype=torch.float64), size=(4, 3), mode="bilinear"),
    case("bilinear_bf16", last(randn(2, 8, 4, 5, dtype=torch.bfloat16)), scale_factor=8.0, mode="bilinear"),
    case("bilinear_fp16", randn(2, 8, 4, 5, dtype=torch.float16), scale_factor=0.6, mode="bilinear"),
    case("one_pixel", randn(2, 8, 1, 1), size=(6, 5), mode="bilinear"),
    case("one_pixel_bf16", randn(2, 8, 1, 1, dtype=torch.bfloat16), size=(6, 5), mode="bilinear"),
    case("same_size", randn(2, 3, 4, 5), size=(4, 5), mode="bilinear"),
    case("trilinear", last(randn(1, 2, 3, 4, 5)), size=(6, 4, 7), mode="trilinear"),
    case("bicubic", randn(2, 3, 4, 5), size=(9, 7), mode="bicubic"),
    case("bilinear_antialias", last(randn(2, 3, 9, 10)), size=(4, 13), mode="bilinear", antialias=True),
    case("bicubic_antialias", randn(2, 3, 9, 10), scale_factor=0.4, mode="bicubic", antialias=True),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "nearest_1d", "nearest_3d", "linear", "bilinear_down", "bilinear_fp16", "one_pixel_bf16", "same_size", "trilinear",
    "bicubic", "bilinear_antialias",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="interpolation")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


#: Each op with the number of axes, and how F.interpolate comes to it.
MODES = {
    **{f"nearest {rank}d": (rank, {"mode": "nearest"}) for rank in (1, 2, 3)},
    **{f"nearest-exact {rank}d": (rank, {"mode": "nearest-exact"}) for rank in (1, 2, 3)},
    "linear": (1, {"mode": "linear"}),
    "bilinear": (2, {"mode": "bilinear"}),
    "trilinear": (3, {"mode": "trilinear"}),
    "bicubic": (2, {"mode": "bicubic"}),
    "bilinear, antialiased": (2, {"mode": "bilinear", "antialias": True}),
    "bicubic, antialiased": (2, {"mode": "bicubic", "antialias": True}),
}
if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
    MODES["lanczos, antialiased"] = (2, {"mode": "lanczos", "antialias": True})


@pytest.mark.parametrize("mode", MODES)
def test_symbolic_sizes(mode: str) -> None:
    """One graph for all sizes, nothing left to PyTorch, no compilation by MAX."""
    rank, options = MODES[mode]

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.7, **options) * 2

    torch._dynamo.reset()
    compiled = torch.compile(resized, backend="max", dynamic=True, options={"fallback": "error"})
    with backend.recorded_graphs() as graphs:
        for more in range(3):
            x = torch.randn(2, 3, *range(5 + more, 5 + more + rank))
            results = []
            for function in (compiled, resized):
                leaf = x.clone().requires_grad_()
                y = function(leaf)
                (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
                results.append((y, dx))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    assert all(executable.listing is not None for graph in graphs for executable in graph.executables)


def test_a_returned_result_is_converted_while_it_is_small() -> None:
    """Behind a convolution, whose values are channels-last."""
    convolution = torch.nn.Conv2d(3, 5, 1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.interpolate(convolution(x), scale_factor=8.0, mode="bilinear"), backend="max")
    x = torch.randn(2, 3, 6, 7)
    with backend.recorded_graphs() as graphs, torch.no_grad():
        y = compiled(x)
    torch.testing.assert_close(
        y, F.interpolate(convolution(x), scale_factor=8.0, mode="bilinear"), rtol=1e-4, atol=1e-5
    )
    changes = [change for graph in graphs for each in graph.executables for change in each.layout_changes]
    assert changes and all(change.shape[2:] == ("6", "7") for change in changes)


def test_whole_numbers() -> None:
    """As PyTorch's decomposition has it."""
    torch._dynamo.reset()
    x = torch.randint(0, 256, (1, 3, 4, 5), dtype=torch.uint8)
    compiled = torch.compile(lambda x: F.interpolate(x, scale_factor=2.0), backend="max")
    assert torch.equal(compiled(x), F.interpolate(x, scale_factor=2.0))


def test_a_traced_graph_leaves_pytorchs_own_kernels() -> None:
    """Other backends find the ops as they were."""
    op = torch.ops.aten.upsample_bilinear2d.default
    before = dict(op.py_kernels)
    torch._dynamo.reset()
    torch.compile(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), backend="max")(torch.ones(1, 1, 2, 2))
    assert op.py_kernels == before


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_an_empty_batch(mode: str) -> None:
    torch.compiler.reset()
    x = torch.randn(0, 3, 4, 5, requires_grad=True)
    run = torch.compile(lambda x: F.interpolate(x, size=(6, 2), mode=mode), backend="max")
    result = run(x)
    assert result.shape == (0, 3, 6, 2) and result.stride() == F.interpolate(x, size=(6, 2), mode=mode).stride()
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert gradient.shape == x.shape
