"""Glow (Kingma 2018): activation normalization set by the first batch, invertible 1x1 convolutions with slogdet, affine
couplings, two scales; then images from latents through the inverse."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, BATCH, STEPS, BITS = 8, 8, 12, 5


class ActNorm(nn.Module):
    done: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.register_buffer("done", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum() * x.shape[2] * x.shape[3]

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        """Sets mean 0 and variance 1 for what this layer returns of ``x``."""
        self.bias.copy_(-x.mean((0, 2, 3), keepdim=True))
        self.log_scale.copy_(-(x.std((0, 2, 3), keepdim=True) + 1e-6).log())
        self.done.fill_(1)

    def inverse(self, y: Tensor) -> Tensor:
        return y * (-self.log_scale).exp() - self.bias


class Invertible(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels)).Q)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.linalg.slogdet(self.weight).logabsdet * x.shape[2] * x.shape[3]
        return F.conv2d(x, self.weight[:, :, None, None]), volume

    def inverse(self, y: Tensor) -> Tensor:
        return F.conv2d(y, torch.linalg.inv(self.weight)[:, :, None, None])


class Coupling(nn.Module):
    def __init__(self, channels: int, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )  # fmt: skip
        nn.init.normal_(self.net[-1].weight, std=1e-2)
        nn.init.zeros_(self.net[-1].bias)

    def parts(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift = self.net(kept).chunk(2, 1)
        return torch.sigmoid(log_scale + 2), shift

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, 1)
        scale, shift = self.parts(kept)
        return torch.cat((kept, (changed + shift) * scale), 1), scale.log().flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        kept, changed = y.chunk(2, 1)
        scale, shift = self.parts(kept)
        return torch.cat((kept, changed / scale - shift), 1)


class Glow(nn.Module):
    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        kinds = (ActNorm, Invertible, Coupling)
        self.first = nn.ModuleList(kind(12) for _ in range(steps) for kind in kinds)
        self.second = nn.ModuleList(kind(24) for _ in range(steps) for kind in kinds)

    def forward(self, x: Tensor, initialize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The log-likelihood [N] of images [N, 3, 8, 8], and the latents of both scales."""
        total, z = x.new_zeros(len(x)), F.pixel_unshuffle(x, 2)
        latents = []
        for layers in (self.first, self.second):
            for layer in layers:
                if initialize and isinstance(layer, ActNorm):
                    layer.initialize(z)
                z, volume = layer(z)
                total = total + volume
            if not latents:
                z, early = z.chunk(2, 1)
                latents.append(early)
                z = F.pixel_unshuffle(z, 2)
        latents.append(z)
        prior = sum((-0.5 * (v.square() + math.log(2 * math.pi))).flatten(1).sum(1) for v in latents)
        return total + prior, latents[0], latents[1]

    def inverse(self, early: Tensor, z: Tensor) -> Tensor:
        for layer in reversed(self.second):
            z = layer.inverse(z)
        z = torch.cat((F.pixel_shuffle(z, 2), early), 1)
        for layer in reversed(self.first):
            z = layer.inverse(z)
        return F.pixel_shuffle(z, 2)


def main(run: Run) -> None:
    torch.manual_seed(0)
    images = (discs(40, SIDE)[0].clamp(0, 1) * (2**BITS - 1)).floor() / 2**BITS - 0.5
    net = run.to(Glow())
    run.track(net=net)
    with torch.no_grad():
        net(run.to(images[:16]), initialize=True)
    model = run.compile(net)
    optimizer = torch.optim.Adam(net.parameters(), 5e-4, eps=1e-4)
    scale = math.log(2) * 3 * SIDE**2
    for step in range(STEPS):
        batch = images[step % 5 * BATCH : (step % 5 + 1) * BATCH]
        with run.autocast():
            likelihood, _, _ = model(run.to(batch + torch.rand_like(batch) / 2**BITS))
        bits = BITS - likelihood.mean() / scale
        optimizer.zero_grad()
        bits.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 50.0)
        optimizer.step()
        run.log(bits=bits, norm=norm)

    with torch.no_grad():
        _, early, z = model(run.to(images[:4]))
        run.log(again=run.compile(net.inverse)(early, z))
        run.log(samples=run.compile(net.inverse)(0.7 * torch.ones_like(early), 0.7 * torch.ones_like(z)))
