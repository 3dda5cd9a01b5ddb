"""ConvolutionProblem against PyTorch: shapes, refusals, and the geometry of every derived size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_max_backend.mojo_ops.convolution import DEFAULT_WORKSPACE_LIMIT, workspace_limit
from torch_max_backend.problems.convolution import ConvolutionProblem, Gemm, Pass


@st.composite
def aten_arguments(draw: st.DrawFn) -> dict:
    """Arguments of aten.convolution, mostly legal."""
    rank = draw(st.integers(1, 3))

    def several(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    groups = draw(st.integers(1, 3))
    c, k = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    filter_size = several(1, 4)
    weight = [c, k // groups, *filter_size] if transposed else [k, c // groups, *filter_size]
    return {
        "input_shape": [draw(st.integers(0, 3)), c, *several(1, 12)],
        "weight_shape": weight,
        "stride": several(1, 4),
        "padding": several(0, 3),
        "dilation": several(1, 3),
        "transposed": transposed,
        "output_padding": several(0, 2) if transposed else [0] * rank,
        "groups": groups,
    }


def meta_shape(arguments: dict) -> torch.Size | None:
    """The shape that PyTorch's meta function gives, None where it refuses or an extent would be empty."""
    x = torch.empty(arguments["input_shape"], device="meta")
    w = torch.empty(arguments["weight_shape"], device="meta")
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    try:
        shape = torch.ops.aten.convolution(x, w, None, *(arguments[name] for name in names)).shape
    except RuntimeError:
        return None
    return shape if min(shape[2:]) > 0 else None


@settings(max_examples=400, deadline=None)
@given(aten_arguments())
def test_output_shapes_are_pytorchs(arguments: dict) -> None:
    expected = meta_shape(arguments)
    if expected is None:
        return
    too_much = any(
        extra >= max(stride, dilation)
        for extra, stride, dilation in zip(
            arguments["output_padding"], arguments["stride"], arguments["dilation"], strict=True
        )
    )
    if too_much:
        # The meta function lets it pass, the eager op refuses it.
        with pytest.raises(ValueError, match="output_padding"):
            ConvolutionProblem.from_aten(**arguments)
        return
    problem = ConvolutionProblem.from_aten(**arguments)
    assert problem.aten_output_shape == tuple(expected)
    assert problem.aten_input_shape == tuple(arguments["input_shape"])
    assert problem.aten_weight_shape == tuple(arguments["weight_shape"])
    problem.check_grad_output(expected)
    with pytest.raises(ValueError, match="grad_output has shape"):
        problem.check_grad_output([*expected[:-1], expected[-1] + 1])


@settings(max_examples=200, deadline=None)
@given(aten_arguments())
def test_what_pytorch_refuses_is_refused(arguments: dict) -> None:
    if not arguments["transposed"] and meta_shape(arguments) is None:
        with pytest.raises(ValueError, match="must be"):
            ConvolutionProblem.from_aten(**arguments)


@settings(max_examples=200, deadline=None)
@given(aten_arguments())
def test_windows_tile_the_padded_input(arguments: dict) -> None:
    """The implied right padding is what the last window reaches, and one stride more would be another output."""
    try:
        problem = ConvolutionProblem.from_aten(**arguments)
    except ValueError:
        return
    axes = zip(
        problem.input_size,
        problem.filter_size,
        problem.output_size,
        problem.stride,
        problem.dilation,
        problem.padding,
        problem.right_padding,
        strict=True,
    )
    for extent, taps, outputs, stride, dilation, left, right in axes:
        window = dilation * (taps - 1) + 1
        assert left + extent + right == (outputs - 1) * stride + window
        if not problem.transposed:
            assert left - stride < right <= left
    products = {pass_: problem.gemm(pass_) for pass_ in Pass}
    assert 2 * products[Pass.FPROP].m * products[Pass.FPROP].n * products[Pass.FPROP].k * problem.groups == (
        problem.flops
    )
    assert products[Pass.WGRAD].k == products[Pass.FPROP].m


def test_roles_of_a_transposed_convolution_are_swapped() -> None:
    arguments = ([4, 256, 28, 28], [256, 128, 2, 2], [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    problem = ConvolutionProblem.from_aten(*arguments)
    assert (problem.forward_pass, problem.grad_input_pass) == (Pass.DGRAD, Pass.FPROP)
    assert (problem.c, problem.k) == (128, 256)
    assert (problem.input_size, problem.output_size) == ((1, 56, 56), (1, 28, 28))


def test_sizes_of_composable_kernels_default_problem() -> None:
    problem = ConvolutionProblem.from_sizes(128, 128, 256, (71, 71), (3, 3), stride=(2, 2), padding=(1, 1))
    assert problem.output_size == (1, 36, 36)
    assert problem.flops == 2 * 128 * 36 * 36 * 256 * 128 * 9
    assert problem.gemm(Pass.DGRAD) == Gemm(128 * 71 * 71, 128, 256 * 9, 1)
    assert problem.bytes(2) == 2 * (128 * 71 * 71 * 128 + 256 * 9 * 128 + 128 * 36 * 36 * 256)


def test_right_padding_may_differ() -> None:
    problem = ConvolutionProblem.from_sizes(1, 1, 1, (6, 6), (2, 2), padding=(0, 0), right_padding=(0, 1))
    assert problem.output_size == (1, 5, 6)
    assert problem.right_padding == (0, 0, 1)


BAD = [
    ("stride", {"stride": [0, 1]}, r"stride = \(1, 0, 1\): every value must be at least 1"),
    ("dilation", {"dilation": [1, -1]}, "dilation = "),
    ("padding", {"padding": [-1, 0]}, "padding = "),
    ("groups", {"groups": 0}, "groups = 0"),
    ("divisibility", {"groups": 3, "input_shape": [1, 12, 8, 8]}, r"weight.size\(0\) = 8: must be divisible"),
    ("channels", {"input_shape": [1, 5, 8, 8]}, "input has 5 channels"),
    ("output_padding", {"output_padding": [1, 0]}, "output_padding = .*: must be 0 unless"),
    ("rank", {"weight_shape": [8, 4, 3]}, "weight has shape"),
    ("window", {"input_shape": [1, 4, 2, 8]}, "input height = 2"),
    ("count", {"stride": [1, 1, 1]}, "stride = .*1 or 2 values"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "input_shape": [1, 4, 8, 8],
        "weight_shape": [8, 4, 3, 3],
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
    }
    with pytest.raises(ValueError, match=message):
        ConvolutionProblem.from_aten(**{**arguments, **change})


def test_copies_of_odd_channels_have_room_on_a_gpu() -> None:
    """R(2+1)D's 230 channels at batch 64: y is copied in rows of 232, its filter too."""
    sizes = {"stride": [1, 2, 2], "padding": [0, 1, 1]}
    problem = ConvolutionProblem.from_sizes(64, 64, 230, [16, 56, 56], [1, 3, 3], **sizes)
    copies = 2 * (64 * 16 * 28 * 28 * 232 + 232 * 9 * 64)
    assert copies > DEFAULT_WORKSPACE_LIMIT
    assert copies <= workspace_limit(problem, 2, on_gpu=True) <= copies + DEFAULT_WORKSPACE_LIMIT
    assert workspace_limit(problem, 2, on_gpu=False) == DEFAULT_WORKSPACE_LIMIT
    whole = ConvolutionProblem.from_sizes(64, 64, 232, [16, 56, 56], [1, 3, 3], **sizes)
    grouped = ConvolutionProblem.from_sizes(64, 46, 230, [16, 56, 56], [1, 3, 3], groups=2, **sizes)
    for other in (whole, grouped):
        assert workspace_limit(other, 2, on_gpu=True) == DEFAULT_WORKSPACE_LIMIT


def test_few_channels_have_room_for_a_copy_on_a_gpu() -> None:
    """nnU-Net's first stage: a row of taps is taken as channels."""
    sizes = {"stride": [1], "padding": [1]}
    first = ConvolutionProblem.from_sizes(4, 32, 32, [128] * 3, [3] * 3, **sizes)
    assert workspace_limit(first, 2, on_gpu=True) > 2 * 4 * 128**3 * 32 > DEFAULT_WORKSPACE_LIMIT
    pointwise = ConvolutionProblem.from_sizes(2, 32, 32, [128] * 3, [1] * 3, stride=[1], padding=[0])
    second = ConvolutionProblem.from_sizes(2, 64, 64, [128] * 3, [3] * 3, **sizes)
    for other in (pointwise, second):
        assert workspace_limit(other, 2, on_gpu=True) == DEFAULT_WORKSPACE_LIMIT


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_large_filters_have_room_on_a_cpu(itemsize: int) -> None:
    """VGG's first linear layer: packed, and as sums of a 16-bit gradient, it is larger than the default."""
    rows = {"stride": [1], "padding": [0]}
    linear = ConvolutionProblem.from_sizes(128, 25088, 4096, [1], [1], **rows)
    packed = 25088 * 4096 * max(itemsize, 4)
    assert DEFAULT_WORKSPACE_LIMIT < packed <= workspace_limit(linear, itemsize, on_gpu=False) < 2 * packed
    grouped = ConvolutionProblem.from_sizes(128, 25088, 4096, [1], [1], groups=16, **rows)
    assert workspace_limit(grouped, itemsize, on_gpu=False) == DEFAULT_WORKSPACE_LIMIT
