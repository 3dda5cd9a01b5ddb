"""Dense prediction: networks of segmentation with a class for each pixel, and optical flow.

torchvision's, those of transformers, and HRNet of timm with the head of Wang 2019. Logits are resized to the image in
the model, as its authors' training scripts do before the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.suites.case import Batch, Case, wide

CLASSES = 21
SIDE = 512
#: Height and width of RAFT's frames in training on FlyingChairs.
FRAME = (368, 496)
#: By how much a refined flow counts more than the one before it.
GAMMA = 0.8


def resized(logits: Tensor, image: Tensor) -> Tensor:
    """Logits [N, K, H, W] at the image's height and width."""
    return F.interpolate(logits, image.shape[-2:], mode="bilinear", align_corners=False)


class Torchvision(nn.Module):
    """A segmentation model of torchvision, without its auxiliary head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        models = importlib.import_module("torchvision.models")
        self.net = models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]


class Transformers(nn.Module):
    """A segmentation model of transformers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return resized(self.net(x).logits, x)


def segformer() -> nn.Module:
    """SegFormer-B0: the configuration's defaults."""
    transformers = importlib.import_module("transformers")
    config = transformers.SegformerConfig(num_labels=CLASSES, drop_path_rate=0.0)
    return Transformers(transformers.SegformerForSemanticSegmentation(config))


def upernet() -> nn.Module:
    """UPerNet on ConvNeXt-T, without its auxiliary head."""
    transformers = importlib.import_module("transformers")
    # A list, since the backbone adds one to it; its default is a tuple.
    widths = [96, 192, 384, 768]
    stages = [f"stage{number}" for number in range(1, 5)]
    backbone = transformers.ConvNextConfig(hidden_sizes=widths, out_features=stages)
    config = transformers.UperNetConfig(backbone_config=backbone, num_labels=CLASSES, use_auxiliary_head=False)
    return Transformers(transformers.UperNetForSemanticSegmentation(config))


class HrNet(nn.Module):
    """HRNetV2-W18: all branches at the resolution of the first, two convolutions by one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = importlib.import_module("timm").create_model(
            "hrnet_w18", features_only=True, feature_location="", out_indices=(1, 2, 3, 4)
        )
        width = sum(self.net.feature_info.channels())
        self.head = nn.Sequential(
            nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, CLASSES, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.net(x)
        return resized(self.head(torch.cat([first, *(resized(each, first) for each in others)], 1)), x)


def raft() -> nn.Module:
    """RAFT-small."""
    return importlib.import_module("torchvision.models.optical_flow").raft_small(weights=None)


def classify_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [N, K, H, W] and classes [N, H, W]."""
    return F.cross_entropy(wide(logits), labels)


def flow_loss(flows: list[Tensor], wanted: Tensor) -> Tensor:
    """RAFT's: mean distances of all flows [N, 2, H, W], later ones with more weight."""
    last = len(flows) - 1
    return torch.stack([GAMMA ** (last - n) * (wide(flow) - wanted).abs().mean() for n, flow in enumerate(flows)]).sum()


def labeled_pixels(model: nn.Module, samples: int) -> Batch:
    """Images with a class for each pixel."""
    return (torch.randn(samples, 3, SIDE, SIDE),), (torch.randint(0, CLASSES, (samples, SIDE, SIDE)),)


def frames(model: nn.Module, samples: int) -> Batch:
    """Two frames, the second shifted by three pixels, and that flow."""
    before = torch.rand(samples, 3, *FRAME) * 2 - 1
    flow = torch.zeros(samples, 2, *FRAME)
    flow[:, 0] = 3
    return (before, before.roll(3, 3)), (flow,)


def cases() -> list[Case]:
    """By name."""
    builds: dict[str, Callable[[], nn.Module]] = {
        "deeplabv3_resnet50": lambda: Torchvision("deeplabv3_resnet50"),
        "fcn_resnet50": lambda: Torchvision("fcn_resnet50"),
        "hrnet_w18": HrNet,
        "lraspp_mobilenet_v3_large": lambda: Torchvision("lraspp_mobilenet_v3_large"),
        "segformer_b0": segformer,
        "upernet_convnext_tiny": upernet,
    }
    segmentation = [Case(name, build, labeled_pixels, classify_pixels, 8) for name, build in builds.items()]
    # Its coordinates are float32 in any dtype, so it cannot run in float64.
    return [*segmentation, Case("raft_small", raft, frames, flow_loss, 4, reference=torch.float32)]
