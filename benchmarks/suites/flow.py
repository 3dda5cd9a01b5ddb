"""A network that makes the frame between two frames by optical flow (Jiang 2017, Super SloMo)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.suites.case import wide


class FlowUNet(nn.Module):
    """UNet with average pooling, bilinear upsampling and leaky ReLU; five levels, filters of 7, 5 and 3."""

    def __init__(self, inputs: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)] + [16 * width]
        sizes = (7, 5, 3, 3, 3, 3)
        ins = [inputs, *widths[:-1]]
        self.down = nn.ModuleList(_pair(i, o, size) for i, o, size in zip(ins, widths, sizes, strict=True))
        below = widths[-1]
        ups = []
        for skip in widths[-2::-1]:
            ups.append(nn.ModuleList([nn.Conv2d(below, skip, 3, padding=1), nn.Conv2d(2 * skip, skip, 3, padding=1)]))
            below = skip
        self.up = nn.ModuleList(ups)
        self.head = nn.Conv2d(width, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for number, block in enumerate(self.down):
            if number:
                skips.append(x)
                x = F.avg_pool2d(x, 2)
            x = block(x)
        for first, second in self.up:  # type: ignore[misc]
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = F.leaky_relu(first(x), 0.1)
            x = F.leaky_relu(second(torch.cat([x, skips.pop()], 1)), 0.1)
        return self.head(x)


def _pair(inputs: int, outputs: int, size: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, size, padding=size // 2), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers)


def warped(image: Tensor, flow: Tensor) -> Tensor:
    """The image [N, C, H, W] looked up where ``flow`` [N, 2, H, W] leads, in pixels."""
    height, width = image.shape[2:]
    rows = torch.arange(height, device=image.device, dtype=flow.dtype)[:, None]
    columns = torch.arange(width, device=image.device, dtype=flow.dtype)
    x = (columns + flow[:, 0]) * (2 / (width - 1)) - 1
    y = (rows + flow[:, 1]) * (2 / (height - 1)) - 1
    return F.grid_sample(image, torch.stack([x, y], 3).to(image.dtype), align_corners=True)


class SlowMotion(nn.Module):
    """The frame at time t in (0, 1) between two frames [N, 3, H, W], and both flows [N, 4, H, W]; H and W are
    multiples of 32.

    Flows between the frames, flows from time t made of these and refined beside what they fetch, visibility of either
    frame, and both frames fetched and blended.
    """

    def __init__(self, width: int = 32, time: float = 0.5) -> None:
        super().__init__()
        self.between = FlowUNet(6, 4, width)
        self.refine = FlowUNet(16, 5, width)
        self.time = time

    def forward(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        t = self.time
        flows = self.between(torch.cat([before, after], 1))
        onward, backward = flows[:, :2], flows[:, 2:]
        to_before = -(1 - t) * t * onward + t * t * backward
        to_after = (1 - t) * (1 - t) * onward - t * (1 - t) * backward
        fetched = [warped(before, to_before), warped(after, to_after)]
        seen = [each.to(flows.dtype) for each in (before, *fetched, after)]
        refined = self.refine(torch.cat([*seen, to_before, to_after], 1))
        to_before, to_after = to_before + refined[:, :2], to_after + refined[:, 2:4]
        visible = torch.sigmoid(refined[:, 4:])
        weights = (1 - t) * visible, t * (1 - visible)
        blended = weights[0] * warped(before, to_before) + weights[1] * warped(after, to_after)
        return blended / (weights[0] + weights[1]), flows


def reconstruct(outputs: tuple[Tensor, Tensor], frame: Tensor) -> Tensor:
    """The frame in between is met, and flows are smooth."""
    made, flows = (wide(each) for each in outputs)
    steps = flows.diff(dim=2).abs().mean() + flows.diff(dim=3).abs().mean()
    return (made - frame).abs().mean() + 0.1 * steps
