"""Kernels of launch lists run on the threads of PyTorch's OpenMP team."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_max_backend.runtime.launching.threads import team_start


class Net(nn.Module):
    """Convolution, normalization, a pooling, a product: kernels that split their work."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 5] of images [N, 8, H, W]."""
        return self.head(nn.functional.max_pool2d(self.norm(self.convolution(x)).relu(), 2).mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _gradients(run: nn.Module, model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), list(model.parameters())))


@pytest.mark.usefixtures("threads")
def test_as_many_threads_as_pytorch_takes(model: Net) -> None:
    torch._dynamo.reset()
    run = torch.compile(model, backend="max", options={"fallback": "error"})
    x = torch.randn(8, 8, 40, 40)
    wanted = _gradients(model, model, x)
    seen = []
    for count in (1, 2, 5, 2):
        torch.set_num_threads(count)
        seen.append(_gradients(run, model, x))
        torch.testing.assert_close(seen[-1], wanted, rtol=2e-3, atol=2e-3)
    # What one number of threads adds up it adds up in the same order each time.
    torch.testing.assert_close(seen[1], seen[3], rtol=0, atol=0)


def _wakes_of_max() -> dict[str, int]:
    """How often each of MAX's threads went to sleep so far."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if "Thread" in (task / "comm").read_text():
            lines = (task / "status").read_text().splitlines()
            found[task.name] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_of_max_sleep(model: Net) -> None:
    assert team_start()
    torch._dynamo.reset()
    run = torch.compile(model, backend="max")
    x = torch.randn(8, 8, 40, 40)
    _gradients(run, model, x)
    before = _wakes_of_max()
    for _ in range(50):
        _gradients(run, model, x)
    after = _wakes_of_max()
    # A timer of MAX's may wake one of them; kernels that split their work over them wake all, 1,100 times here.
    assert min((after[task] - count for task, count in before.items() if task in after), default=0) < 300


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_computes(model: Net) -> None:
    """A data loader's worker has one thread, and none of its parent's."""
    torch._dynamo.reset()
    run = torch.compile(model.eval(), backend="max")
    x = torch.randn(8, 8, 20, 20)
    with torch.no_grad():
        wanted = run(x)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os._exit(0 if torch.allclose(run(x), wanted, rtol=1e-4, atol=1e-5) else 1)
    _, status = os.waitpid(child, 0)
    model.train()
    assert os.waitstatus_to_exitcode(status) == 0
