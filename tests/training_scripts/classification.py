"""torchvision's recipe for classification: mixup and cutmix, label smoothing, weight decay without norms, warm-up and
cosine, an average of the weights, evaluated at the end with its last batch smaller."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision.models import ShuffleNetV2
from torchvision.transforms import v2

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, SIDE, BATCH, EPOCHS = 4, 48, 8, 3


def parameter_groups(model: nn.Module, decay: float) -> list[dict]:
    """Normalization's parameters are not decayed."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for module in model.modules():
        groups[isinstance(module, nn.BatchNorm2d)] += module.parameters(recurse=False)
    return [{"params": groups[False], "weight_decay": decay}, {"params": groups[True], "weight_decay": 0.0}]


def accuracy(output: torch.Tensor, target: torch.Tensor, top: int) -> torch.Tensor:
    """The share of images whose class is among the first ``top``."""
    return (output.topk(top, 1).indices == target[:, None]).any(1).float().mean()


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, labels, _ = discs(48, SIDE, CLASSES)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=CLASSES), v2.CutMix(alpha=1.0, num_classes=CLASSES)])
    loader = DataLoader(
        TensorDataset(images, labels), BATCH, shuffle=True, collate_fn=lambda batch: mix(*default_collate(batch))
    )
    net = run.to(ShuffleNetV2([2, 2, 1], [8, 16, 32, 64, 64], CLASSES))
    model = run.compile(net)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(parameter_groups(net, 2e-5), lr=0.002, momentum=0.9, nesterov=True)
    warm = LinearLR(optimizer, start_factor=0.01, total_iters=len(loader))
    cosine = CosineAnnealingLR(optimizer, T_max=(EPOCHS - 1) * len(loader))
    scheduler = SequentialLR(optimizer, [warm, cosine], milestones=[len(loader)])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.track(model=net, ema=ema)

    for _ in range(EPOCHS):
        model.train()
        for batch, targets in loader:
            with run.autocast():
                loss = criterion(model(run.to(batch)), run.to(targets))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            run.log(loss=loss, rate=scheduler.get_last_lr()[0])

    validation, targets, _ = discs(20, SIDE, CLASSES, seed=1)
    for network, name in ((model, "model"), (ema, "ema")):
        network.eval()
        with torch.inference_mode(), run.autocast():
            outputs = torch.cat([network(run.to(batch)) for batch in validation.split(BATCH)]).float()
        run.log(**{f"{name}_loss": criterion(outputs, targets)})
        run.score(len(targets), **{f"{name}_top{top}": accuracy(outputs, targets, top) for top in (1, 3)})
