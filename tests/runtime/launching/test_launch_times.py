"""Times of launches: every call of a list is seen, results stay what they are."""

from __future__ import annotations

import re

import torch
from torch import nn

import torch_max_backend


def test_every_launch_of_a_step_is_timed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
    run = torch.compile(model, backend="max", options={"fallback": "error"})
    x = torch.randn(2, 3, 12, 12)
    expected = run(x)
    expected.sum().backward()
    weight = model[0].weight
    assert weight.grad is not None
    gradient, weight.grad = weight.grad.clone(), None
    with torch_max_backend.launch_times() as times:
        for _ in range(3):
            result = run(x)
            result.sum().backward()
    assert torch.equal(result, expected) and torch.equal(weight.grad, 3 * gradient)
    launches = times.launches
    names = [each.name for each in launches]
    assert {"conv_fprop_float32_0", "conv_wgrad_float32_0"} <= set(names)
    assert {"convolution", "convolution_backward"} <= {each.ops for each in launches}
    # Profilers show the names of programs, too: a digest behind aten ops, those of the graph that asked for it first.
    (relu,) = (each for each in launches if "relu" in each.ops and each.entry == "pointwise")
    assert re.fullmatch(r"\w*relu\w*_[0-9a-f]{8}", relu.name), relu.name
    assert all(each.seconds > 0 and each.runs == 3 for each in launches)
    assert {"conv_fprop", "conv_wgrad", "pointwise"} <= {each.entry for each in launches}
    sizes = {each.name: each.sizes for each in launches}
    assert sizes["conv_fprop_float32_0"].startswith("2x1x10x10x8 2x1x12x12x3")
    assert "conv_wgrad_float32_0" in str(times) and "ms in launches" in str(times)


def test_nothing_is_timed_outside() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 2 + 1, backend="max")
    x = torch.randn(100)
    with torch_max_backend.launch_times() as times:
        run(x)
    seen = sum(each.runs for each in times.launches)
    run(x)
    assert seen and sum(each.runs for each in times.launches) == seen
