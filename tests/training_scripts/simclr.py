"""SimCLR (Chen 2020): two views of each image, the normalized temperature-scaled cross entropy, then a linear probe on
frozen features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, SIDE, BATCH, EPOCHS, TEMPERATURE = 4, 32, 16, 4, 0.5


class SimCLR(nn.Module):
    """An encoder and the projection head that pretraining alone uses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))

    def forward(self, views: Tensor) -> Tensor:
        """The loss [] of views [2 N, 3, H, W], of which i and i + N show the same image."""
        z = F.normalize(self.projection(self.encoder(views)), dim=1)
        count = len(z) // 2
        similarity = z @ z.T / TEMPERATURE
        similarity = similarity.masked_fill(torch.eye(2 * count, dtype=torch.bool, device=z.device), float("-inf"))
        return F.cross_entropy(similarity, torch.arange(2 * count, device=z.device).roll(count))


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, labels, _ = discs(48, SIDE, CLASSES)
    augment = v2.Compose([v2.RandomResizedCrop(SIDE, (0.5, 1.0)), v2.RandomHorizontalFlip(), v2.GaussianBlur(3)])
    net = run.to(SimCLR())
    model = run.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(images) // BATCH)
    run.track(net=net)
    for _ in range(EPOCHS):
        for batch in images[torch.randperm(len(images))].split(BATCH):
            views = torch.cat([torch.stack([augment(image) for image in batch]) for _ in range(2)])
            with run.autocast():
                loss = model(run.to(views))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)

    net.requires_grad_(False).eval()
    encoder = run.compile(net.encoder)
    features = encoder(run.to(images))
    probe = run.to(nn.Linear(features.shape[1], CLASSES))
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(probe(features), labels)
        loss.backward()
        return loss

    run.log(probe_loss=optimizer.step(closure))
    held_out, targets, _ = discs(24, SIDE, CLASSES, seed=1)
    logits = probe(encoder(run.to(held_out)))
    run.log(features=features, logits=logits)
    run.score(len(targets), accuracy=(logits.argmax(1) == targets).float().mean())
