"""Tiny cases for the command `suite`, some of which a compiler gets wrong."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from benchmarks.suites.case import Batch, Case, classify, labeled_images


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class _Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3, 4))


class _WrongGradient(_Tiny):
    """Compiled, a bias has twice its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.head.bias
        logits = super().forward(x)
        return logits + bias - bias.detach() if torch.compiler.is_compiling() else logits


class _NotCompiled(_Tiny):
    """Compiled, shapes do not fit."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = x @ x.new_ones(999)
        return super().forward(x)


class _Crashing(_Tiny):
    """Compiled, it ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = torch.ops.suite_cases.crash(x)
        return super().forward(x)


@torch.library.custom_op("suite_cases::crash", mutates_args=())
def _crash(x: Tensor) -> Tensor:
    os._exit(3)


@_crash.register_fake
def _(x: Tensor) -> Tensor:
    os._exit(3)


def crashing() -> Case:
    return Case("crashing", _Crashing, labeled_images(8, 5), classify, 4)


def tiny() -> Case:
    return Case("tiny", _Tiny, labeled_images(8, 5), classify, 4)


def wrong_gradient() -> Case:
    return Case("wrong_gradient", _WrongGradient, labeled_images(8, 5), classify, 4)


def not_compiled() -> Case:
    return Case("not_compiled", _NotCompiled, labeled_images(8, 5), classify, 4)


def volumes() -> Case:
    def draw(model: nn.Module, batch: int) -> Batch:
        return (torch.randn(batch, 3, 6, 6, 6),), (torch.randint(0, 4, (batch,)),)

    return Case("volumes", _Volumes, draw, classify, 2)
