"""Channels that are no whole rows of 16 bytes are filled up around convolutions."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.step_graphs import step_graphs
from torch_max_backend.graph.passes import whole_rows
from torch_max_backend.graph.passes.whole_rows import ROW, fill_rows

aten = torch.ops.aten


class Net(nn.Module):
    """Convolutions with and without a bias, of odd channels at either side, one after the other and side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 18, 3, padding=1)
        self.wide = nn.Conv2d(18, 40, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(40, track_running_stats=False)
        self.narrow = nn.Conv2d(40, 20, 1)
        self.own = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.last = nn.Conv2d(20, 17, (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.narrow(F.relu(self.norm(self.wide(F.relu(self.stem(x))))))
        return self.last(torch.cat([first[:, :8], self.own(first)[:, 8:]], 1) + first)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the accelerator at hand were one."""
    monkeypatch.setattr(whole_rows, "is_hopper", lambda: True)


def _joint(net: nn.Module, x: Tensor, wanted: Sequence[str]) -> tuple[GraphModule, list[Tensor]]:
    """The joint graph of a step with the gradients of some parameters, and its arguments."""
    names, parameters = zip(*net.named_parameters(), strict=True)

    def step(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        given = dict(zip(names, parameters, strict=True))
        own = [given[name].requires_grad_() for name in wanted]
        y = torch.func.functional_call(net, given, (x,))
        return [y, *torch.autograd.grad(y.float().square().mean(), own)]

    arguments = [x, *(each.detach() for each in parameters)]
    return make_fx(step, tracing_mode="fake")(*arguments), arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", ["", "stem", "wide", "narrow.bias"])
@pytest.mark.usefixtures("hopper")
def test_a_joint_graph_computes_the_same(dtype: torch.dtype, frozen: str) -> None:
    torch.manual_seed(0)
    net = Net().to(dtype)
    x = torch.randn(3, 3, 9, 8, dtype=dtype)
    wanted = [name for name, _ in net.named_parameters() if not (frozen and name.startswith(frozen))]
    joint, arguments = _joint(net, x, wanted)
    before = joint(*arguments)
    changed = fill_rows(copy.deepcopy(joint), "cpu")
    changed.graph.lint()
    for mine, expected in zip(changed(*arguments), before, strict=True):
        assert (mine.shape, mine.stride()) == (expected.shape, expected.stride())
        assert mine.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)
    channels = [
        (*node.args[number].meta["val"].shape[:2], node.args[-1 if number == 1 else 9])
        for number, target in ((1, aten.convolution.default), (2, aten.convolution_backward.default))
        for node in changed.graph.find_nodes(op="call_function", target=target)
    ]
    assert {each for each in channels if any(count % ROW for count in each[:2])} == {(18, 3, 1), (20, 1, 20)}
    pads = list(changed.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default))
    assert len(pads) == len({node.args[0] for node in pads}) > 4


@pytest.mark.parametrize("change", ["float32", "another device", "few channels", "whole rows", "empty"])
@pytest.mark.usefixtures("hopper")
def test_what_stays(change: str) -> None:
    c, k = {"few channels": (8, 12), "whole rows": (24, 16)}.get(change, (20, 17))
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    conv = nn.Conv2d(c, k, 1).to(dtype)
    x = torch.randn(0 if change == "empty" else 2, c, 5, 5, dtype=dtype)
    joint, _ = _joint(conv, x, ["weight", "bias"])
    code = joint.code
    assert fill_rows(joint, "cuda" if change == "another device" else "cpu").code == code


@pytest.mark.usefixtures("hopper")
def test_results_and_updated_arguments() -> None:
    """Activations and views of them that are returned are dense; what the graph updates is the argument itself."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    one, two = (torch.randn(shape, dtype=dtype) for shape in ((20, 18, 3, 3), (17, 20, 1, 1)))
    layout = torch.channels_last

    def run(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        first = F.conv2d(x, w)
        x.add_(1)
        second = F.conv2d(F.relu(first), v)
        return [first, second.flatten(2), second.permute(0, 2, 3, 1)[:, 1:], x * 2]

    def arguments() -> list[Tensor]:
        torch.manual_seed(1)
        return [each.to(memory_format=layout) for each in (torch.randn(2, 18, 7, 6, dtype=dtype), one, two)]

    changed = fill_rows(make_fx(torch.func.functionalize(run), tracing_mode="fake")(*arguments()), "cpu")
    changed.graph.lint()
    assert changed.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    mine, own = arguments(), arguments()
    for result, expected in zip([*changed(*mine), mine[0]], [*run(*own), own[0]], strict=True):
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("whole", [True, False])
def test_hopper_alone(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its filters have whole rows in memory; other targets read any."""
    monkeypatch.setattr(whole_rows, "is_hopper", lambda: whole)
    graphs = step_graphs(_WithLoss(), torch.zeros(8, 3, 32, 32), target="sm_90a")
    # The filter of ``Net.wide``.
    filters = {
        launch.words[at + 4]
        for graph in graphs for executable in graph.executables if executable.listing is not None
        for launch in executable.listing.launches for at in range(len(launch.words) - 4)
        if list(launch.words[at : at + 4]) == [40, 1, 3, 3]
    }  # fmt: skip
    assert filters == ({24} if whole else {18})


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float().square().mean()


@pytest.mark.gpu
def test_a_step_on_a_gpu() -> None:
    torch.manual_seed(0)
    net = Net().cuda()
    x = torch.randn(16, 3, 32, 32, device="cuda")
    seen = []
    for run, dtype in ((torch.compile(net, backend="max"), torch.bfloat16), (net, torch.bfloat16), (net, None)):
        net.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            y = run(x)
        y.float().square().mean().backward()
        seen.append([y.float().detach(), *(each.grad.clone() for each in net.parameters())])
    for mine, eager, exact in zip(*seen, strict=True):
        own, others = ((each - exact).norm() for each in (mine, eager))
        assert own <= 2 * others + 1e-3 * exact.norm()
