"""YOLOv3 (Redmon 2018): Darknet-53 and predictions on three scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.suites.case import wide


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(channels, channels // 2, 1), _convolution(channels // 2, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Darknet53(nn.Module):
    """Features of images [N, 3, H, W] at an 8th, a 16th and a 32nd of their sides."""

    def __init__(self, width: int = 32, blocks: tuple[int, ...] = (1, 2, 8, 8, 4)) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 3)
        self.stages = nn.ModuleList()
        for stage, count in enumerate(blocks):
            channels = width * 2 ** (stage + 1)
            self.stages.append(
                nn.Sequential(_convolution(channels // 2, channels, 3, 2), *(_Residual(channels) for _ in range(count)))
            )

    def forward(self, x: Tensor) -> list[Tensor]:
        x, features = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features[-3:]


class Yolo3(nn.Module):
    """Predictions [N, 3 (5 + classes), H, W] at a 32nd, a 16th and an 8th of the sides of images [N, 3, 32 h, 32 w]."""

    def __init__(self, classes: int = 80, width: int = 32) -> None:
        super().__init__()
        self.backbone = Darknet53(width)
        self.necks, self.heads, self.laterals = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        below = 0
        for channels in (16 * width, 8 * width, 4 * width):
            layers, inputs = [], 2 * channels + below
            for size in (1, 3, 1, 3, 1):
                outputs = channels if size == 1 else 2 * channels
                layers.append(_convolution(inputs, outputs, size))
                inputs = outputs
            self.necks.append(nn.Sequential(*layers))
            self.heads.append(
                nn.Sequential(_convolution(channels, 2 * channels, 3), nn.Conv2d(2 * channels, 3 * (5 + classes), 1))
            )
            below = channels // 2
            if channels > 4 * width:
                self.laterals.append(_convolution(channels, below, 1))

    def forward(self, images: Tensor) -> list[Tensor]:
        predictions: list[Tensor] = []
        features = self.backbone(images)
        x = features[2]
        for level, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            x = neck(x)
            predictions.append(head(x))
            if level < 2:
                wider = F.interpolate(self.laterals[level](x), scale_factor=2, mode="nearest")
                x = torch.cat([wider, features[1 - level]], 1)
        return predictions


def detect(predictions: list[Tensor], *wanted: Tensor) -> Tensor:
    """Every prediction [N, A, H, W] is a probability that meets what is wanted, of the same shape."""
    pairs = zip(predictions, wanted, strict=True)
    return sum(F.binary_cross_entropy_with_logits(wide(each), want) for each, want in pairs)  # type: ignore[return-value]
