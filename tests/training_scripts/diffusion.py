"""diffusers: UNet2DModel learns to find the noise that a DDPM scheduler has added, with an average of its weights, and
samples; then AutoencoderKL with reconstruction and KL."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, BATCH, STEPS = 16, 4, 10


def denoising(run: Run, images: torch.Tensor) -> None:
    net = run.to(
        UNet2DModel(
            SIDE, 3, 3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )  # fmt: skip
    run.track(unet=net)
    model = run.compile(net)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-4)
    rates = get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    ema = EMAModel(net.parameters(), decay=0.9)
    for step in range(STEPS):
        clean = run.to(images[step % 3 * BATCH : (step % 3 + 1) * BATCH])
        noise = run.to(torch.randn(clean.shape))
        times = torch.randint(0, 100, (BATCH,))
        with run.autocast():
            loss = F.mse_loss(model(scheduler.add_noise(clean, noise, times), times).sample, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
        run.log(loss=loss)

    ema.copy_to(net.parameters())
    sampler = DDIMScheduler(num_train_timesteps=100)
    sampler.set_timesteps(4)
    x = run.to(torch.randn(2, 3, SIDE, SIDE))
    with torch.no_grad():
        for time in sampler.timesteps:
            x = sampler.step(model(x, time.expand(2)).sample, time, x).prev_sample
    run.log(samples=x)


def autoencoding(run: Run, images: torch.Tensor) -> None:
    net = run.to(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2,
        )
    )  # fmt: skip
    run.track(vae=net)
    encode, decode = run.compile(net.encode), run.compile(net.decode)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-4)
    for step in range(STEPS):
        clean = run.to(images[step % 3 * BATCH : (step % 3 + 1) * BATCH])
        with run.autocast():
            posterior = encode(clean).latent_dist
            z = posterior.mean + posterior.std * run.to(torch.randn(posterior.mean.shape))
            loss = F.l1_loss(decode(z).sample, clean) + 1e-3 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(vae_loss=loss)


def main(run: Run) -> None:
    torch.manual_seed(0)
    images = discs(BATCH * 3, SIDE)[0] * 2 - 1
    denoising(run, images)
    autoencoding(run, images)
