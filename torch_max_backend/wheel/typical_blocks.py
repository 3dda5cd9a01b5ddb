"""Blocks of typical networks (``torch_max_backend.wheel.typical``)."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """The sum of a path and a shortcut, and the activation that follows it."""

    def __init__(self, path: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.path, self.shortcut, self.after = path, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.path(x) + self.shortcut(x))


class Gate(nn.Module):
    """Squeeze and excitation (Hu et al., 2017)."""

    def __init__(self, channels: int, activation: nn.Module, gate: nn.Module, inner: int = 8) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), activation, nn.Conv2d(inner, channels, 1), gate
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x)


class DropPath(nn.Module):
    """Stochastic depth: leaves out whole samples of a path (Huang et al., 2016)."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(self.keep)
        return x * kept.div_(self.keep)


def block(
    inputs: int,
    outputs: int,
    stride: int = 1,
    activation: nn.Module | None = None,
    taps: int = 3,
    groups: int = 1,
    bias: bool = False,
    dilation: int = 1,
) -> list[nn.Module]:
    """Convolution, batch normalization and an activation."""
    convolution = nn.Conv2d(inputs, outputs, taps, stride, taps // 2 * dilation, dilation, groups, bias)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU() if activation is None else activation]


def head(channels: int, classes: int) -> list[nn.Module]:
    """Global average pooling and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
