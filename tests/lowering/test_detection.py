"""torchvision's operators of detection through the backend against torchvision in float64, with all gradients."""

from __future__ import annotations

import pytest
import torch
from torchvision import ops

from tests.launched import launched_functions
from torch_max_backend import backend

#: Inside, over the whole image, of no size, over the edge and turned over.
ROIS = [[0, 1.3, 2.2, 11, 13.1], [1, 0, 0, 20, 18], [0, 5, 5, 5, 5], [1, -3, 2, 30, 9], [0, 9, 9, 2.2, 3.1]]


def _everything(
    x: torch.Tensor,
    rois: torch.Tensor,
    weight: torch.Tensor,
    grouped: torch.Tensor,
    offset: torch.Tensor,
    more: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
) -> list[torch.Tensor]:
    return [
        ops.roi_align(x, rois, (7, 5), 0.5, 2, True),
        ops.roi_align(x, rois, (3, 3), 1.0, -1, False),
        ops.roi_pool(x, rois, (3, 3), 1.0),
        ops.ps_roi_align(x, rois[:4], (3, 3), 1.0, 2),
        ops.ps_roi_pool(x, rois, (2, 3), 1.0),
        ops.deform_conv2d(x, offset, weight, bias, padding=1),
        # Groups of the convolution that do not lie in groups of offsets, and version 2.
        ops.deform_conv2d(x, more, grouped, None, (2, 1), (1, 2), (1, 2), mask),
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_all_operators(last: bool, device: str) -> None:
    """All in one graph; nothing stays in PyTorch."""
    shapes = [(2, 36, 20, 24), (10, 36, 3, 3), (8, 18, 3, 3), (2, 18, 20, 24), (2, 54, 10, 24), (2, 27, 10, 24), (10,)]
    # Gradients jump where a sample lies on a pixel: an unlucky draw is on other sides of it in float32 and in float64.
    generator = torch.Generator().manual_seed(0)
    x, *rest = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    rois = torch.tensor(ROIS, device=device)
    given = [x.contiguous(memory_format=torch.channels_last) if last else x, rois, *rest]
    wide = [each.cpu().double().requires_grad_(each is not rois) for each in given]
    wanted = _everything(*wide)
    weights = [torch.randn_like(y) for y in wanted]
    gradients = torch.autograd.grad(wanted, [each for each in wide if each.requires_grad], weights)
    leaves = [each.detach().requires_grad_(each is not rois) for each in given]
    torch._dynamo.reset()
    compiled = torch.compile(_everything, backend="max", options={"fallback": "error"}, fullgraph=True)
    with backend.recorded_graphs() as graphs:
        results = compiled(*leaves)
        found = torch.autograd.grad(
            results, [each for each in leaves if each.requires_grad], [each.to(device).float() for each in weights]
        )
    for number, (y, result) in enumerate(zip(wanted, results, strict=True)):
        torch.testing.assert_close(result.cpu().double(), y, rtol=1e-4, atol=1e-4, msg=f"result {number}")
    for number, (gradient, result) in enumerate(zip(gradients, found, strict=True)):
        torch.testing.assert_close(result.cpu().double(), gradient, rtol=1e-3, atol=1e-3, msg=f"gradient {number}")
    launched = {getattr(function, "entry", "") for function in launched_functions(graphs)}
    assert {f"{name}_{way}" for name in ("roi_align", "roi_pool", "ps_roi") for way in ("fprop", "dgrad")} <= launched
    assert {"deformable_columns", "deformable_dgrad_input", "deformable_dgrad_offset"} <= launched


def test_regions_of_no_image_and_no_regions() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, rois: ops.roi_align(x, rois, 2), backend="max", fullgraph=True)
    x = torch.randn(2, 3, 5, 5)
    for image in (2.0, -1.0, float("nan")):
        with pytest.raises(RuntimeError, match=r"rois: row 1 names image .*: there are 2"):
            compiled(x, torch.tensor([[0, 0, 0, 3, 3], [image, 0, 0, 3, 3]]))
    nowhere = torch.tensor([[0, float("nan"), 0, 3, 3], [1, 0, 0, 3, float("inf")]])
    assert torch.equal(compiled(x, nowhere)[0], torch.zeros(3, 2, 2))
    assert compiled(x, torch.zeros(0, 5)).shape == (0, 3, 2, 2)


@pytest.mark.gpu
def test_the_same_bits_where_that_is_asked_for() -> None:
    x, offset = torch.randn(2, 8, 9, 9, device="cuda"), torch.randn(2, 18, 9, 9, device="cuda") * 3
    weight, leaf = torch.randn(4, 8, 3, 3, device="cuda"), x.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: ops.deform_conv2d(x, offset, weight, padding=1), backend="max")
        found = [torch.autograd.grad(compiled(leaf).square().sum(), leaf)[0] for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0], other) for other in found[1:])
