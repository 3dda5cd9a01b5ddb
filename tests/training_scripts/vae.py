"""A variational autoencoder (Kingma 2013) with convolutions: draws inside the model, binary cross entropy and KL with a
weight that grows, then samples and the evidence's bound of several draws."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, BATCH, EPOCHS, LATENT = 16, 8, 5, 6


class VAE(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(), nn.Flatten(),
            nn.Linear(32 * width, 2 * LATENT),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 32 * width), nn.SiLU(), nn.Unflatten(1, (2 * width, 4, 4)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, beta: Tensor) -> dict[str, Tensor]:
        """Losses [] for images [N, 3, 16, 16], and a reconstruction's logits."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
        logits = self.decoder(z)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return {"loss": reconstruction + beta * kl, "reconstruction": reconstruction, "kl": kl, "logits": logits}


def main(run: Run) -> None:
    torch.manual_seed(0)
    images = discs(28, SIDE)[0].clamp(0, 1)
    net = run.to(VAE())
    model = run.compile(net)
    optimizer = torch.optim.Adamax(net.parameters(), 2e-3, eps=1e-4)
    run.track(net=net)
    steps = 0
    for _ in range(EPOCHS):
        for batch in images.split(BATCH):
            steps += 1
            with run.autocast():
                found = model(run.to(batch), run.to(torch.tensor(min(1.0, steps / 10))))
            optimizer.zero_grad()
            found["loss"].backward()
            nn.utils.clip_grad_value_(net.parameters(), 50.0)
            optimizer.step()
            run.log(**{name: found[name] for name in ("loss", "reconstruction", "kl")})

    net.eval()
    with torch.no_grad(), run.autocast():
        bounds = [model(run.to(images[:BATCH]), run.to(torch.tensor(1.0)))["loss"] for _ in range(3)]
        samples = run.compile(net.decoder)(run.to(torch.randn(4, LATENT)))
    run.log(bound=torch.stack(bounds).float().logsumexp(0), samples=samples.sigmoid())
