"""A small EDSR (Lim 2017): residual blocks without normalization, pixel shuffle, L1, the rate halved on the way; images
of other sizes at the end, whole and turned (geometric self-ensemble), judged by PSNR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

PATCH, BATCH, STEPS, SCALE = 12, 8, 20, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.second(F.relu(self.first(x), inplace=True))


class EDSR(nn.Module):
    mean: Tensor

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.45, 0.44, 0.4]).view(1, 3, 1, 1))
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Conv2d(width, width, 3, padding=1))
        self.tail = nn.Sequential(
            nn.Conv2d(width, width * SCALE**2, 3, padding=1), nn.PixelShuffle(SCALE), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, SCALE H, SCALE W] of images [N, 3, H, W]."""
        x = self.head(x - self.mean)
        return self.tail(x + self.body(x)) + self.mean


def smaller(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=1 / SCALE, mode="bicubic", antialias=True, align_corners=False)


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, _, _ = discs(40, 48, seed=0)
    net = run.to(EDSR())
    model = run.compile(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, betas=(0.9, 0.99), eps=1e-5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 15], 0.5)
    run.track(net=net)
    for step in range(STEPS):
        top, left = torch.randint(0, 48 - SCALE * PATCH, (2,)).tolist()
        chosen = images[step % 5 * BATCH : (step % 5 + 1) * BATCH]
        large = run.to(chosen[..., top : top + SCALE * PATCH, left : left + SCALE * PATCH])
        with run.autocast():
            loss = F.l1_loss(model(smaller(large)), large)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)

    net.eval()
    wide = run.to(discs(2, 40, seed=1)[0][..., :32])
    with torch.no_grad(), run.autocast():
        whole = model(smaller(wide))
        turned = [torch.rot90(model(torch.rot90(smaller(wide), k, (2, 3))), -k, (2, 3)) for k in range(4)]
    for name, made in (("psnr", whole), ("ensemble_psnr", torch.stack(turned).mean(0))):
        run.log(**{name: -10 * torch.log10(F.mse_loss(made.clamp(0, 1).to(wide.dtype), wide))})
    run.log(whole=whole)
