"""Adversarial networks: DCGAN (Radford 2015) and StarGAN (Choi 2017), generator and discriminator in one module.

A call runs both as one step does, so that one backward pass reaches all weights. Both minimize one sum here, instead of
taking turns with an optimizer each: the kernels are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.suites.case import wide


class Dcgan(nn.Module):
    """Images [N, 3, 64, 64] of latent vectors [N, 100, 1, 1], and logits [N] of real images and of these."""

    def __init__(self, width: int = 64, latent: int = 100) -> None:
        super().__init__()
        widths = [8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(zip([latent, *widths[:-1]], widths, strict=True)):
            stride, padding = (1, 0) if number == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
            ]  # fmt: skip
        self.generator = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
        layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True):
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, bias=False), nn.Flatten(0))

    def forward(self, latent: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(real), self.discriminator(self.generator(latent))


def deceive(logits: tuple[Tensor, Tensor]) -> Tensor:
    """Real images pass for real, and made ones, too."""
    return sum(F.softplus(-wide(each)).mean() for each in logits)  # type: ignore[return-value]


def _normalized(convolution: nn.Module, channels: int) -> list[nn.Module]:
    return [convolution, nn.InstanceNorm2d(channels, affine=True), nn.ReLU()]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.body = nn.Sequential(*_normalized(first, channels), second, nn.InstanceNorm2d(channels, affine=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class StarGan(nn.Module):
    """Translates images [N, 3, 128, 128] to another domain and back, and judges images: real or not, and which domain.

    Called with images, their domains and other domains, both [N, D]. Returns the images there and back, and for the
    given images and the translated ones a map of logits and logits [N, D] of the domain.
    """

    def __init__(self, domains: int = 5, width: int = 64, blocks: int = 6, side: int = 128) -> None:
        super().__init__()
        layers = _normalized(nn.Conv2d(3 + domains, width, 7, padding=3, bias=False), width)
        for channels in (2 * width, 4 * width):
            layers += _normalized(nn.Conv2d(channels // 2, channels, 4, 2, 1, bias=False), channels)
        layers += [_Residual(4 * width) for _ in range(blocks)]
        for channels in (2 * width, width):
            layers += _normalized(nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1, bias=False), channels)
        self.generator = nn.Sequential(*layers, nn.Conv2d(width, 3, 7, padding=3, bias=False), nn.Tanh())
        judge: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.01)]
        for step in range(1, 6):
            judge += [nn.Conv2d(width * 2 ** (step - 1), width * 2**step, 4, 2, 1), nn.LeakyReLU(0.01)]
        self.judge = nn.Sequential(*judge)
        self.is_real = nn.Conv2d(32 * width, 1, 3, padding=1, bias=False)
        self.domain = nn.Conv2d(32 * width, domains, side // 64, bias=False)

    def _translated(self, images: Tensor, domains: Tensor) -> Tensor:
        planes = domains[:, :, None, None].expand(-1, -1, *images.shape[2:])
        return self.generator(torch.cat([images, planes.to(images.dtype)], 1))

    def forward(self, images: Tensor, domains: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        there = self._translated(images, others)
        back = self._translated(there, domains)
        judged = [self.judge(each) for each in (images, there)]
        heads = [(self.is_real(each), self.domain(each).flatten(1)) for each in judged]
        return there, back, *heads[0], *heads[1]


def translate(outputs: tuple[Tensor, ...], images: Tensor, domains: Tensor, others: Tensor) -> Tensor:
    """Judged right (least squares) and classified right, and the way back leads to the image."""
    _, back, real, of_real, made, of_made = (wide(each) for each in outputs)
    judged = (real - 1).square().mean() + made.square().mean()
    classified = F.binary_cross_entropy_with_logits(of_real, domains)
    classified = classified + F.binary_cross_entropy_with_logits(of_made, others)
    return judged + classified + 10 * (back - images).abs().mean()
