"""Convolutions that are computed together with what reads their result, on a CPU, one graph for a dtype; and where
Hopper's lie in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import nn

from tests.launched import launched_functions
from torch_max_backend import backend
from torch_max_backend.ahead import compile_ahead
from torch_max_backend.fusion import convolutions
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.building import libraries
from torch_max_backend.typed_graph.operations import Call

CASES = {
    "3x3": nn.Conv2d(20, 24, 3, padding=1, bias=False),
    "few channels": nn.Conv2d(5, 24, 3, padding=1, bias=False),
    "strided": nn.Conv2d(5, 33, 3, stride=2, padding=2),
    "two groups": nn.Conv2d(6, 40, 3, groups=2),
    "depthwise": nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
    "windows": nn.Conv2d(3, 17, 2, stride=2),
}
HEIGHT, WIDTH = 48, 47
#: So large that images are copied one by one (kernels/convolution/cpu/joined_taps.mojo).
SIZES = {"few channels": (240, 241)}


class Blocks(nn.Module):
    """Convolution, batch normalization and ReLU; then a residual, as wide as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(map(copy.deepcopy, CASES.values()))
        for each in self.convolutions:
            # Of the seed that is set, not of the one that the module was imported with.
            each.reset_parameters()
        self.norms = nn.ModuleList(nn.BatchNorm2d(each.out_channels) for each in CASES.values())

    def forward(self, images: list[torch.Tensor], residuals: list[torch.Tensor]) -> list[torch.Tensor]:
        """One result for each case."""
        steps = zip(self.norms, self.convolutions, images, residuals, strict=True)
        return [torch.relu(norm(convolution(x)) + residual) for norm, convolution, x, residual in steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_normalization_residual_and_relu_are_one_launch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_LARGE_BYTES", 0)
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Blocks().eval()
    for norm in model.norms:
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None and norm.running_mean is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    model = model.to(dtype)
    # The kernels' own order: else a result may be changed while its program is computed, and stays apart for that.
    images = [
        torch.randn(2, each.in_channels, *SIZES.get(name, (HEIGHT, WIDTH))).to(dtype, memory_format=torch.channels_last)
        for name, each in CASES.items()
    ]
    with torch.no_grad():
        residuals = [torch.randn_like(each(x)) for each, x in zip(model.convolutions, images, strict=True)]
        with backend.recorded_graphs() as graphs:
            run = torch.compile(model, backend="max", options={"fallback": "error"})
            got = run(images, residuals)
        wide = copy.deepcopy(model).double()
        expected = wide([x.double() for x in images], [x.double() for x in residuals])
        eager = model(images, residuals)
    for name, result, wanted, other in zip(CASES, got, expected, eager, strict=True):
        off, allowed = ((each.double() - wanted).abs().max().item() for each in (result, other))
        rounded = torch.finfo(dtype).eps / 2 * wanted.abs().max().item()
        assert off <= 2 * allowed + rounded, name
    entries = [function.entry for function in launched_functions(graphs)]
    assert entries.count("conv_pointwise") == len(CASES) and "conv_fprop" not in entries
    # Stored first, the convolution's own results must not lie where the program reads.
    assert not any(replaced for call in fused_calls(graphs) for replaced in call.in_order.values())


class Branches(nn.Module):
    """Convolutions that read the same: their gradients are added up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(16, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.branches = nn.ModuleList(nn.Conv2d(channels, 16, 3, padding=n, dilation=n) for n in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """48 channels."""
        x = self.stem(x)
        return torch.cat([branch(x) for branch in self.branches], 1)


def test_gradients_are_written_over_what_is_added_to_them() -> None:
    """In the store of Hopper's kernels."""
    model = Branches(128).to(memory_format=torch.channels_last)
    x = torch.empty(8, 16, 64, 64, device="meta").contiguous(memory_format=torch.channels_last)
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(model, x, target="sm_90a", autocast=torch.bfloat16)
    listing = graphs[-1].executables[0].listing
    assert listing is not None and graphs[-1].name == "backward"
    # Two gradients, and a little for the third branch.
    assert listing.workspace < 2.5 * 8 * 128 * 64 * 64 * 2
    (call,) = fused_calls(graphs[-1:])
    *_, (_, operands) = call.in_order.items()
    # Neither what the convolution reads nor what is multiplied with what is stored, which begins with rows of pixels.
    rows = next(number for number, each in enumerate(call.operands) if each.shape == (8 * 64 * 64, 128))
    assert operands and max(operands) < rows


def fused_calls(graphs: Sequence[CompiledGraph]) -> list[Call]:
    """Convolutions with a program."""
    typed = [executable.built.typed for graph in graphs for executable in graph.executables]
    found = [each for graph in typed if graph is not None for each in graph.operations if isinstance(each, Call)]
    return [call for call in found if call.function.entry.startswith("conv_pointwise")]
