"""Small networks of the blocks that published vision models are made of.

Programs are generated from a graph's elementwise work and reductions, whatever its sizes. Those of these networks recur
in other models, and so a wheel carries them (``torch_max_backend.prebuild``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """The sum of a path and a shortcut, and what follows it."""

    def __init__(self, path: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.path, self.shortcut, self.after = path, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.path(x) + self.shortcut(x))


class Gate(nn.Module):
    """Squeeze and excitation (Hu 2017)."""

    def __init__(self, channels: int, activation: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 8, 1), activation, nn.Conv2d(8, channels, 1), gate
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x)


class Attention(nn.Module):
    """Self-attention of several heads (Vaswani 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value)
        return self.projection(y.transpose(1, 2).reshape(batch, rows, width))


class VisionTransformer(nn.Module):
    """Dosovitskiy 2020, with dropout where it has some."""

    def __init__(self, width: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(*(each for _ in range(2) for each in self._block(width, dropout)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    @staticmethod
    def _block(width: int, dropout: float) -> list[nn.Module]:
        drop = [nn.Dropout(dropout)] if dropout else []
        attention = nn.Sequential(nn.LayerNorm(width), Attention(width, 4), *drop)
        layers = nn.Linear(width, 2 * width), nn.GELU(), *drop, nn.Linear(2 * width, width), *drop
        return [Residual(attention), Residual(nn.Sequential(nn.LayerNorm(width), *layers))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class UNet(nn.Module):
    """Ronneberger 2015, of two levels, with either way up."""

    def __init__(self, width: int, transposed: bool) -> None:
        super().__init__()
        self.down = nn.Sequential(*block(3, width), *block(width, width))
        self.middle = nn.Sequential(nn.MaxPool2d(2), *block(width, 2 * width), *block(2 * width, 2 * width))
        scale = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2) if transposed else scale
        self.out = nn.Sequential(*block(2 * width if transposed else 3 * width, width), nn.Conv2d(width, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.out(torch.cat([x, self.up(self.middle(x))], 1))


def block(
    inputs: int, outputs: int, stride: int = 1, activation: nn.Module | None = None, taps: int = 3, groups: int = 1
) -> list[nn.Module]:
    """Convolution, batch normalization and an activation."""
    convolution = nn.Conv2d(inputs, outputs, taps, stride, taps // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU() if activation is None else activation]


def head(channels: int, classes: int) -> list[nn.Module]:
    """Means over pixels and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def _residual_network(width: int, classes: int, bottleneck: bool) -> nn.Module:
    """Of He 2015."""
    inner, outer = width, (4 if bottleneck else 1) * width

    def stage(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        first, last = block(inputs, inner, 1 if bottleneck else stride), block(inner, outputs, 1, nn.Identity())
        middle = block(inner, inner, stride) if bottleneck else []
        shortcut = nn.Sequential(*block(inputs, outputs, stride, nn.Identity(), taps=1))
        changes = inputs != outputs or stride != 1
        return Residual(nn.Sequential(*first, *middle, *last), shortcut if changes else None, nn.ReLU())

    stages = stage(width, outer), stage(outer, outer), stage(outer, 2 * outer, 2), stage(2 * outer, 2 * outer)
    return nn.Sequential(*block(3, width, 2), nn.MaxPool2d(3, 2, 1), *stages, *head(2 * outer, classes))


def _inverted_residuals(
    width: int, classes: int, activation: Callable[[], nn.Module], gate: Callable[[], nn.Module] | None
) -> nn.Module:
    """Of Sandler 2018, with gates in Howard 2019 and Tan 2019."""

    def layer(stride: int, expansion: int = 4) -> nn.Module:
        wide = expansion * width
        wider = [] if expansion == 1 else block(width, wide, 1, activation(), taps=1)
        gates = [] if gate is None else [Gate(wide, activation(), gate())]
        path = nn.Sequential(
            *wider, *block(wide, wide, stride, activation(), groups=wide),
            *gates, *block(wide, width, 1, nn.Identity(), taps=1),
        )  # fmt: skip
        return Residual(path) if stride == expansion // 4 else path

    stem, last = block(3, width, 2, activation()), block(width, 2 * width, 1, activation(), taps=1)
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width, classes)
    return nn.Sequential(*stem, layer(1, 1), layer(1), layer(2), layer(1), layer(1), *last, *end)


def _convolutions(
    width: int, classes: int, activation: Callable[[], nn.Module], pool: Callable[[int], nn.Module]
) -> nn.Module:
    """Convolutions with a bias, and linear layers."""
    layers = nn.Conv2d(3, width, 3, padding=1), activation(), nn.Conv2d(width, width, 3, padding=1), activation()
    size = 16 * 16 * width
    end = nn.Linear(size, 64), activation(), nn.Dropout(), nn.Linear(64, 64), activation(), nn.Linear(64, classes)
    return nn.Sequential(*layers, pool(2), nn.Flatten(), *end)


def _digits(width: int, classes: int) -> nn.Module:
    layers = (
        *block(1, width),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, width, groups=4),
        *head(width, classes),
    )
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Typical:
    """A network by its name.

    Attributes:
        name: of the network.
        make: makes it anew, for channels in its first layer and a number of classes.
        channels: of its images.
        side: of its images, in pixels.
    """

    name: str
    make: Callable[[int, int], nn.Module]
    channels: int = 3
    side: int = 56

    def images(self) -> Tensor:
        """Two."""
        return torch.zeros(2, self.channels, self.side, self.side)


NETWORKS = (
    Typical("digits", _digits, 1),
    Typical("residual", lambda width, classes: _residual_network(width, classes, False)),
    Typical("bottleneck", lambda width, classes: _residual_network(width, classes, True)),
    Typical("convolutions-relu", lambda width, classes: _convolutions(width, classes, nn.ReLU, nn.MaxPool2d), side=32),
    Typical("convolutions-tanh", lambda width, classes: _convolutions(width, classes, nn.Tanh, nn.AvgPool2d), side=32),
    Typical("convolutions-gelu", lambda width, classes: _convolutions(width, classes, nn.GELU, nn.MaxPool2d), side=32),
    Typical("inverted-relu6", lambda width, classes: _inverted_residuals(width, classes, nn.ReLU6, None)),
    Typical("inverted-silu", lambda width, classes: _inverted_residuals(width, classes, nn.SiLU, nn.Sigmoid)),
    Typical(
        "inverted-hardswish", lambda width, classes: _inverted_residuals(width, classes, nn.Hardswish, nn.Hardsigmoid)
    ),
    Typical("transformer", lambda width, classes: VisionTransformer(2 * width, classes), side=32),
    Typical("transformer-dropout", lambda width, classes: VisionTransformer(2 * width, classes, 0.1), side=32),
    Typical("unet", lambda width, classes: UNet(width, False)),
    Typical("unet-transposed", lambda width, classes: UNet(width, True)),
)
