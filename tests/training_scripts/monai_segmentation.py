"""MONAI: its UNet and SegResNet with DiceCELoss, dictionaries' transforms left out, sliding-window inference and
DiceMetric."""

from __future__ import annotations

import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet, UNet
from monai.networks.utils import one_hot
from monai.utils import set_determinism
from torch import nn

from tests.training_scripts.nnunet import volumes
from tests.training_scripts.runner import Run

CLASSES, PATCH, STEPS = 3, (16, 16, 16), 10


def networks() -> dict[str, nn.Module]:
    return {
        "unet": UNet(3, 1, CLASSES, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, norm="instance", dropout=0.1),
        "segresnet": SegResNet(3, init_filters=8, in_channels=1, out_channels=CLASSES, blocks_down=(1, 1, 1),
                               blocks_up=(1, 1)),
    }  # fmt: skip


def main(run: Run) -> None:
    set_determinism(0)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False)
    for name, net in networks().items():
        run.to(net)
        run.track(**{name: net})
        model = run.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-4)
        for step in range(STEPS):
            images, labels = volumes(2, PATCH, step)
            with run.autocast():
                loss = criterion(model(run.to(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(**{f"{name}_loss": loss})

        net.eval()
        volume, labels = volumes(1, (24, 24, 16), 99)
        with torch.no_grad(), run.autocast():
            logits = sliding_window_inference(run.to(volume), PATCH, 3, model, overlap=0.5, mode="gaussian")
        metric = DiceMetric(include_background=False)
        metric(one_hot(logits.argmax(1, keepdim=True), CLASSES), one_hot(labels, CLASSES))
        run.log(**{f"{name}_logits": logits})
        run.score(100, **{f"{name}_dice": metric.aggregate()})
