"""In the manner of timm's training script: mixup, AdamW with layer decay, accumulated and clipped gradients, warm-up,
a cosine schedule, stochastic depth, an average of the weights on its own schedule."""

from __future__ import annotations

import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, accuracy, dispatch_clip_grad, random_seed

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, SIDE, BATCH, EPOCHS, ACCUMULATED = 4, 32, 8, 4, 2


def build() -> VisionTransformer:
    return timm.models.VisionTransformer(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=CLASSES,
        init_values=1e-1, drop_path_rate=0.2, proj_drop_rate=0.1, class_token=True, reg_tokens=2,
    )  # fmt: skip


def main(run: Run) -> None:
    random_seed(0)
    images, labels, _ = discs(48, SIDE, CLASSES)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    net = run.to(build())
    optimizer = create_optimizer_v2(net, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.75)
    updates = len(images) // BATCH // ACCUMULATED
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=1, warmup_lr=1e-5, min_lr=1e-5,
        step_on_epochs=False, updates_per_epoch=updates,
    )  # fmt: skip
    model = run.compile(net)
    ema = ModelEmaV3(net, decay=0.9, use_warmup=True)
    ema_model = run.compile(ema.module)
    criterion = SoftTargetCrossEntropy()
    run.track(model=net, ema=ema.module)

    update = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        model.train()
        for number, chosen in enumerate(torch.randperm(len(images), generator=generator).split(BATCH)):
            batch, targets = mixup(images[chosen], labels[chosen])
            with run.autocast():
                loss = criterion(model(run.to(batch)), run.to(targets)) / ACCUMULATED
            loss.backward()
            run.log(loss=loss)
            if (number + 1) % ACCUMULATED:
                continue
            dispatch_clip_grad(net.parameters(), value=1.0, mode="norm")
            optimizer.step()
            optimizer.zero_grad()
            update += 1
            ema.update(net, step=update)
            scheduler.step_update(num_updates=update)

    validation, targets, _ = discs(20, SIDE, CLASSES, seed=1)
    for network, name in ((model, "model"), (ema_model, "ema")):
        network.eval()
        with torch.no_grad(), run.autocast():
            outputs = torch.cat([network(run.to(batch)) for batch in validation.split(BATCH)])
        top1, top3 = accuracy(outputs, targets, topk=(1, 3))
        run.log(**{f"{name}_loss": F.cross_entropy(outputs.float(), targets)})
        run.score(len(targets), **{f"{name}_top1": top1 / 100, f"{name}_top3": top3 / 100})
