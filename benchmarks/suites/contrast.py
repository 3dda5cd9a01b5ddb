"""Momentum contrast (He 2019): a query encoder learns, a key encoder follows it, a queue keeps keys."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.suites.case import wide


class MomentumContrast(nn.Module):
    """Logits [N, 1 + queue] of two views of N images: the first is that of the image's own key.

    Args:
        encoder: images [N, 3, H, W] to features [N, C].
        features: C.
        queue: how many keys are kept, a multiple of N.
        momentum: of the key encoder's weights.
        temperature: by which similarities are divided.
    """

    def __init__(
        self, encoder: nn.Module, features: int, queue: int = 32768, momentum: float = 0.999, temperature: float = 0.07
    ) -> None:
        super().__init__()
        self.query, self.key = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(queue, features), dim=1))

    def forward(self, views: Tensor, others: Tensor) -> Tensor:
        queries = F.normalize(self.query(views), dim=1)
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(self.momentum).add_(query, alpha=1 - self.momentum)
            keys = F.normalize(self.key(others), dim=1).to(queries.dtype)
        own = (queries * keys).sum(1, keepdim=True)
        # The queue changes below; its gradient is not asked for, but that of the queries reads it.
        rest = queries @ self.queue.to(queries.dtype, copy=True).T
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys.to(self.queue.dtype), self.queue[: -len(keys)]]))
        return torch.cat([own, rest], 1) / self.temperature


def contrast(logits: Tensor) -> Tensor:
    """Each image's own key stands out."""
    return F.cross_entropy(wide(logits), torch.zeros(len(logits), dtype=torch.long, device=logits.device))
