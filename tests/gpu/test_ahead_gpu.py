"""What a process without a GPU compiled for it is what a process with it asks for, and runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from max.driver import Accelerator

from torch_max_backend.ahead import TARGETS
from torch_max_backend.runtime.caches.target import canonical_architecture

pytestmark = pytest.mark.gpu

MODEL = """
import sys, torch, torch.nn.functional as F
import torch_max_backend
from torch_max_backend.runtime import events

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.BatchNorm2d(16)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))
        return F.dropout(F.max_pool2d(y, 2), 0.2).mean((2, 3))

torch.manual_seed(0)
model = Net().to(memory_format=torch.channels_last)
x = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
"""
WITHOUT = """
assert not torch.cuda.is_available()
compiled = torch_max_backend.compile_ahead(model, x, target=sys.argv[1], autocast=torch.bfloat16)
print(*[event.cached for event in compiled])
"""
WITH = """
model, x, seen, outcomes = model.cuda(), x.cuda(), [], []
for function in (torch.compile(model, backend="max", options={"fallback": "error"}), model):
    torch.manual_seed(1)
    model.zero_grad()
    with events.listen(seen.append), torch.autocast("cuda", torch.bfloat16):
        y = function(x)
    y.float().square().sum().backward()
    outcomes.append([y.float(), *[parameter.grad.clone() for parameter in model.parameters()]])
for ours, eager in zip(*outcomes):
    # The last of the gradients' noise is bfloat16's.
    torch.testing.assert_close(ours, eager, rtol=5e-2, atol=5e-2 * eager.abs().max().item())
print(*[event.cached for event in seen if event.seconds is not None])
"""


def test_the_gpu_finds_what_was_compiled_without_it(
    tmp_path: Path, kernels_only: Callable[[Path], dict[str, str]]
) -> None:
    target = canonical_architecture(Accelerator(0).architecture_name)
    if target not in TARGETS:
        pytest.skip(f"{target} is no target")
    environment = {**os.environ, **kernels_only(tmp_path)}

    def run(script: str, **more: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", MODEL + script, target]
        result = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    assert run(WITHOUT, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="") == "False"
    assert run(WITH) == "True"
