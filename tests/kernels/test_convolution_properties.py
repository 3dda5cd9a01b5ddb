"""The convolution kernels on problems that nobody wrote down: drawn ones, and PyTorch's own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.test_convolution import BF16, F16, F32, F64, OPS, ConvolutionCase, Convolutions
from tests.operators.database import SampleInput, op_db
from torch_max_backend.mojo_ops.convolution import DEFAULT_WORKSPACE_LIMIT, Geometry
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

aten = torch.ops.aten


@st.composite
def problems(draw: st.DrawFn) -> ConvolutionCase:
    """Any problem of moderate size: every rank, grouping, stride, dilation, padding and dtype."""
    rank = draw(st.integers(1, 3))
    most = (40, 14, 7)[rank - 1]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups = draw(st.sampled_from([1, 1, 2, 3, 8, 16]))
    # Channels of one group: one, few, a vector's worth, odd numbers beyond.
    group_c = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 13, 16, 32]))
    group_k = draw(st.sampled_from([group_c, 1, 2, 5, 8, 17, 33]))
    size, taps = each(1, most), each(1, 5)
    stride, dilation, padding = each(1, 4), each(1, 3), each(0, 4)
    largest = []
    for extent, tap, step, gap, pad in zip(size, taps, stride, dilation, padding, strict=True):
        room = extent + 2 * pad - gap * (tap - 1) - 1
        assume(room >= 0)
        largest.append(room // step + 1)
    # Fewer windows than fit: a right padding that is smaller than the left one, or negative.
    outputs = tuple(draw(st.integers(max(1, most - 1), most)) for most in largest) if draw(st.booleans()) else None
    return ConvolutionCase(
        "drawn",
        draw(st.integers(0, 3)),
        groups * group_c,
        groups * group_k,
        size,
        taps,
        stride,
        padding,
        dilation,
        groups,
        outputs,
        draw(st.sampled_from([F32, F32, BF16, F16, F64])),
        draw(st.sampled_from([DEFAULT_WORKSPACE_LIMIT, DEFAULT_WORKSPACE_LIMIT, 4096, 0])),
        draw(st.booleans()),
    )


@settings(max_examples=100, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(case=problems(), seed=st.integers(0, 2**31 - 1), whole=st.booleans())
def test_drawn_problems(convolutions: Convolutions, case: ConvolutionCase, seed: int, whole: bool) -> None:
    """Whole numbers come out exactly, normal ones near float64."""
    assume(case.dtype in convolutions.dtypes and not (case.taps_inside and convolutions.device != "cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors = case.inputs(
        lambda shape: (
            torch.randint(-2, 3, shape, generator=generator) if whole else torch.randn(shape, generator=generator)
        )
    )
    reference = case.reference(tensors)
    for op, result in zip(OPS, convolutions.one(case, tensors), strict=True):
        if whole:
            assert torch.equal(result, reference[op].to(case.dtype)), op
            continue
        narrow = torch.finfo(case.dtype).eps
        wide = torch.finfo(F64 if case.dtype == F64 else F32).eps
        length = case.reduction(op) + 4
        bound = (narrow + wide * length**0.5) * reference[op].abs() + 2 * wide * length
        assert ((result.double() - reference[op]).abs() <= bound).all(), op


class _OnOurKernels(Interpreter):
    """Runs a traced function with the convolutions on our kernels, everything else in PyTorch."""

    def __init__(self, module: torch.fx.GraphModule, convolutions: Convolutions) -> None:
        super().__init__(module)
        self.convolutions = convolutions
        self.calls = 0

    def run_node(self, n: Node) -> Any:
        if n.target is aten.convolution.default:
            args, _ = self.fetch_args_kwargs_from_env(n)
            x, w, bias, *geometry = args
            problem = ConvolutionProblem.from_aten(list(x.shape), list(w.shape), *geometry)
            y = self._pass(problem, problem.forward_pass, x, w)
            return y if bias is None else y + bias.reshape(-1, *[1] * (y.dim() - 2))
        if n.target is aten.convolution_backward.default:
            args, _ = self.fetch_args_kwargs_from_env(n)
            dy, x, w, _sizes, *geometry, mask = args
            problem = ConvolutionProblem.from_aten(list(x.shape), list(w.shape), *geometry)
            small, large = (x, dy) if problem.transposed else (dy, x)
            return (
                self._pass(problem, problem.grad_input_pass, dy, w) if mask[0] else None,
                self._pass(problem, Pass.WGRAD, large, small) if mask[1] else None,
                dy.sum([0, *range(2, dy.dim())]) if mask[2] else None,
            )
        return super().run_node(n)

    def _pass(self, problem: ConvolutionProblem, which: Pass, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        p = problem
        self.calls += 1
        shapes = {
            "x": (p.n, *p.input_size, p.c),
            "w": (p.k, *p.filter_size, p.c // p.groups),
            "y": (p.n, *p.output_size, p.k),
        }
        names = {Pass.FPROP: "xwy", Pass.DGRAD: "ywx", Pass.WGRAD: "xyw"}[which]
        operands = {name: torch.zeros(shape, dtype=a.dtype) for name, shape in shapes.items()}
        for name, tensor in zip(names[:2], (a, b), strict=True):
            operands[name] = tensor.movedim(1, -1).reshape(shapes[name]).contiguous()
        geometry = Geometry(p.stride, p.padding, p.dilation, p.groups).numbers()
        result = self.convolutions.run_tensors([operands[name] for name in "xwy"], geometry)[OPS.index(which.value[5:])]
        target = {"x": p._x_shape, "w": p.aten_weight_shape, "y": p._y_shape}[names[2]]
        return result.movedim(-1, 1).reshape(target)


FAMILY = [
    f"nn.functional.{name}"
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
]
#: Samples that do not reach the kernels, by op: none. A sample that fails is a bug, not an entry.
EXCEPTIONS: dict[str, int] = {}


def _samples(name: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    info = next(op for op in op_db if op.name == name)
    yield from info.sample_inputs("cpu", dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILY)
def test_samples_of_pytorch(convolutions: Convolutions, name: str, dtype: torch.dtype) -> None:
    """Every sample of op_db, forward and backward, is what PyTorch makes of it."""
    if dtype not in convolutions.dtypes:
        pytest.skip(f"{dtype} does not run on {convolutions.device}")
    info = next(op for op in op_db if op.name == name)
    seen = 0
    for sample in _samples(name, dtype):
        tensors = [value for value in (sample.input, *sample.args) if isinstance(value, torch.Tensor)]
        rest = [value for value in sample.args if not isinstance(value, torch.Tensor)]
        function = _with_gradients(lambda *given, rest=rest, sample=sample: info.op(*given, *rest, **sample.kwargs))
        plain = [tensor.detach() for tensor in tensors]
        traced = make_fx(function, tracing_mode="fake")(*plain)
        interpreter = _OnOurKernels(traced, convolutions)
        ours = interpreter.run(*plain)
        wide = function(*(tensor.double() for tensor in plain))
        theirs = function(*plain)
        assert interpreter.calls >= 1, f"{sample.name}: no convolution in the graph"
        for mine, truth, eager in zip(ours, wide, theirs, strict=True):
            assert mine.shape == eager.shape
            scale = truth.abs().max() if truth.numel() else torch.tensor(0.0)
            tolerance = 3 * (eager.double() - truth).abs().max() if truth.numel() else 0.0
            bound = tolerance + 64 * torch.finfo(dtype).eps * scale
            assert ((mine.double() - truth).abs() <= bound).all(), f"{sample.args} {sample.kwargs}"
        seen += 1
    assert seen - EXCEPTIONS.get(name, 0) > 0


def _with_gradients(function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def both(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        y = function(*leaves)
        pattern = (torch.arange(y.numel(), device=y.device) * 7 % 11 - 5).to(y.dtype).reshape(y.shape)
        return [y, *torch.autograd.grad(y, leaves, pattern)]

    return both


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "normal"])
def test_tf32_rounds_factors_and_nothing_else(whole: bool) -> None:
    """float32 with TF32 allowed: whole numbers stay exact, normal ones lose what 10 bits of mantissa lose."""
    convolutions = Convolutions("cuda")
    for case in (case for case in convolutions.cases if case.dtype == F32):
        p = case.problem
        own = Geometry(p.stride, p.padding, p.dilation, p.groups, case.workspace_limit, allow_tf32=True)
        geometry = own.numbers()
        tensors = case.inputs((lambda shape: torch.randint(-2, 3, shape)) if whole else torch.randn)
        reference = case.reference(tensors)
        for op, result in zip(OPS, convolutions.run_tensors(tensors, geometry), strict=True):
            if whole:
                assert torch.equal(result, reference[op].to(F32)), (case.id, op)
            else:
                length = case.reduction(op) + 4
                bound = torch.finfo(F32).eps * (reference[op].abs() + 2 * length) + 4 * 2**-10 * length**0.5
                assert ((result.double() - reference[op]).abs() <= bound).all(), (case.id, op)


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "dtype"), [(1, F16), (2, F16), (8, F16)], ids=["dense", "grouped", "depthwise"])
def test_more_than_2_31_elements(groups: int, dtype: torch.dtype) -> None:
    """Only the last pixels, beyond what 32 bits count, hold something else than zeros."""
    convolutions = Convolutions("cuda")
    height, width, channels, rows = 16385, 16384, 8, 3
    assert height * width * channels > 2**31
    x = torch.zeros(1, 1, height, width, channels, dtype=dtype, device="cuda")
    dy = torch.zeros_like(x)
    w = torch.randint(-2, 3, (channels, 1, 1, 1, channels // groups), device="cuda").to(dtype)
    for tensor in (x, dy):
        tensor[:, :, -rows:] = torch.randint(-2, 3, (1, 1, rows, width, channels), device="cuda").to(dtype)
    # One over sqrt(pixels) would round: keep what wgrad sums exact, and in range.
    dy[:, :, -rows:, :-64] = 0
    geometry = Geometry(groups=groups).numbers()
    y, dx, dw = convolutions.run_tensors([x, w, dy], geometry, keep=True)
    tail = [tensor[:, :, -rows:].float().movedim(-1, 1)[:, :, 0].requires_grad_() for tensor in (x,)]
    filters = w[:, :, 0].float().movedim(-1, 1).requires_grad_()
    expected = torch.nn.functional.conv2d(tail[0], filters, groups=groups)
    gradients = torch.autograd.grad(expected, (tail[0], filters), dy[:, :, -rows:, :].float().movedim(-1, 1)[:, :, 0])
    for result, truth in ((y, expected), (dx, gradients[0])):
        assert torch.equal(result[:, :, -rows:].float().movedim(-1, 1)[:, :, 0], truth.detach())
        assert not result[:, :, :-rows].any()
    assert torch.equal(dw[:, :, 0].float().movedim(-1, 1), gradients[1])
