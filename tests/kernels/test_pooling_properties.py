"""The pooling kernels on problems that nobody chose: hypothesis, PyTorch's own OpInfo samples, and gradcheck."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.kernels.test_pooling import (
    F32,
    F64,
    LAYOUTS,
    Pools,
    Window,
    assert_close,
    max_reference,
    scatter_reference,
    whole_numbers,
)
from tests.operators.database import op_db
from torch_max_backend.problems.pooling import AdaptivePoolingProblem, PoolingProblem

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """A pooling of one to three axes that PyTorch takes."""
    rank = draw(st.integers(1, 3))
    largest = {1: 70, 2: 24, 3: 9}[rank]

    def axes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    # The windows that kernels know by heart come up as often as all others.
    kernel, stride = draw(st.sampled_from([(2, 2), (3, 2), (3, 1), (0, 0)]))
    kernels = (kernel,) * rank if kernel else axes(1, 5)
    strides = (stride,) * rank if stride else axes(1, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernels)
    dilation = axes(1, 3) if draw(st.integers(0, 3)) == 0 else (1,) * rank
    window = Window(
        "drawn",
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3, 4, 8, 12, 17])),
        axes(1, largest),
        kernels,
        strides,
        padding,
        dilation,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([None, None, -3, 2])) if rank > 1 else None,
    )
    try:
        window.problem("max")
        window.problem("avg")
    except ValueError:
        assume(False)
    return window


#: Its only window along H lies wholly in padding.
EMPTY_WINDOW = Window("empty", 1, 1, (2, 1, 2), (2, 2, 2), (2, 2, 2), (0, 1, 0), (1, 2, 1))
#: All windows lie in padding along W: their indices name pixels of the next row, or of the next slab.
EMPTY_COLUMNS = Window("empty_columns", 2, 3, (1, 4, 1), (1, 1, 2), (1, 1, 1), (0, 0, 1), (1, 1, 2))
EMPTY_ROWS = Window("empty_rows", 2, 2, (3, 1, 2), (2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 2, 3))
EMPTY_SLABS = Window("empty_slabs", 1, 3, (3, 2, 1), (1, 1, 2), (1, 1, 1), (0, 0, 1), (1, 1, 2))


@EXAMPLES
@example(case=EMPTY_WINDOW, layout="contiguous", ties=False, seed=0)
@example(case=EMPTY_COLUMNS, layout="contiguous", ties=False, seed=0)
@example(case=EMPTY_ROWS, layout="channels_last", ties=False, seed=0)
@example(case=EMPTY_SLABS, layout="contiguous", ties=False, seed=0)
@given(case=windows(), layout=st.sampled_from(LAYOUTS), ties=st.booleans(), seed=st.integers(0, 2**31))
def test_max_of_drawn_windows(pools: Pools, case: Window, layout: str, ties: bool, seed: int) -> None:
    """Forward to the bit; gradients of whole numbers to the bit, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    for dtype in pools.dtypes:
        shape = (case.n, case.c, *case.size)
        x = whole_numbers(shape, dtype, generator) if ties else torch.randn(shape, generator=generator).to(dtype)
        y, indices = max_reference(x, case)
        dy = whole_numbers(tuple(y.shape), dtype, generator)
        got = pools.maxima(x, dy, indices, case.problem("max"), layout)
        assert torch.equal(got.y.double(), y)
        assert torch.equal(got.indices, indices)
        wanted = scatter_reference(dy, indices, x.shape)
        assert torch.equal(got.dx.double(), wanted)
        assert got.dx_of_offsets is not None
        # A window that lies wholly in padding has no tap to name.
        named = dy.where(y.isfinite(), torch.zeros((), dtype=dtype))
        assert torch.equal(got.dx_of_offsets.double(), scatter_reference(named, indices, x.shape))


@EXAMPLES
@given(case=windows(), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**31))
def test_avg_of_drawn_windows(pools: Pools, case: Window, layout: str, seed: int) -> None:
    problem = case.problem("avg")
    generator = torch.Generator().manual_seed(seed)
    for dtype in pools.dtypes:
        x = torch.randn((case.n, case.c, *case.size), generator=generator).to(dtype)
        leaf = x.double().clone().requires_grad_()
        y = average(leaf, problem)
        dy = torch.randn(y.shape, generator=generator).to(dtype)
        (dx,) = torch.autograd.grad(y, leaf, dy.double())
        got = pools.averages(x, dy, problem, layout)
        # A divisor may be smaller than the window, so sums are larger than one.
        scale = max(1.0, problem.window_size / abs(problem.divisor_override or problem.window_size))
        assert_close(got[0] / scale, y.detach() / scale, problem.window_size)
        assert_close(got[1] / scale, dx / scale, problem.windows_above)


def average(x: torch.Tensor, problem: PoolingProblem) -> torch.Tensor:
    """PyTorch's average of the problem; problems that PyTorch refuses are not drawn again."""
    rank = problem.rank
    window, stride, padding = (axis[3 - rank :] for axis in (problem.window, problem.stride, problem.padding))
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    override = (problem.divisor_override,) if rank > 1 else ()
    try:
        return pool(x, window, stride, padding, problem.ceil_mode, problem.count_include_pad, *override)
    except RuntimeError as refusal:
        # ATen's check of the extents knows no ceil mode.
        assert "smaller than kernel size" in str(refusal)
        assume(False)
        raise


def samples(name: str, most: int) -> list[Any]:
    """OpInfo's float32 samples of an op, thinned out evenly to `most`."""
    (info,) = (op for op in op_db if op.name == name and not op.variant_test_name)
    every = list(info.sample_inputs("cpu", F32, requires_grad=False))
    return every[:: math.ceil(len(every) / most)]


def bound_arguments(rank: int, sample: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A sample's arguments by name."""
    given = dict(zip(names, sample.args, strict=False)) | sample.kwargs
    return {name: value for name, value in given.items() if name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_opinfo_max(pools: Pools, rank: int, layout: str) -> None:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    checked = 0
    for sample in samples(f"nn.functional.max_pool{rank}d", 250):
        x = sample.input
        arguments = bound_arguments(rank, sample, names)
        if x.dim() != rank + 2 or 0 in x.shape:
            continue
        case = Window(
            "opinfo", *x.shape[:2], tuple(x.shape[2:]), arguments["kernel_size"], arguments.get("stride"),
            arguments.get("padding", 0), arguments.get("dilation", 1), arguments.get("ceil_mode", False),
        )  # fmt: skip
        leaf = x.clone().requires_grad_()
        pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
        y, indices = pool(leaf, **arguments, return_indices=True)
        dy = torch.arange(y.numel(), dtype=F32).reshape(y.shape) % 7 - 3
        (dx,) = torch.autograd.grad(y, leaf, dy)
        got = pools.maxima(x, dy, indices, case.problem("max"), layout)
        assert torch.equal(got.y, y.detach()) and torch.equal(got.indices, indices), sample
        assert got.dx_of_offsets is not None
        assert torch.equal(got.dx, dx) and torch.equal(got.dx_of_offsets, dx), sample
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_opinfo_avg(pools: Pools, rank: int, layout: str) -> None:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    checked = 0
    for sample in samples(f"nn.functional.avg_pool{rank}d", 100):
        x = sample.input
        if x.dim() != rank + 2 or 0 in x.shape:
            continue
        arguments = bound_arguments(rank, sample, names)
        problem = PoolingProblem.from_aten(
            tuple(x.shape[2:]), arguments["kernel_size"], arguments.get("stride"), arguments.get("padding", 0), 1,
            arguments.get("ceil_mode", False), arguments.get("count_include_pad", True),
            arguments.get("divisor_override"),
        )  # fmt: skip
        leaf = x.double().requires_grad_()
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
        y = pool(leaf, **arguments)
        dy = torch.arange(y.numel(), dtype=F32).reshape(y.shape) % 7 - 3
        (dx,) = torch.autograd.grad(y, leaf, dy.double())
        got = pools.averages(x, dy, problem, layout)
        torch.testing.assert_close(got[0].double(), y.detach(), rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(got[1].double(), dx, rtol=2e-6, atol=2e-5)
        checked += 1
    assert checked > 4


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_opinfo_adaptive(pools: Pools, rank: int) -> None:
    name = f"adaptive_max_pool{rank}d"
    checked = 0
    for sample in samples(f"nn.functional.{name}", 40):
        x = sample.input
        if x.dim() != rank + 2 or 0 in x.shape:
            continue
        size = sample.args[0] if sample.args else sample.kwargs["output_size"]
        problem = AdaptivePoolingProblem.from_aten(tuple(x.shape[2:]), size)
        leaf = x.double().requires_grad_()
        y = getattr(functional, name)(leaf, size)
        dy = torch.arange(y.numel(), dtype=F32).reshape(y.shape) % 7 - 3
        (dx,) = torch.autograd.grad(y, leaf, dy.double())
        values, _, gradient = pools.adaptive_maxima(x, dy, problem, "channels_last")
        torch.testing.assert_close(values.double(), y.detach(), rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(gradient.double(), dx, rtol=2e-6, atol=2e-5)
        checked += 1
    assert checked


class _Pool(torch.autograd.Function):
    """One op forward and backward through the kernels, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pools: Pools, family: str, case: Window, layout: str) -> torch.Tensor:
        problem, x = case.problem(family), x.detach()
        shape = torch.Size((*x.shape[:2], *problem.output_spatial))
        dy = torch.zeros(shape, dtype=F64)
        if family == "max":
            y, indices, *_ = pools.maxima(x, dy, torch.zeros(shape, dtype=torch.int64), problem, layout)
            ctx.save_for_backward(x, indices)
        else:
            y, _ = pools.averages(x, dy, problem, layout)
            ctx.save_for_backward(x)
        ctx.arguments = (pools, family, case, layout)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pools, family, case, layout = ctx.arguments
        x, *indices = (t.detach() for t in ctx.saved_tensors)
        if family == "max":
            dx = pools.maxima(x, dy, indices[0], case.problem(family), layout).dx
        else:
            _, dx = pools.averages(x, dy, case.problem(family), layout)
        return dx, None, None, None, None


GRADCHECKED = (
    Window("2d", 1, 4, (6, 7), 3, 2, 1),
    Window("2d_ceil", 2, 1, (5, 4), (2, 3), (2, 1), (0, 1), ceil_mode=True, count_include_pad=False),
    Window("1d", 1, 2, (11,), 3, 1, 1),
    Window("3d", 1, 2, (4, 3, 5), 3, 2, 1),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ("max", "avg"))
@pytest.mark.parametrize("case", GRADCHECKED, ids=lambda case: case.id)
def test_gradcheck(pools: Pools, case: Window, family: str, layout: str) -> None:
    """Numerical derivatives in float64; no two values are near enough for one to overtake the other."""
    if F64 not in pools.dtypes:
        pytest.skip("float64 is supported on the CPU only")
    count = math.prod((case.n, case.c, *case.size))
    order = random.Random(0).sample(range(count), count)
    x = (torch.tensor(order, dtype=F64) / 7).reshape(case.n, case.c, *case.size).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: _Pool.apply(x, pools, family, case, layout), (x,))
