"""RAFT (Teed 2020) as torchvision has it, small: pairs of frames that are moved by whole pixels, the loss over all
refinements, one cycle of the rate, the end-point error."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.optical_flow import raft_small

from tests.training_scripts.runner import Run

SIDE, BATCH, STEPS, REFINEMENTS, GAMMA = 128, 1, 10, 2, 0.8


def pairs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Frames [BATCH, 3, SIDE, SIDE] in [-1, 1], the same moved, and the flow [BATCH, 2, SIDE, SIDE]."""
    generator = torch.Generator().manual_seed(step)
    coarse = torch.rand(BATCH, 3, SIDE // 4, SIDE // 4, generator=generator) * 2 - 1
    frames = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    right, down = torch.randint(-3, 4, (2,), generator=generator).tolist()
    flow = torch.tensor([float(right), float(down)]).view(1, 2, 1, 1).expand(BATCH, 2, SIDE, SIDE)
    return frames, frames.roll((down, right), (2, 3)), flow


def sequence_loss(predictions: list[Tensor], flow: Tensor) -> Tensor:
    losses = [GAMMA ** (len(predictions) - i - 1) * (p - flow).abs().mean() for i, p in enumerate(predictions)]
    return torch.stack(losses).sum()


def main(run: Run) -> None:
    torch.manual_seed(0)
    net = run.to(raft_small(weights=None))
    model = run.compile(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, weight_decay=5e-5, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, STEPS + 5, pct_start=0.2, anneal_strategy="linear")
    run.track(net=net)
    for step in range(STEPS):
        first, second, flow = (run.to(value) for value in pairs(step))
        with run.autocast():
            loss = sequence_loss(model(first, second, num_flow_updates=REFINEMENTS), flow)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)

    net.eval()
    first, second, flow = (run.to(value) for value in pairs(STEPS))
    with torch.no_grad(), run.autocast():
        found = model(first, second, num_flow_updates=REFINEMENTS)[-1]
    run.log(flow=found, error=(found - flow).square().sum(1).sqrt().mean())
