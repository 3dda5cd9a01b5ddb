"""The tools that people train with, as their users write it, at the smallest size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.test_habits import LABELS, STRICT, Net, images
from torch_max_backend.graph.compiled import CompiledGraph


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # The tools' own, of PyTorch's newest version and of slow data loaders.
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _eager(steps: int, make: Any) -> Net:
    """The same steps in a plain loop."""
    net = _net()
    optimizer = make(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(images()), LABELS).backward()
        optimizer.step()
    return net


def _assert_equal(net: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_lightning(graphs: list[CompiledGraph]) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            self.net.compile(backend="max", options=STRICT)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images(), LABELS), batch_size=4))
    _assert_equal(module.net, _eager(3, lambda parameters: torch.optim.SGD(parameters, 0.1)))
    assert [graph.name for graph in graphs] == ["forward", "backward"]


class Classifier(nn.Module):
    """A model as Hugging Face's Trainer takes it: it computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_hugging_face_trainer(graphs: list[CompiledGraph]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = Classifier()
    model.net.compile(backend="max", options=STRICT)
    arguments = transformers.TrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        dataloader_pin_memory=False,
    )
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(images(), LABELS, strict=True)]
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    _assert_equal(model.net, _eager(3, lambda parameters: torch.optim.SGD(parameters, 0.1)))
    assert [graph.name for graph in graphs] == ["forward", "backward"]


def test_accelerate(graphs: list[CompiledGraph]) -> None:
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="'MAX' is not a valid DynamoBackend"):
        accelerate.Accelerator(cpu=True, dynamo_backend="max")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _net()
    model = torch.compile(net, backend="max", options=STRICT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(images(), LABELS), batch_size=4)
    )
    for _ in range(4):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(batch), labels))
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    # The last batch of a loader always steps, and this loader has one: four steps with half the gradient.
    _assert_equal(net, _eager(4, lambda parameters: torch.optim.SGD(parameters, 0.05)))
