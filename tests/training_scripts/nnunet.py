"""nnU-Net (Isensee 2021), its PlainConvUNet in three dimensions: instance normalization, strided and transposed
convolutions, deep supervision with Dice and cross entropy, SGD with Nesterov's momentum and a polynomial rate; then
sliding windows with a Gaussian's weights, mirrored."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training_scripts.runner import Run

CLASSES, PATCH, BATCH, STEPS, WIDTHS = 3, (8, 16, 16), 2, 12, (4, 8, 16)


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(2):
        layers += [
            nn.Conv3d(outputs if index else inputs, outputs, 3, 1 if index else stride, 1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class PlainConvUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep_supervision = True
        pairs = list(itertools.pairwise(WIDTHS))
        self.stages = nn.ModuleList([block(1, WIDTHS[0]), *(block(a, b, 2) for a, b in pairs)])
        self.ups = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs))
        self.decoder = nn.ModuleList(block(2 * a, a) for a, _ in reversed(pairs))
        self.heads = nn.ModuleList(nn.Conv3d(a, CLASSES, 1) for a, _ in reversed(pairs))

    def forward(self, x: Tensor) -> list[Tensor] | Tensor:
        """Logits [N, CLASSES, D, H, W], in training those of each scale too, finest first."""
        skips = []
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        skips.pop()
        outputs = []
        for up, stage, head in zip(self.ups, self.decoder, self.heads, strict=True):
            x = stage(torch.cat((up(x), skips.pop()), 1))
            outputs.append(head(x))
        return outputs[::-1] if self.deep_supervision else outputs[-1]


def dice_and_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The sum of both losses []; ``target`` [N, 1, D, H, W]; Dice over the batch, without the background."""
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    probable = logits.softmax(1)
    with torch.no_grad():
        wanted = torch.zeros_like(probable, dtype=torch.bool).scatter_(1, target, 1)
    axes = (0, 2, 3, 4)
    both, sums = (probable * wanted).sum(axes)[1:], (probable.sum(axes) + wanted.sum(axes))[1:]
    return F.cross_entropy(logits, target[:, 0]) - ((2 * both + 1e-5) / (sums + 1e-5).clip(1e-8)).mean()


def volumes(count: int, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Noisy volumes [count, 1, *shape] with two balls, and their labels of int64."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, n) for n in shape], indexing="ij"))
    labels = torch.zeros(count, 1, *shape, dtype=torch.long)
    for label in (1, 2):
        centres = torch.rand(count, 3, 1, 1, 1, generator=generator) - 0.5
        labels[(grid - centres).square().sum(1, keepdim=True) < 0.2] = label
    return labels + 0.3 * torch.randn(labels.shape, generator=generator), labels


def sliding(model: nn.Module, volume: Tensor) -> Tensor:
    """Logits [1, CLASSES, D, H, W] of patches that overlap by half, each seen as it is and mirrored."""
    axes = [torch.exp(-torch.linspace(-2, 2, n, dtype=volume.dtype).square()) for n in PATCH]
    weight = axes[0][:, None, None] * axes[1][:, None] * axes[2]
    total, weights = volume.new_zeros(1, CLASSES, *volume.shape[2:]), volume.new_zeros(volume.shape[2:])
    starts = [range(0, n - p + 1, p // 2) for n, p in zip(volume.shape[2:], PATCH, strict=True)]
    for corner in itertools.product(*starts):
        place = tuple(slice(c, c + p) for c, p in zip(corner, PATCH, strict=True))
        patch = volume[(slice(None), slice(None), *place)]
        views = [[], [2], [3], [2, 4]]
        found = sum(torch.flip(model(torch.flip(patch, view)), view) for view in views) / len(views)
        total[(slice(None), slice(None), *place)] += found * weight
        weights[place] += weight
    return total / weights


def main(run: Run) -> None:
    torch.manual_seed(0)
    net = run.to(PlainConvUNet())
    model = run.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, 0.9)
    run.track(net=net)
    for step in range(STEPS):
        images, labels = volumes(BATCH, PATCH, step)
        with run.autocast():
            outputs = model(run.to(images))
        targets = [F.interpolate(labels.float(), o.shape[2:], mode="nearest").long() for o in outputs]
        losses = [dice_and_entropy(o, t) / 2**i for i, (o, t) in enumerate(zip(outputs, targets, strict=True))]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 12)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss, norm=norm)

    net.eval()
    net.deep_supervision = False
    volume, labels = volumes(1, (12, 24, 24), 99)
    with torch.inference_mode(), run.autocast():
        logits = sliding(model, run.to(volume))
    found = logits.argmax(1, keepdim=True)
    dice = [2 * ((found == c) & (labels == c)).sum() / ((found == c).sum() + (labels == c).sum()) for c in (1, 2)]
    run.log(logits=logits)
    run.score(100, dice=torch.stack(dice))
