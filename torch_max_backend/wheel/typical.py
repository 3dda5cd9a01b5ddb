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

from torch_max_backend.wheel.typical_attention import VisionTransformer, WindowTransformer
from torch_max_backend.wheel.typical_blocks import DropPath, Gate, Residual, block, head
from torch_max_backend.wheel.typical_dense import Denoiser, Pyramid, Segmenter, UNet


class PixelNorm(nn.LayerNorm):
    """Layer normalization of each pixel's channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DepthwiseBlock(nn.Module):
    """A block of ConvNeXt (Liu et al., 2022)."""

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
    """ConvNeXt (Liu et al., 2022) of four stages; ``keep``: the share of samples whose last block is not dropped."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), PixelNorm(width)]
    keeps = iter(torch.linspace(1, keep, 18).tolist())
    for stage, depth in enumerate((3, 3, 9, 3)):
        layers += [PixelNorm(width << stage - 1), nn.Conv2d(width << stage - 1, width << stage, 2, 2)] if stage else []
        layers += [DepthwiseBlock(width << stage, next(keeps)) for _ in range(depth)]
    end = nn.AdaptiveAvgPool2d(1), PixelNorm(8 * width), nn.Flatten(), nn.Linear(8 * width, classes)
    return nn.Sequential(*layers, *end)


def _residual_stage(inputs: int, inner: int, outputs: int, stride: int = 1, bottleneck: bool = True) -> nn.Module:
    """A residual block of ResNet (He et al., 2015), basic or bottleneck."""
    first, last = block(inputs, inner, 1 if bottleneck else stride), block(inner, outputs, 1, nn.Identity())
    middle = block(inner, inner, stride) if bottleneck else []
    shortcut = nn.Sequential(*block(inputs, outputs, stride, nn.Identity(), taps=1))
    changes = inputs != outputs or stride != 1
    return Residual(nn.Sequential(*first, *middle, *last), shortcut if changes else None, nn.ReLU())


def _residual_network(width: int, classes: int, bottleneck: bool) -> nn.Module:
    """ResNet (He et al., 2015)."""
    outer = (4 if bottleneck else 1) * width

    def stage(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return _residual_stage(inputs, width, outputs, stride, bottleneck)

    stages = stage(width, outer), stage(outer, outer), stage(outer, 2 * outer, 2), stage(2 * outer, 2 * outer)
    return nn.Sequential(*block(3, width, 2), nn.MaxPool2d(3, 2, 1), *stages, *head(2 * outer, classes))


class RectifiedSum(nn.ModuleList):
    """ReLU of the sum of its modules' results, each of a tensor of its own."""

    def forward(self, x: list[Tensor]) -> Tensor:
        return F.relu(functools.reduce(operator.add, (path(each) for path, each in zip(self, x, strict=True))))


class ExchangeUnit(nn.Module):
    """The exchange unit of HRNet (Sun et al., 2019): branches of 1, 2, 4 ... times as many channels and 1, 1/2, 1/4
    ... of the side. Behind a residual block on each branch, every result is a sum over all branches."""

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
    """HRNet (Sun et al., 2019) of two to four branches, which the head adds up from the largest to the smallest."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *block(3, width, 2), _residual_stage(width, width, 4 * width), *block(4 * width, width)
        )
        self.more = nn.ModuleList(nn.Sequential(*block(width << n, width << n + 1, 2)) for n in range(3))
        self.stages = nn.ModuleList(
            nn.Sequential(*(ExchangeUnit(width, branches) for _ in range(units)))
            for branches, units in ((2, 1), (3, 4), (4, 3))
        )
        self.wider = nn.ModuleList(_residual_stage(width << n, 8 << n, 32 << n) for n in range(4))
        self.smaller = nn.ModuleList(nn.Sequential(*block(32 << n, 64 << n, 2, bias=True)) for n in range(3))
        self.head = nn.Sequential(*block(256, 512, taps=1, bias=True), *head(512, classes))

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.stem(x)]
        for more, stage in zip(self.more, self.stages, strict=True):
            branches = stage([*branches, more(branches[-1])])
        total, *rest = (wider(branch) for wider, branch in zip(self.wider, branches, strict=True))
        for smaller, branch in zip(self.smaller, rest, strict=True):
            total = branch + smaller(total)
        return self.head(total)


def _inverted(
    width: int,
    activation: Callable[[], nn.Module],
    gate: nn.Module | None = None,
    stride: int = 1,
    expansion: int = 4,
) -> nn.Module:
    """An inverted residual of MobileNetV2 (Sandler et al., 2018), with a shortcut where it expands at stride 1."""
    wide = expansion * width
    wider = [] if expansion == 1 else block(width, wide, 1, activation(), taps=1)
    path = nn.Sequential(
        *wider, *block(wide, wide, stride, activation(), groups=wide),
        *([] if gate is None else [gate]), *block(wide, width, 1, nn.Identity(), taps=1),
    )  # fmt: skip
    return Residual(path) if stride == expansion // 4 else path


def _inverted_residuals(
    width: int,
    classes: int,
    activation: Callable[[], nn.Module],
    gate: Callable[[], nn.Module] | None,
    dropout: float = 0.2,
    keep: float = 1.0,
) -> nn.Module:
    """MobileNetV2 (Sandler et al., 2018); with gates EfficientNet (Tan and Le, 2019), whose layers drop samples."""

    def layer(stride: int, expansion: int = 4) -> nn.Module:
        # Of a width that is no multiple of 8 where the expansion is 1.
        inner, wide = (6 if expansion == 1 else 8), expansion * width
        gates = None if gate is None else Gate(wide, activation(), gate(), inner)
        made = _inverted(width, activation, gates, stride, expansion)
        if keep < 1 and isinstance(made, Residual):
            made.path = nn.Sequential(made.path, DropPath(keep))
        return made

    stem, last = block(3, width, 2, activation()), block(width, 2 * width, 1, activation(), taps=1)
    drop = [nn.Dropout(dropout)] if dropout else []
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(2 * width, classes)
    layers = layer(1, 1), layer(1), layer(2), layer(1), layer(1), layer(1)
    return nn.Sequential(*stem, *layers, *last, *end)


def _mobile(width: int, classes: int) -> nn.Module:
    """MobileNetV3 (Howard et al., 2019): the first layers have one activation, the last ones another, and some of
    each have gates."""

    def gate() -> nn.Module:
        return Gate(4 * width, nn.ReLU(), nn.Hardsigmoid())

    layers = [_inverted(width, nn.ReLU, expansion=1), _inverted(width, nn.ReLU, stride=2), _inverted(width, nn.ReLU)]
    layers += [_inverted(width, nn.ReLU, gate(), stride) for stride in (2, 1, 1)]
    layers += [_inverted(width, nn.Hardswish, None, stride) for stride in (2, 1, 1)]
    layers += [_inverted(width, nn.Hardswish, gate(), stride) for stride in (2, 1, 1)]
    last = block(width, 2 * width, 1, nn.Hardswish(), taps=1)
    end = nn.Linear(2 * width, 2 * width), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(2 * width, classes)
    return nn.Sequential(
        *block(3, width, 2, nn.Hardswish()), *layers, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *end
    )


def _convolutions(
    width: int, classes: int, activation: Callable[[], nn.Module], pool: Callable[[int], nn.Module]
) -> nn.Module:
    """Convolutions with a bias, then linear layers, as AlexNet and VGG have them."""
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
        """A batch of ``number`` images of zeros."""
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
    Typical(
        "inverted-silu-drop-path",
        lambda width, classes: _inverted_residuals(width, classes, nn.SiLU, nn.Sigmoid, keep=0.9),
    ),
    Typical("inverted-mixed", _mobile, side=64),
    Typical("transformer", lambda width, classes: VisionTransformer(2 * width, classes), side=32),
    Typical("transformer-dropout", lambda width, classes: VisionTransformer(2 * width, classes, 0.1), side=32),
    Typical("transformer-module", lambda width, classes: VisionTransformer(2 * width, classes, 0.0, True), side=32),
    # Of 3, 6, 12 and 24 heads, or 4, 8, 16 and 32: 49x49 biases of each are no multiple of 4 in the former.
    Typical("windows", lambda width, classes: WindowTransformer(max(96, width), classes, 7), side=224),
    Typical("windows-sliced", lambda width, classes: WindowTransformer(96, classes, 7, sliced=True), side=224),
    Typical("windows-cosine", lambda width, classes: WindowTransformer(96, classes, 8, True), side=256),
    Typical("depthwise", lambda width, classes: _depthwise_network(width, classes, 1.0), side=64),
    Typical("depthwise-drop-path", lambda width, classes: _depthwise_network(width, classes, 0.9), side=64),
    Typical("unet", lambda width, classes: UNet(width, False)),
    Typical("unet-transposed", lambda width, classes: UNet(width, True)),
    Typical("segmentation", lambda width, classes: Segmenter(width, classes, False), side=64),
    Typical("segmentation-dilated", lambda width, classes: Segmenter(width, classes, True), side=64),
    Typical("pyramid", lambda width, classes: Pyramid(width), side=64),
    Typical("denoiser", lambda width, classes: Denoiser(128), side=32),
)
