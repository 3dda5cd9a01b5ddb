"""Small networks of the blocks that published vision models are made of.

Programs are generated from a graph's elementwise work and reductions, whatever its sizes. Those of these networks recur
in other models, and so a wheel carries them (``torch_max_backend.wheel``).
"""

from __future__ import annotations

import functools
import itertools
import operator
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

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, rows, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.projection(y.transpose(1, 2).reshape(batch, rows, width))


class VisionTransformer(nn.Module):
    """Dosovitskiy 2020, with dropout where it has some."""

    def __init__(self, width: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(*(each for _ in range(3) for each in self._block(width, dropout)))
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


class DropPath(nn.Module):
    """Leaves out whole samples of a path (Huang 2016)."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(self.keep)
        return x * kept.div_(self.keep)


class WindowAttention(nn.Module):
    """Self-attention within windows of 7x7 pixels, shifted by half a window or not (Liu 2021)."""

    numbers: Tensor
    mask: Tensor | None

    def __init__(self, width: int, side: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift = side, shift
        self.attention = Attention(width, width // 32)
        self.places = nn.Parameter(torch.zeros(13 * 13, width // 32))
        self.register_buffer("numbers", torch.arange(49 * 49) % (13 * 13), persistent=False)
        mask = torch.zeros((side // 7) ** 2, 49, 49) if shift else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = side // 7
        x = x.view(batch, windows, 7, windows, 7, width).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 49, width)
        bias = self.places[self.numbers].view(49, 49, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.mask is not None:
            number, heads = self.mask.shape[0], bias.shape[1]
            mask = self.mask.view(1, number, 1, 49, 49).expand(batch, -1, heads, -1, -1)
            bias = bias + mask.reshape(-1, heads, 49, 49)
        x = self.attention(x, bias).view(-1, windows, windows, 7, 7, width)
        x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side, side, width)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class WindowBlock(nn.Module):
    """Attention within windows, and two linear layers, each with a shortcut."""

    def __init__(self, width: int, side: int, shift: int, keep: float) -> None:
        super().__init__()
        drops = [DropPath(keep)] if keep < 1 else []
        self.attention = Residual(nn.Sequential(nn.LayerNorm(width), WindowAttention(width, side, shift), *drops))
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.layers = Residual(nn.Sequential(nn.LayerNorm(width), *layers, *drops))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        batch, side, _, width = x.shape
        return self.layers(x.reshape(batch, -1, width)).reshape(batch, side, side, width)


class Merge(nn.Module):
    """Makes one pixel of 2x2 (Liu 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        x = x.reshape(batch, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class WindowTransformer(nn.Module):
    """Liu 2021, of three stages; in the last one a window is the whole image."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        layers: list[nn.Module] = [WindowBlock(width, 28, 0, 1.0), WindowBlock(width, 28, 3, 0.95), Merge(width)]
        layers += [WindowBlock(2 * width, 14, shift, 0.9) for shift in (0, 3, 0, 3, 0, 3)]
        layers += [Merge(2 * width), WindowBlock(4 * width, 7, 0, 0.85), WindowBlock(4 * width, 7, 0, 0.8)]
        self.blocks = nn.Sequential(*layers, nn.LayerNorm(4 * width))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.blocks(x).mean((1, 2)))


class PixelNorm(nn.LayerNorm):
    """Layer normalization of each pixel's channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DepthwiseBlock(nn.Module):
    """Liu 2022."""

    def __init__(self, width: int, keep: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.ones(width))
        self.drop = DropPath(keep) if keep < 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.drop(y * self.scale.reshape(1, -1, 1, 1)) + x


def _depthwise_network(width: int, classes: int, keep: float) -> nn.Module:
    """Liu 2022, of two stages."""
    stem = nn.Conv2d(3, width, 4, 4), PixelNorm(width)
    smaller = PixelNorm(width), nn.Conv2d(width, 2 * width, 2, 2)
    blocks, last = ([DepthwiseBlock(n * width, keep) for _ in range(depth)] for n, depth in ((1, 3), (2, 9)))
    end = nn.AdaptiveAvgPool2d(1), PixelNorm(2 * width), nn.Flatten(), nn.Linear(2 * width, classes)
    return nn.Sequential(*stem, *blocks, *smaller, *last, *end)


def block(
    inputs: int,
    outputs: int,
    stride: int = 1,
    activation: nn.Module | None = None,
    taps: int = 3,
    groups: int = 1,
    bias: bool = False,
) -> list[nn.Module]:
    """Convolution, batch normalization and an activation."""
    convolution = nn.Conv2d(inputs, outputs, taps, stride, taps // 2, groups=groups, bias=bias)
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


class RectifiedSum(nn.ModuleList):
    """ReLU of the sum of what its modules make of one tensor each."""

    def forward(self, x: list[Tensor]) -> Tensor:
        return F.relu(functools.reduce(operator.add, (path(each) for path, each in zip(self, x, strict=True))))


class ExchangeUnit(nn.Module):
    """Sun 2019: branches of 1, 2, 4 ... times as many channels and 1, 1/2, 1/4 ... of the side. Behind a residual block
    on each branch, every result is a sum over all branches."""

    def __init__(self, width: int, branches: int) -> None:
        super().__init__()
        widths = [width << branch for branch in range(branches)]
        self.branches = nn.ModuleList(
            Residual(nn.Sequential(*block(n, n), *block(n, n, 1, nn.Identity())), None, nn.ReLU()) for n in widths
        )
        self.sums = nn.ModuleList(
            RectifiedSum(self._path(widths, source, to) for source in range(branches)) for to in range(branches)
        )

    @staticmethod
    def _path(widths: list[int], source: int, to: int) -> nn.Module:
        if source == to:
            return nn.Identity()
        if source > to:
            larger = nn.Upsample(scale_factor=2 ** (source - to))
            return nn.Sequential(*block(widths[source], widths[to], 1, larger, taps=1))
        steps = [block(widths[source], widths[source], 2) for _ in range(to - source - 1)]
        last = block(widths[source], widths[to], 2, nn.Identity())
        return nn.Sequential(*itertools.chain(*steps, last))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        x = [branch(each) for branch, each in zip(self.branches, x, strict=True)]
        return [total(x) for total in self.sums]


class ParallelNetwork(nn.Module):
    """Sun 2019, of two to four branches."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*block(3, width, 2))
        self.more = nn.ModuleList(nn.Sequential(*block(width << n, width << n + 1, 2)) for n in range(3))
        self.stages = nn.ModuleList(
            nn.Sequential(ExchangeUnit(width, branches), ExchangeUnit(width, branches)) for branches in (2, 3, 4)
        )
        self.smaller = nn.ModuleList(nn.Sequential(*block(width << n, width << n + 1, 2)) for n in range(3))
        self.head = nn.Sequential(*head(width << 3, classes))

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.stem(x)]
        for more, stage in zip(self.more, self.stages, strict=True):
            branches = stage([*branches, more(branches[-1])])
        total = branches[0]
        for smaller, branch in zip(self.smaller, branches[1:], strict=True):
            total = branch + smaller(total)
        return self.head(total)


def _inverted_residuals(
    width: int,
    classes: int,
    activation: Callable[[], nn.Module],
    gate: Callable[[], nn.Module] | None,
    dropout: float = 0.2,
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
    drop = [nn.Dropout(dropout)] if dropout else []
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(2 * width, classes)
    layers = layer(1, 1), layer(1), layer(2), layer(1), layer(1), layer(1)
    return nn.Sequential(*stem, *layers, *last, *end)


def _convolutions(
    width: int, classes: int, activation: Callable[[], nn.Module], pool: Callable[[int], nn.Module]
) -> nn.Module:
    """Convolutions with a bias, and linear layers."""
    layers = nn.Conv2d(3, width, 3, padding=1), activation(), nn.Conv2d(width, width, 3, padding=1), activation()
    size = 16 * 16 * width
    end = nn.Linear(size, 64), activation(), nn.Dropout(), nn.Linear(64, 64), activation(), nn.Linear(64, classes)
    return nn.Sequential(*layers, pool(2), nn.Flatten(), *end)


def _digits(width: int, classes: int, bias: bool) -> nn.Module:
    layers = (
        *block(1, width),
        *block(width, width, bias=bias),
        nn.MaxPool2d(2),
        *block(width, width, groups=4, bias=bias),
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

    def images(self, number: int) -> Tensor:
        """So many."""
        return torch.zeros(number, self.channels, self.side, self.side)


NETWORKS = (
    Typical("digits", lambda width, classes: _digits(width, classes, False), 1),
    Typical("digits-bias", lambda width, classes: _digits(width, classes, True), 1),
    Typical("residual", lambda width, classes: _residual_network(width, classes, False)),
    Typical("bottleneck", lambda width, classes: _residual_network(width, classes, True)),
    # HRNet-W18's own channels, of which few are a multiple of 8, and others.
    Typical("parallel-branches", lambda width, classes: ParallelNetwork(9 * width // 16, classes), side=64),
    Typical("convolutions-relu", lambda width, classes: _convolutions(width, classes, nn.ReLU, nn.MaxPool2d), side=32),
    Typical("convolutions-tanh", lambda width, classes: _convolutions(width, classes, nn.Tanh, nn.AvgPool2d), side=32),
    Typical("convolutions-gelu", lambda width, classes: _convolutions(width, classes, nn.GELU, nn.MaxPool2d), side=32),
    Typical("inverted-relu6", lambda width, classes: _inverted_residuals(width, classes, nn.ReLU6, None)),
    Typical("inverted-relu", lambda width, classes: _inverted_residuals(width, classes, nn.ReLU, nn.Sigmoid)),
    Typical("inverted-silu", lambda width, classes: _inverted_residuals(width, classes, nn.SiLU, nn.Sigmoid)),
    Typical(
        "inverted-silu-plain", lambda width, classes: _inverted_residuals(width, classes, nn.SiLU, nn.Sigmoid, 0.0)
    ),
    Typical(
        "inverted-hardswish", lambda width, classes: _inverted_residuals(width, classes, nn.Hardswish, nn.Hardsigmoid)
    ),
    Typical("transformer", lambda width, classes: VisionTransformer(2 * width, classes), side=32),
    Typical("transformer-dropout", lambda width, classes: VisionTransformer(2 * width, classes, 0.1), side=32),
    Typical("window-transformer", WindowTransformer, side=112),
    Typical("depthwise", lambda width, classes: _depthwise_network(width, classes, 1.0)),
    Typical("depthwise-drop-path", lambda width, classes: _depthwise_network(width, classes, 0.9)),
    Typical("unet", lambda width, classes: UNet(width, False)),
    Typical("unet-transposed", lambda width, classes: UNet(width, True)),
)
