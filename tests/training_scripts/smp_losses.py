"""segmentation_models_pytorch: a Unet and an FPN on a ResNet-18's features, with five of its losses in turn, and its
metrics."""

from __future__ import annotations

import segmentation_models_pytorch as smp
import torch

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, BATCH, STEPS = 64, 4, 10


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, _, masks = discs(BATCH * 3, SIDE)
    losses = {
        "dice": smp.losses.DiceLoss("binary"),
        "jaccard": smp.losses.JaccardLoss("binary"),
        "focal": smp.losses.FocalLoss("binary"),
        "tversky": smp.losses.TverskyLoss("binary", alpha=0.3, beta=0.7),
        "lovasz": smp.losses.LovaszLoss("binary"),
    }
    nets = {
        "unet": smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 8)),
        "fpn": smp.FPN("resnet18", encoder_weights=None, decoder_pyramid_channels=16, decoder_segmentation_channels=32),
    }
    for name, net in nets.items():
        run.to(net)
        run.track(**{name: net})
        model = run.compile(net)
        optimizer = torch.optim.Adam(net.parameters(), 1e-5, eps=1e-2)
        for step in range(STEPS):
            chosen = slice(step % 3 * BATCH, (step % 3 + 1) * BATCH)
            kind = list(losses)[step % len(losses)]
            with run.autocast():
                logits = model(run.to(images[chosen]))
            loss = losses[kind](logits.float(), masks[chosen][:, None])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(**{f"{name}_{kind}": loss})

        net.eval()
        with torch.no_grad(), run.autocast():
            logits = model(run.to(images[:3]))
        counts = smp.metrics.get_stats((logits > 0).long(), masks[:3][:, None], mode="binary")
        run.log(**{f"{name}_logits": logits})
        run.score(100, **{f"{name}_iou": smp.metrics.iou_score(*counts, reduction="micro")})
