"""A GAN with spectral normalization (Miyato 2018): the hinge loss, two steps of the critic for one of the generator, an
average of the generator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, LATENT, BATCH, STEPS, CRITIC_STEPS = 16, 12, 8, 10, 2


def generator(width: int = 8) -> nn.Sequential:
    """Images [N, 3, 16, 16] in [-1, 1] of latents [N, LATENT, 1, 1]."""
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(True),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(True),
        nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic(width: int = 8) -> nn.Sequential:
    """Judgements [N, 1] of images [N, 3, 16, 16]."""
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, width, 3, padding=1)), nn.LeakyReLU(0.1, True),
        spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, 1)), nn.LeakyReLU(0.1, True),
        spectral_norm(nn.Conv2d(2 * width, 4 * width, 4, 2, 1)), nn.LeakyReLU(0.1, True),
        nn.Flatten(), spectral_norm(nn.Linear(4 * width * 16, 1)),
    )  # fmt: skip


def main(run: Run) -> None:
    torch.manual_seed(0)
    images = discs(BATCH * 5, SIDE)[0] * 2 - 1
    maker, judge = run.to(generator()), run.to(critic())
    make, score = run.compile(maker), run.compile(judge)
    average = AveragedModel(make, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    of_maker = torch.optim.Adam(maker.parameters(), 5e-4, betas=(0.0, 0.9), eps=1e-4)
    of_judge = torch.optim.Adam(judge.parameters(), 5e-4, betas=(0.0, 0.9), eps=1e-4)
    run.track(generator=maker, critic=judge, average=average)

    def latents(count: int) -> Tensor:
        return run.to(torch.randn(count, LATENT, 1, 1))

    for step in range(STEPS):
        for turn in range(CRITIC_STEPS):
            place = (step * CRITIC_STEPS + turn) % 5 * BATCH
            with run.autocast():
                real = score(run.to(images[place : place + BATCH]))
                with torch.no_grad():
                    fake = make(latents(BATCH))
                judged = score(fake)
                loss = F.relu(1 - real).mean() + F.relu(1 + judged).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            run.log(critic=loss)
        judge.requires_grad_(False)
        with run.autocast():
            loss = -score(make(latents(BATCH))).mean()
        of_maker.zero_grad()
        loss.backward()
        of_maker.step()
        judge.requires_grad_(True)
        average.update_parameters(make)
        run.log(generator=loss)

    average.eval()
    with torch.no_grad():
        run.log(samples=average(latents(4)))
