"""Values that a model's code reads while it is traced for a GPU that is not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_max_backend import explain, explain_ahead
from torch_max_backend.graph.fake_cuda.lazy_values import LazyValueMode
from torch_max_backend.torch_compat import DataDependentOutputException, FakeTensor, enable_python_dispatcher


class Detector(nn.Module):
    """Python that depends on values: a branch, a length, a number of points."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).relu()
        if not torch.isfinite(y).all():
            y = y.clamp(-1, 1).sigmoid().tanh()
        y = y.flatten(2)[..., : int(lengths.max())]
        points = torch.nonzero(y[0, 0] > 0)
        return self.head(y.mean(2)) * len(points)


def test_a_graph_is_cut_where_the_code_reads_a_value() -> None:
    torch.manual_seed(0)
    model, x, lengths = Detector(), torch.randn(2, 3, 8, 8), torch.tensor([3, 17])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ahead = explain_ahead(model, x, lengths, target="sm_90a", quiet=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    torch._dynamo.reset()
    here = explain(model, x, lengths, quiet=True, compile=False)
    found, wanted = ([(graph.name, graph.max_graphs) for graph in each.graphs] for each in (ahead, here))
    # Backward graphs are built with their forward graphs, or when they run.
    assert sorted(found) == sorted(wanted) and len(found) > 4 and not ahead.fallback_count
    assert "aten.tanh.default" not in {op for graph in ahead.graphs for op in graph.max_ops}


def _code(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> list[object]:
    """Reads values of views, and of what was written in place."""
    rows = x.t()[1:]
    rows.mul_(2)
    y = F.batch_norm(torch.arange(24.0, device=device).reshape(2, 3, 4), None, None, training=True)
    z = (x @ weight).softmax(-1)
    return [
        x.sum().item(),
        bool((y.mean() < 1e-3).all()),
        round(float(z.sum()), 3),
        torch.masked_select(x, x > 0).shape,
        x[x > 0].sum().item(),
        [value.item() for value in x[0, :2]],
    ]


def test_values_are_those_of_the_code() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8), torch.randn(8, 8)
    mode = LazyValueMode()
    with mode:
        pass
    twins = [mode.twin(tensor, "cuda:0") for tensor in (x, weight)]
    before = x.clone()
    with mode, enable_python_dispatcher():
        found = _code(*twins, torch.device("cuda:0"))
        points = torch.nonzero(twins[0] > 0)
    assert isinstance(points, FakeTensor) and points.device.type == "cuda"
    assert torch.equal(x, before)
    assert found == _code(x, weight, torch.device("cpu"))


@pytest.mark.parametrize(
    ("op", "mask", "causal"),
    [("flash", False, True), ("efficient", True, False), ("efficient", False, True), ("cudnn", True, False)],
)
def test_attention_has_values_too(op: str, mask: bool, causal: bool) -> None:
    torch.manual_seed(0)
    heads = [torch.randn(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.randn(1, 2, 8, 8, dtype=torch.bfloat16) if mask else None
    mode = LazyValueMode()
    with mode:
        pass
    given = [mode.twin(each, "cuda:0") for each in heads]
    terms = () if op == "flash" else (None if bias is None else mode.twin(bias, "cuda:0"), True)
    called = getattr(torch.ops.aten, f"_scaled_dot_product_{op}_attention")
    with mode:
        output = called(*given, *terms, 0.0, causal, scale=0.3)[0]
        found = [[value.item() for value in row] for row in output[0, 1]]
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=bias, is_causal=causal, scale=0.3)
    torch.testing.assert_close(torch.tensor(found), wanted[0, 1].float(), rtol=2e-2, atol=2e-2)


def test_tensors_without_values_have_none() -> None:
    mode = LazyValueMode()
    with mode:
        pass
    twin = mode.twin(torch.empty(3, device="meta"), "cuda:0")
    with mode, pytest.raises(DataDependentOutputException):
        twin.sum().item()
