"""What entries of convolutions with a program take."""

from __future__ import annotations

from max.dtype import DType

from torch_max_backend.mojo_ops.convolution import FAMILY, Geometry
from torch_max_backend.mojo_ops.fused_convolution import FusedKernel, phases_in_store, shapes, shared_taps
from torch_max_backend.mojo_ops.normalization import FAMILY as NORMALIZATION

SHAPES = [(2, 1, 5, 6, 16), (2, 1, 7, 8, 24), (16, 1, 3, 3, 24)]
GEOMETRY = Geometry(stride=(1, 2, 1), padding=(0, 1, 1))


def test_a_call_is_those_of_convolution_program_and_sums_in_one() -> None:
    kernel = FusedKernel("conv_fprop", DType.bfloat16, "plain", sums="batch_norm_statistics", plain_sums="plain_sums")
    own = FAMILY["conv_fprop"].encoded(GEOMETRY.numbers())
    statistics = NORMALIZATION["batch_norm_statistics"].encoded([0.1, 1e-5])
    signature = kernel.signature(inputs=2)
    assert signature.name == "conv_pointwise_sums"
    assert [tensor.name for tensor in signature.results] == ["mean", "invstd", "new_mean", "new_variance", "y"]
    operands = ["input0", "input1", "old_mean", "old_variance", "x", "w"]
    assert [tensor.name for tensor in signature.operands] == operands
    numbers = kernel.numbers(own, SHAPES, statistics, [960, 0, 1])
    words = signature.words(numbers, [(name, ()) for name in "abcdefghijk"])
    assert words == [*own, *(extent for shape in SHAPES for extent in shape), *statistics, 3, 960, 0, 1, *"abcdefghijk"]
    named = signature.named([word for word in words if isinstance(word, int)])
    assert named["stride_h"] == 2 and named["momentum"] == 0.1 and named["loop_nest"] == (960, 0, 1)
    assert shapes(named) == list(map(list, SHAPES))


def test_parameters_say_which_kernel() -> None:
    kernel = FusedKernel("conv_dgrad", DType.float16, "plain", narrow=64, taps=3, max_phases=8, ahead=(1, 3))
    assert kernel.parameters == 'DType.float16, DGRAD, 64, 3, 8, "plain", False, 10'
    summing = FusedKernel("conv_fprop", DType.bfloat16, "p", sums="batch_norm_gradient_sums", plain_sums="s")
    assert summing.parameters == 'DType.bfloat16, FPROP, 0, 1, 1, "p", False, 0, PRODUCTS, "s", True'
    on_cpu = FusedKernel("conv_fprop", DType.float32, "plain", "cpu")
    assert on_cpu.parameters == 'DType.float32, "plain"' and on_cpu.entry == "conv_pointwise"


def test_copies_serve_taps_whose_pixels_are_neighbours() -> None:
    alike, source = Geometry(stride=(1, 1, 1), padding=(0, 1, 1)), (2, 1, 9, 9, 64)
    assert shared_taps(alike, source, (48, 1, 3, 3, 64)) == 3
    assert shared_taps(alike, source, (48, 1, 5, 3, 64)) == 3
    assert shared_taps(alike, source, (48, 1, 3, 5, 64)) == 1
    assert shared_taps(GEOMETRY, source, (48, 1, 3, 3, 64)) == 1
    assert shared_taps(Geometry(stride=(1, 1, 1), dilation=(1, 1, 2)), source, (48, 1, 3, 3, 64)) == 1
    # Taken in blocks of pixels.
    assert shared_taps(alike, (2, 1, 9, 9, 16), (48, 1, 3, 3, 16)) == 1


def test_a_third_axis_counts_as_the_others() -> None:
    source, taps = (2, 8, 8, 8, 64), (48, 3, 3, 3, 64)
    for stride, phases in ((1, 1), (2, 8), (3, None)):
        extent = (8 - 1) // stride + 1
        geometry = Geometry(stride=(stride,) * 3, padding=(1, 1, 1))
        result = (2, extent, extent, extent, 48)
        assert phases_in_store("conv_dgrad", DType.bfloat16, geometry, source, result, taps) == phases
    # Of few channels on both sides other kernels are faster.
    few = phases_in_store(
        "conv_fprop", DType.bfloat16, Geometry(), (2, 8, 8, 8, 32), (2, 8, 8, 8, 32), (32, 1, 1, 1, 32)
    )
    assert few is None
