"""A detection model of torchvision trains on images whose numbers of boxes differ: eager's losses and gradients, and no
graph is traced again once sizes are symbolic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("torchvision")

from benchmarks.training.detection_training import batch_of, error, model_of, step

SIZE = 64


def test_retinanet() -> None:
    torch.manual_seed(0)
    eager = model_of("tiny_retinanet", SIZE)
    ours = copy.deepcopy(eager)
    torch._dynamo.reset()
    run = torch.compile(ours, backend="max")
    traced = []
    for number in range(4):
        batch = batch_of("tiny_retinanet", SIZE, number)
        before = counters["stats"]["unique_graphs"]
        losses, gradients = step(run, ours, batch, number)
        traced.append(counters["stats"]["unique_graphs"] - before)
        wanted, theirs = step(eager, eager, batch, number)
        assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert gradients.keys() == theirs.keys() and error(gradients, theirs) < 1e-4
    assert traced[0] > 0 and traced[2:] == [0, 0], f"graphs traced by step: {traced}"
