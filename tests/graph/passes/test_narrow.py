"""Interpolations between casts run in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend import backend
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph.passes.narrow import narrow_interpolations
from torch_max_backend.inspection.explain import explain_ahead

aten = torch.ops.aten


class Pyramid(nn.Module):
    """Features of three sizes side by side, as heads of segmentation have them."""

    def __init__(self, mode: str, read: str = "cat") -> None:
        super().__init__()
        self.mode, self.read = mode, read
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, stride=2) for _ in range(2))
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        second = self.down[0](first).relu()
        sizes = [self._resized(each, first) for each in (second, self.down[1](second))]
        if self.read == "sum":
            return self.head(torch.cat([first, sizes[0] + sizes[1], sizes[1] * 2], 1))
        if self.read == "float32":
            return self.head(torch.cat([first, *sizes], 1)).sum() + sum(each.square().sum() for each in sizes)
        return self.head(torch.cat([first, *sizes], 1))

    def _resized(self, x: Tensor, like: Tensor) -> Tensor:
        corners = {} if self.mode == "nearest" else {"align_corners": False}
        # As a GPU's autocast does.
        return F.interpolate(x.float(), like.shape[-2:], mode=self.mode, **corners)


def _step(run: Callable[..., Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.float().square().mean().backward()
    gradients = [weight.grad for weight in net.parameters()]
    return [y.detach(), *(each for each in gradients if each is not None)]


def _interpolations(net: nn.Module, x: Tensor) -> tuple[list[str], list[Tensor]]:
    """The functions of a step that interpolate, and what it makes."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        made = _step(torch.compile(net, backend="max", fullgraph=True), net, x)
    lists = [executable.listing for graph in graphs for executable in graph.executables]
    functions = [launch.function for listing in lists if listing is not None for launch in listing.launches]
    return [each for each in functions if "interpolate" in each], made


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_what_is_read_in_16_bits_is_interpolated_in_these(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Pyramid(mode)
    twin, x = copy.deepcopy(net), torch.randn(2, 3, 16, 24)
    functions, made = _interpolations(net, x)
    assert len(functions) == 4 and all("bfloat16" in each for each in functions)
    monkeypatch.setattr(backend, "narrow_interpolations", lambda joint: joint)
    wide, wanted = _interpolations(twin, x)
    assert len(wide) == 4 and all("float32" in each for each in wide)
    # Sums of the same products, perhaps in another order, rounded once.
    for ours, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=2**-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("read", ["sum", "float32"])
def test_what_is_read_in_float32_stays(read: str) -> None:
    """Sums of interpolated values, and results beside a concatenation."""
    torch.manual_seed(0)
    net = Pyramid("bilinear", read)
    functions, _ = _interpolations(net, torch.randn(2, 3, 16, 24))
    assert len(functions) == 4 and all("float32" in each for each in functions[:2])


def test_a_head_of_segmentation_works_in_less_memory() -> None:
    """What is interpolated lies in memory in bfloat16, before the concatenation and behind its gradient."""
    net = Pyramid("bilinear").to(memory_format=torch.channels_last)
    x = torch.empty(4, 3, 128, 128).contiguous(memory_format=torch.channels_last)
    account = explain_ahead(net, x, target="sm_90a", autocast=torch.bfloat16, quiet=True)
    assert account.memory is not None
    feature = 4 * 8 * 128 * 128 * 2
    workspaces = {call.graph: call.workspace for call in account.memory.calls}
    assert workspaces["forward"] < 2.5 * feature
    assert workspaces["backward"] < 2.5 * feature


def test_readers_of_a_dense_net_are_looked_at_once() -> None:
    """Each concatenation reads the last two, so paths from the interpolation double every other time."""

    def dense(x: Tensor) -> Tensor:
        values = [aten.upsample_nearest2d.default(x.float(), [8, 8])] * 2
        for _ in range(120):
            values.append(torch.cat(values[-2:], 1)[:, :4])
        return torch.cat(values[-2:], 1).bfloat16()

    graph = make_fx(dense, tracing_mode="fake")(torch.randn(2, 3, 4, 4, dtype=torch.bfloat16))
    narrow_interpolations(graph)
    dtypes = {node.meta["val"].dtype for node in graph.graph.nodes if node.op == "call_function"}
    assert dtypes == {torch.bfloat16}
