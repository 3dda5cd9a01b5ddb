"""Hugging Face's Trainer: a vision transformer of transformers with dropout, activation checkpointing, label smoothing,
warm-up and cosine, accumulated gradients, smaller last batches, and evaluation with a metric."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, SIDE = 4, 32


class Logged(TrainerCallback):
    """Hands what the trainer logs on."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **rest: object) -> None:
        names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "train_loss")
        self.run.log(**{name: torch.tensor(float(logs[name])) for name in names if name in logs})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean(dtype=np.float64))}


def rows(run: Run, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    images, labels, _ = discs(count, SIDE, CLASSES, seed)
    return [{"pixel_values": x, "labels": y} for x, y in zip(run.to(images), labels, strict=True)]


def main(run: Run) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=SIDE,
        patch_size=8, num_labels=CLASSES, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = run.to(ViTForImageClassification(config))
    run.track(model=model)
    run.compile_in_place(model)
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=3, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=3,
        weight_decay=0.05, adam_epsilon=1e-5, label_smoothing_factor=0.1, max_grad_norm=1.0, bf16=run.amp, use_cpu=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, eval_strategy="epoch",
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(run, 44, 0), eval_dataset=rows(run, 12, 1),
        compute_metrics=accuracy, callbacks=[Logged(run)],
    )  # fmt: skip
    trainer.train()
    run.log(logits=torch.from_numpy(trainer.predict(rows(run, 12, 2)).predictions))
