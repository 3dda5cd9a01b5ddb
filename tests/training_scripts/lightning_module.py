"""Lightning's Trainer: a module with a segmentation network, gradients accumulated and clipped, a schedule for each
step, validation with the mean IoU after each epoch, precision by the trainer, smaller last batches."""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

SIDE, BATCH, EPOCHS = 32, 4, 4


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels, upsampled bilinearly."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = block(3, width)
        self.bottom = nn.Sequential(nn.MaxPool2d(2), block(width, 2 * width), nn.Dropout2d(0.1))
        self.up = block(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 1, H, W] of images [N, 3, H, W]."""
        fine = self.down(x)
        coarse = F.interpolate(self.bottom(fine), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up(torch.cat((fine, coarse), 1)))


class Segmentation(lightning.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.net = run.to(UNet())
        run.compile_in_place(self.net)
        self.sums: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Cross entropy and Dice [], and predictions [N, H, W]."""
        images, masks = (self.run.to(value) for value in batch)
        logits = self.net(images)[:, 0]
        wanted = masks.to(images.dtype)
        probable = logits.sigmoid()
        dice = 1 - (2 * (probable * wanted).sum() + 1) / (probable.sum() + wanted.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, wanted) + dice, logits > 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss, _ = self.loss(batch)
        self.log("loss", loss)
        self.run.log(loss=loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss, found = self.loss(batch)
        masks = batch[1].bool()
        self.sums.append(torch.stack(((found & masks).sum(), (found | masks).sum())))
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        both, either = torch.stack(self.sums).sum(0)
        self.sums.clear()
        self.run.log(iou=both.float() / either, val_loss=self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2e-3, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(run: Run) -> None:
    lightning.seed_everything(0, verbose=False)
    images, _, masks = discs(30, SIDE)
    held_out, _, held_out_masks = discs(10, SIDE, seed=1)
    module = Segmentation(run)
    run.track(net=module.net)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", precision="bf16-mixed" if run.amp else None, accumulate_grad_batches=2,
        gradient_clip_val=1.0, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(
        module,
        DataLoader(TensorDataset(images, masks), BATCH, shuffle=True),
        DataLoader(TensorDataset(held_out, held_out_masks), BATCH),
    )
