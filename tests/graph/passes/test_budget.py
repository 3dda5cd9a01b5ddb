"""Memory budgets: what is kept falls as asked, and gradients stay those of eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_max_backend import backend, explain_ahead

BUDGETS = (1.0, 0.8, 0.6, 0.4)


class Block(nn.Module):
    """A residual block, with dropout between its convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.relu(self.norms[0](self.first(x))), 0.3, self.training)
        return F.relu(self.norms[1](self.second(y)) + x)


class Attention(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class UNet(nn.Module):
    """Two levels that meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(3, 16, 3, padding=1), Block(16)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.down(x))
        return self.out(F.leaky_relu(torch.cat([x, self.up(self.low(F.max_pool2d(x, 2)))], 1)))


def _residual() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[Block(16) for _ in range(4)]), torch.randn(4, 3, 32, 32)


def _transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Attention(32) for _ in range(4)]), torch.randn(8, 64, 32)


def _unet() -> tuple[nn.Module, Tensor]:
    return UNet(), torch.randn(4, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "residual": _residual, "transformer": _transformer, "unet": _unet,
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_kept_than_asked_for(name: str) -> None:
    """And the peak falls with it, on a GPU that is not there."""
    model, x = MODELS[name]()
    kept, peaks = [], []
    for budget in BUDGETS:
        with functorch_config.patch(activation_memory_budget=budget):
            account = explain_ahead(model, x, target="sm_90a", autocast=torch.bfloat16, quiet=True)
        assert account.memory is not None and account.fallback_count == 0
        kept.append(account.memory.saved_bytes)
        peaks.append(account.memory.added)
    for budget, size in zip(BUDGETS, kept, strict=True):
        assert size <= budget * kept[0]
    # Of so small models workspaces are a large part.
    assert all(after <= 1.03 * before for before, after in itertools.pairwise(peaks)) and peaks[-1] < peaks[0], peaks


class Checkpointed(nn.Module):
    """A block that the user has computed again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("budget", [0.8, 0.4, 0.1])
@pytest.mark.parametrize("name", [*MODELS, "checkpointed"])
def test_gradients_are_eagers(name: str, budget: float) -> None:
    """With what was drawn in the forward pass, and running statistics that are updated once."""
    if name == "checkpointed":
        # Eager PyTorch would update running statistics once more when it computes again.
        twin: nn.Module = nn.Sequential(nn.Conv2d(3, 16, 1), Block(16), Block(16))
        first, second, third = copy.deepcopy(twin)
        model: nn.Module = nn.Sequential(first, Checkpointed(second), third)
        x = torch.randn(2, 3, 16, 16)
    else:
        model, x = MODELS[name]()
        twin = copy.deepcopy(model)
    results, gradients = [], []
    with functorch_config.patch(activation_memory_budget=budget), backend.recorded_graphs() as graphs:
        for net, own in ((torch.compile(model, backend="max"), model), (twin, twin)):
            torch.manual_seed(7)
            result = net(x)
            result.square().mean().backward()
            results.append(result)
            gradients.append([parameter.grad for parameter in own.parameters()])
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()), rtol=1e-4, atol=1e-5)
