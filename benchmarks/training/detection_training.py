"""Training steps of torchvision's detection and flow models, compiled and in eager PyTorch, beside float64.

    python -m benchmarks detection_training fcos_resnet50_fpn [--device cuda] [--size 128] [--steps 3]

Weights are random. A line for each step has its seconds, the graphs that it built and those that Dynamo traced, and the
losses; the first one also how far the gradients are from those of float64 (not of RAFT, which computes in float32
alone). Exit status 1 where a loss differs by more than a hundredth, or gradients are three times as far from float64 as
eager PyTorch's.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.optical_flow import raft_small
from torchvision.ops import MultiScaleRoIAlign

from torch_max_backend import backend

MODELS = (
    "fcos_resnet50_fpn", "retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large", "raft_small", "tiny_rcnn", "tiny_retinanet",
)  # fmt: skip
CLASSES = 5
Gradients = dict[str, torch.Tensor]


class _Backbone(nn.Module):
    """Two convolutions, an eighth of the image's height and width."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 4, 1), nn.Conv2d(16, 16, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"0": self.second(self.first(x).relu()).relu()}


def _tiny_rcnn(size: int) -> nn.Module:
    """A Faster R-CNN whose graphs are small: proposals, nms, regions and heads as the large one has them."""
    return detection.FasterRCNN(
        _Backbone(),
        min_size=size,
        max_size=size * 5 // 4,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=60,
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_head=nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU()),
        box_predictor=FastRCNNPredictor(32, CLASSES),
        box_batch_size_per_image=32,
    )


def _tiny_retinanet(size: int) -> nn.Module:
    """A RetinaNet of one level."""
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    return detection.RetinaNet(_Backbone(), CLASSES, min_size=size, max_size=size * 5 // 4, anchor_generator=anchors)


def model_of(name: str, size: int) -> nn.Module:
    """A model of ``MODELS`` for images of about ``size`` pixels, without dropout."""
    if name == "raft_small":
        model: nn.Module = raft_small(weights=None)
    elif name == "tiny_rcnn":
        model = _tiny_rcnn(size)
    elif name == "tiny_retinanet":
        model = _tiny_retinanet(size)
    else:
        options = {} if name.startswith("ssd") else {"min_size": size, "max_size": size * 5 // 4}
        make: Callable[..., nn.Module] = getattr(detection, name)
        model = make(weights=None, weights_backbone=None, num_classes=CLASSES, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch_of(name: str, size: int, seed: int) -> list[Any]:
    """What the model takes: two images with two to four boxes each, or two frames."""
    chance = torch.Generator().manual_seed(seed)
    if name == "raft_small":
        return [torch.rand(1, 3, max(size, 128), max(size, 128), generator=chance) * 2 - 1 for _ in range(2)]
    images, targets = [], []
    for number in range(2):
        count = 2 + (seed + number) % 3
        first = torch.rand(count, 2, generator=chance) * size / 2
        boxes = torch.cat([first, first + size / 12 + torch.rand(count, 2, generator=chance) * size / 3], 1)
        labels = torch.randint(1, CLASSES, (count,), generator=chance)
        masks = (torch.rand(count, size, size, generator=chance) > 0.5).to(torch.uint8)
        images.append(torch.rand(3, size, size, generator=chance))
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return [images, targets]


def placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A batch on a device, its floats in a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {key: placed(each, device, dtype) for key, each in value.items()}
    return [placed(each, device, dtype) for each in value]


def step(model: Callable[..., Any], parameters: nn.Module, batch: Any, seed: int) -> tuple[Any, Gradients]:
    """The losses and the gradients of a forward and a backward pass."""
    torch.manual_seed(seed)
    out = model(*batch)
    losses = out if isinstance(out, dict) else {f"flow {n}": flow.abs().mean() for n, flow in enumerate(out[-2:])}
    parameters.zero_grad()
    torch.stack(list(losses.values())).sum().backward()
    gradients = {name: p.grad.clone() for name, p in parameters.named_parameters() if p.grad is not None}
    return {name: float(loss.detach()) for name, loss in losses.items()}, gradients


def error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm."""
    off = sum(float((found[name].cpu().double() - wanted[name].cpu()).norm()) ** 2 for name in wanted)
    return (off / sum(float(each.cpu().norm()) ** 2 for each in wanted.values())) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, default=128, help="height and width of an image")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    eager = model_of(args.model, args.size).to(device)
    ours, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    compiled = torch.compile(ours, backend="max")
    wrong = False
    with backend.recorded_graphs() as graphs:
        for number in range(args.steps):
            batch = batch_of(args.model, args.size, number)
            given = placed(batch, device, torch.float32)
            before = len(graphs), counters["stats"]["unique_graphs"]
            start = time.perf_counter()
            losses, gradients = step(compiled, ours, given, number)
            middle = time.perf_counter()
            wanted, theirs = step(eager, eager, given, number)
            seconds = middle - start, time.perf_counter() - middle
            made = len(graphs) - before[0], counters["stats"]["unique_graphs"] - before[1]
            wrong |= any(abs(losses[name] - loss) > 0.01 * max(1.0, abs(loss)) for name, loss in wanted.items())
            print(
                f"step {number}: max {seconds[0]:.1f} s, eager {seconds[1]:.1f} s; {made[0]} graphs built, {made[1]} "
                f"traced; losses {_rounded(losses)}, eager {_rounded(wanted)}; gradients apart "
                f"{error(gradients, theirs):.1e}",
                flush=True,
            )
            if number == 0 and args.model != "raft_small":
                _, exact = step(wide, wide, placed(batch, device, torch.float64), number)
                far = error(gradients, exact), error(theirs, exact)
                wrong |= far[0] > 3 * far[1] + 1e-4
                print(f"gradients from float64: max {far[0]:.1e}, eager {far[1]:.1e}", flush=True)
    return int(wrong)


def _rounded(losses: Mapping[str, float]) -> dict[str, float]:
    return {name: round(loss, 4) for name, loss in losses.items()}


if __name__ == "__main__":
    sys.exit(main())
