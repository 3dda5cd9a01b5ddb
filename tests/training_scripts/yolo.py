"""ultralytics: a YOLOv8 detector with its loss and its assignment of targets, weight decay split as its trainer does,
boxes that differ in number from image to image, an average of the weights, and suppressed predictions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.loss import v8DetectionLoss
from ultralytics.utils.torch_utils import ModelEMA

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, SIDE, BATCH, STEPS = 4, 64, 4, 10


def boxes(masks: Tensor) -> Tensor:
    """Centres, widths and heights [N, 4] of masks [N, SIDE, SIDE], in units of the image."""
    found = []
    for mask in masks:
        rows, columns = mask.nonzero().unbind(1)
        low, high = torch.stack((columns.min(), rows.min())), torch.stack((columns.max(), rows.max())) + 1
        found.append(torch.cat(((low + high) / 2, high - low)) / SIDE)
    return torch.stack(found)


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, labels, masks = discs(BATCH * 3, SIDE, CLASSES)
    net = DetectionModel("yolov8n.yaml", nc=CLASSES, verbose=False)
    net.args = get_cfg()
    run.to(net)
    model = run.compile(net)
    criterion = v8DetectionLoss(net)
    norms = [p for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)]
    others = [p for p in net.parameters() if p.requires_grad and not any(p is n for n in norms)]
    groups = [{"params": others, "weight_decay": 5e-4}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 2e-4, momentum=0.9, nesterov=True)
    ema = ModelEMA(net, decay=0.9, tau=1)
    run.track(net=net, ema=ema.ema)
    for step in range(STEPS):
        chosen = slice(step % 3 * BATCH, (step % 3 + 1) * BATCH)
        # An image in each batch has no object.
        batch = {
            "img": run.to(images[chosen]),
            "cls": labels[chosen][1:, None].float(),
            "bboxes": boxes(masks[chosen][1:]),
            "batch_idx": torch.arange(1, BATCH).float(),
        }
        with run.autocast():
            losses, parts = criterion(model(batch["img"]), batch)
        optimizer.zero_grad()
        losses.sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        ema.update(net)
        run.log(**dict(parts))

    net.eval()
    with torch.no_grad(), run.autocast():
        run.log(predictions=model(run.to(images[:2]))[0])
