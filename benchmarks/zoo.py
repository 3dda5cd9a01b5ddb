"""The vision models that tests and benchmarks train: the published architectures, with width and size to choose.

LeNet-5 (LeCun 1998), VGG-11 (Simonyan 2014), ResNet-18 and -50 (He 2015), UNet (Ronneberger 2015), MobileNetV2
(Sandler 2018), R3D-18 (Tran 2018), a 3-D UNet (Isensee 2018), a small 3-D CNN, an MLP, the digits example's network.
``width`` scales every channel count; 1.0 is the published one. EfficientNet-B0, ConvNeXt-T and ViTs are timm's.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import nn


def scaled(channels: int, width: float) -> int:
    """A channel count scaled to a multiple of 8, at least 8."""
    return channels if width == 1.0 else max(8, round(channels * width / 8) * 8)


class Mlp(nn.Sequential):
    """Three linear layers on flattened input."""

    def __init__(self, features: int = 64, hidden: int = 128, classes: int = 10) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.GELU(),
            nn.Dropout(0.1), nn.Linear(hidden, classes),
        )  # fmt: skip


class LeNet(nn.Sequential):
    """LeNet-5 on 1x32x32 images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes),
        )  # fmt: skip


class Vgg(nn.Module):
    """VGG: 3x3 convolutions and 2x2 max pooling; ``plan`` has channel counts and "M" for a pooling."""

    def __init__(self, plan: Sequence[int | str], classes: int = 1000, width: float = 1.0, head: int = 4096) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in plan:
            if step == "M":
                layers.append(nn.MaxPool2d(2))
                continue
            out = scaled(int(step), width)
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 49, head), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(head, head), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(head, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def vgg11(width: float = 1.0, classes: int = 1000, head: int = 4096) -> Vgg:
    """VGG-11 (configuration A)."""
    return Vgg([64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"], classes, width, head)


def vgg16(width: float = 1.0, classes: int = 1000, head: int = 4096) -> Vgg:
    """VGG-16 (configuration D)."""
    plan = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]
    return Vgg(plan, classes, width, head)


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(inputs, channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * self.expansion
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """ResNet with a 7x7 stem."""

    def __init__(
        self, block: type[_Basic] | type[_Bottleneck], depths: Sequence[int], classes: int, width: float
    ) -> None:
        super().__init__()
        channels = scaled(64, width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        stages: list[nn.Module] = []
        inputs = channels
        for stage, depth in enumerate(depths):
            out = scaled(64 * 2**stage, width)
            for number in range(depth):
                stages.append(block(inputs, out, 2 if stage and number == 0 else 1))
                inputs = out * block.expansion
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.stages(self.stem(x))).flatten(1))


def resnet18(width: float = 1.0, classes: int = 1000) -> ResNet:
    """ResNet-18."""
    return ResNet(_Basic, (2, 2, 2, 2), classes, width)


def resnet50(width: float = 1.0, classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    """ResNet-50, stride in the 3x3 convolution; ``blocks`` of its four stages."""
    return ResNet(_Bottleneck, blocks, classes, width)


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True), nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        ]  # fmt: skip
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    """MobileNetV2: inverted residuals with depthwise convolutions, ``blocks`` of them in its seven stages."""

    plan = ((1, 16, 1), (6, 24, 2), (6, 32, 2), (6, 64, 2), (6, 96, 1), (6, 160, 2), (6, 320, 1))

    def __init__(self, width: float = 1.0, classes: int = 1000, blocks: Sequence[int] = (1, 2, 3, 4, 3, 3, 1)) -> None:
        super().__init__()
        channels = scaled(32, width)
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU6(inplace=True)
        ]  # fmt: skip
        for (expansion, outputs, stride), count in zip(self.plan, blocks, strict=True):
            for number in range(count):
                out = scaled(outputs, width)
                layers.append(_Inverted(channels, out, stride if number == 0 else 1, expansion))
                channels = out
        last = scaled(1280, width)
        layers += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class UNet(nn.Module):
    """UNet with transposed or bilinear upsampling, padded convolutions and batch norm."""

    def __init__(self, channels: int = 64, depth: int = 4, classes: int = 2, bilinear: bool = False) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            )  # fmt: skip

        widths = [channels * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.middle = double(widths[-2], widths[-1])
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True):
            if bilinear:
                up: nn.Module = nn.Sequential(
                    nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(inputs, outputs, 1)
                )
            else:
                up = nn.ConvTranspose2d(inputs, outputs, 2, 2)
            self.up.append(up)
            self.merge.append(double(inputs, outputs))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class UNet3d(nn.Module):
    """nnU-Net's 3-D UNet on scans [N, 1, D, H, W]: instance norm, leaky ReLU, strided and transposed convolutions."""

    def __init__(self, channels: int = 32, depth: int = 4, classes: int = 2, most: int = 320) -> None:
        super().__init__()

        def double(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for width, step in ((inputs, stride), (outputs, 1)):
                layers += [
                    nn.Conv3d(width, outputs, 3, step, 1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)
                ]  # fmt: skip
            return nn.Sequential(*layers)

        widths = [min(channels * 2**level, most) for level in range(depth + 1)]
        pairs = list(zip(widths[1:], widths[:-1], strict=True))
        self.down = nn.ModuleList([double(1, channels), *(double(outer, inner, 2) for inner, outer in pairs)])
        self.up = nn.ModuleList(nn.ConvTranspose3d(inner, outer, 2, 2) for inner, outer in reversed(pairs))
        self.merge = nn.ModuleList(double(2 * outer, outer) for _, outer in reversed(pairs))
        self.head = nn.Conv3d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class _Basic3d(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.conv2 = nn.Conv3d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm3d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.shortcut = nn.Sequential(nn.Conv3d(inputs, channels, 1, stride, bias=False), nn.BatchNorm3d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class R3d18(nn.Module):
    """R3D-18 on clips [N, 3, T, H, W]: ResNet-18 with filters over time, without a first pooling."""

    def __init__(self, width: float = 1.0, classes: int = 400) -> None:
        super().__init__()
        channels = scaled(64, width)
        self.stem = nn.Sequential(
            nn.Conv3d(3, channels, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(channels),
            nn.ReLU(inplace=True),
        )  # fmt: skip
        stages: list[nn.Module] = []
        inputs = channels
        for stage in range(4):
            out = scaled(64 * 2**stage, width)
            stages += [_Basic3d(inputs, out, 2 if stage else 1), _Basic3d(out, out, 1)]
            inputs = out
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3, 4)))


class VideoNet(nn.Module):
    """A small 3-D CNN on clips [N, 3, T, H, W]."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(3, channels, 3, padding=1), nn.BatchNorm3d(channels), nn.ReLU(), nn.AvgPool3d(2),
            nn.Conv3d(channels, 2 * channels, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(2 * channels),
            nn.ReLU(), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1),
        )  # fmt: skip
        self.classifier = nn.Linear(2 * channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def timm_model(name: str, **options: int) -> nn.Module:
    """One of timm's models, with random weights."""
    import timm

    return timm.create_model(name, **options)


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 (Tan 2019)."""
    return timm_model("efficientnet_b0")


def convnext_tiny() -> nn.Module:
    """ConvNeXt-T (Liu 2022)."""
    return timm_model("convnext_tiny")


def vit_small(img_size: int = 224) -> nn.Module:
    """ViT-S with patches of 16x16 (Dosovitskiy 2020, Touvron 2020); its positions depend on the image's size."""
    return timm_model("vit_small_patch16_224", img_size=img_size)


def swin_t() -> nn.Module:
    """Swin-T (Liu 2021)."""
    return timm_model("swin_tiny_patch4_window7_224")


def hrnet_w18() -> nn.Module:
    """HRNet-W18 (Wang 2019)."""
    return timm_model("hrnet_w18")


def vit_base(img_size: int = 224) -> nn.Module:
    """ViT-B with patches of 16x16."""
    return timm_model("vit_base_patch16_224", img_size=img_size)


class DeepLabV3(nn.Module):
    """torchvision's DeepLabV3 with a ResNet-50 (Chen 2017), for two classes."""

    def __init__(self) -> None:
        super().__init__()
        models = importlib.import_module("torchvision.models")
        self.net = models.get_model("deeplabv3_resnet50", weights=None, weights_backbone=None, num_classes=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["out"]


def digits() -> nn.Module:
    """The network of examples/train_digits.py, from there."""
    folder = Path(__file__).parents[1] / "examples"
    # As for a program that is started there: it imports what the examples share.
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(folder / "train_digits.py"))["DigitsNet"]()
    finally:
        sys.path.remove(str(folder))


#: By name, at full size: the model and the shape of one input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg11": (vgg11, (3, 224, 224)),
    "vgg16": (vgg16, (3, 224, 224)),
    "resnet18": (resnet18, (3, 224, 224)),
    "resnet50": (resnet50, (3, 224, 224)),
    "mobilenetv2": (MobileNetV2, (3, 224, 224)),
    "efficientnet_b0": (efficientnet_b0, (3, 224, 224)),
    "convnext_tiny": (convnext_tiny, (3, 224, 224)),
    "vit_small": (vit_small, (3, 224, 224)),
    "swin_t": (swin_t, (3, 224, 224)),
    "hrnet_w18": (hrnet_w18, (3, 224, 224)),
    "vit_base": (vit_base, (3, 224, 224)),
    "unet": (UNet, (3, 256, 256)),
    "unet3d": (UNet3d, (1, 96, 96, 96)),
    "deeplabv3": (DeepLabV3, (3, 512, 512)),
    "r3d18": (R3d18, (3, 16, 112, 112)),
    "video": (VideoNet, (3, 16, 112, 112)),
    "digits": (digits, (1, 8, 8)),
}

PIXELWISE: frozenset[str] = frozenset({"unet", "unet3d", "deeplabv3"})
"""Models that put every pixel into a class."""


def refuse_unknown(names: Collection[str], known: Collection[str] = tuple(MODELS), option: str = "model") -> None:
    """Ends a command whose option names one that is not ``known``."""
    unknown = set(names) - set(known)
    if unknown:
        raise typer.BadParameter(f"--{option} is one of {', '.join(known)}, not {sorted(unknown)[0]!r}")
