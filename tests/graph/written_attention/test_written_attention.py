"""Attention that programs write out: which of it is taken as one op, in what spellings, and with what numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from timm.models.levit import Attention as LevitAttention
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer import Attention as TimmAttention
from torch import nn
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from torchvision.models.video.mvit import MultiscaleAttention

from tests.launched import launched_functions
from torch_max_backend import compile_ahead
from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.custom_ops.attention import attention, attention_backward
from torch_max_backend.runtime.building import pending

BF16 = torch.bfloat16


Written = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Apply(nn.Module):
    """A function of a tensor and two parameters: a projection [24, 72] and a bias [3, 16, 16]."""

    def __init__(
        self, function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.function = function
        self.project = nn.Parameter(torch.randn(24, 72) / 5)
        self.bias = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.project).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.function(q, k, v, self.bias)


def einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", q, k * 0.3) + bias).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def multiplied_later(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scores divided after a first bias, a softmax over the last of five dimensions, values from the left."""
    scores = ((q @ k.mT + bias) / math.sqrt(8) + bias[:, :1]).unflatten(0, (2, 2))
    weights = F.softmax(scores, dim=4).flatten(0, 1)
    return v.mT @ weights.mT


def batches_and_heads_in_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = F.dropout(torch.baddbmm(bias.repeat(4, 1, 1), q, k.mT).softmax(-1), 0.0)
    return torch.bmm(weights, v)


def masks_in_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A mask for each of two windows, one for each pair of rows and one for each pair of columns (MViTv2)."""
    scores = (q * 0.2) @ k.mT
    scores = scores.view(2, 2, 3, 16, 16) + torch.arange(2.0, dtype=q.dtype).view(1, 2, 1, 1, 1)
    scores = scores.view(4, 3, 4, 4, 4, 4) + bias.view(3, 4, 4, 4, 4)[..., :1]
    scores = scores + q.sum(-1).view(4, 3, 4, 4, 1, 1)
    return scores.view(4, 3, 16, 16).softmax(-1) @ v


def assigned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores[:, :, 0:] = scores[:, :, 0:] * 1.0 + bias
    scores += 1.0 * bias
    return scores.softmax(-1) @ v


def assigned_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Positions for all tokens but the first, which queries look up."""
    scores = (q @ k.mT) * 0.3
    scores[:, :, 1:, 1:] += bias[:, 1:, :-1] * q[:, :, 1:].sum(-1, keepdim=True)
    return scores.softmax(-1) @ v


def temperatures(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One number for all heads, times others before and behind it."""
    scores = 3 * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / 2 * bias[:1, :1, :1].exp())
    return (scores + bias).softmax(-1) @ v


def hidden_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Infinite masks; a query without a key has NaN."""
    mask = torch.full_like(bias, -math.inf).triu(1)
    return torch.softmax(q @ k.mT + mask, -1) @ v


def taken_modules() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    functions = (
        einsum,
        multiplied_later,
        batches_and_heads_in_one,
        masks_in_steps,
        assigned,
        assigned_inside,
        temperatures,
        hidden_rows,
    )
    timm = TimmAttention(24, 3, qkv_bias=True)
    timm.fused_attn = False
    return {
        **{function.__name__: (Apply(function), (4, 16, 24)) for function in functions},
        "swin": (ShiftedWindowAttention(24, [4, 4], [2, 2], 3), (2, 8, 8, 24)),
        "swin_v2": (ShiftedWindowAttentionV2(24, [4, 4], [2, 2], 3), (2, 8, 8, 24)),
        "maxvit": (RelativePositionalMultiHeadAttention(24, 8, 16), (2, 4, 16, 24)),
        "vit": (timm, (2, 17, 24)),
        "levit": (LevitAttention(24, 8, 3, resolution=(4, 4)), (2, 16, 24)),
        "levit_convolutions": (LevitAttention(24, 8, 3, resolution=(4, 4), use_conv=True), (2, 24, 4, 4)),
    }


def step(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor, amp: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The output and the gradients of input and parameters."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, amp or BF16, enabled=amp is not None):
        output = call(x)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype).to(x.device)
    gradients = torch.autograd.grad(output, [x, *model.parameters()], grad, allow_unused=True)
    return [output.detach(), *(each for each in gradients if each is not None)]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, over the largest element, which is taken for no less than a thousandth of all."""
    largest = max(each.abs().max().item() for each in wanted)
    return max(
        (mine.double() - true).abs().max().item() / max(true.abs().max().item(), largest / 1000)
        for mine, true in zip(got, wanted, strict=True)
    )


def ops_of(model: nn.Module, x: torch.Tensor) -> tuple[set[str], list[torch.Tensor]]:
    """The ops of a training step's graphs, and what PyTorch computes by these graphs."""
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        results = step(torch.compile(model, backend=build_only), model, x)
    return {op for graph in graphs for each in graph.executables for op in each.built.ops}, results


TAKEN = {"torch_max_backend.attention.default", "torch_max_backend.attention_backward.default"}
WRITTEN = {"aten.bmm.default", "aten._softmax.default", "aten._softmax_backward_data.default"}


@pytest.mark.parametrize("name", taken_modules())
def test_taken(name: str) -> None:
    torch.manual_seed(0)
    model, shape = taken_modules()[name]
    model, x = model.double(), torch.randn(shape, dtype=torch.float64)
    ops, results = ops_of(model, x)
    assert ops >= TAKEN and not ops & WRITTEN
    assert worst(results, step(model, model, x)) < 1e-12


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_positions_that_queries_look_up_are_products_of_their_own(library: str) -> None:
    """torchvision adds them to a part of the scores, in place."""
    torch.manual_seed(0)
    whole: nn.Module
    if library == "timm":
        sizes = {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_q": (1, 1), "stride_kv": (2, 2)}
        whole, tokens, extents = MultiScaleAttention(24, 24, (4, 4), 3, **sizes, has_cls_token=False), 16, (4, 4)
    else:
        strides = [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]
        whole = MultiscaleAttention([2, 4, 4], 24, 24, 3, *strides, True, False, True)
        tokens, extents = 1 + 32, (2, 4, 4)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = whole

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.whole(x, extents)[0]
            return result

    model, x = First().double(), torch.randn(2, tokens, 24, dtype=torch.float64)
    ops, results = ops_of(model, x)
    assert ops >= TAKEN and not ops & WRITTEN - {"aten.bmm.default"}
    assert worst(results, step(model, model, x)) < 1e-12


def returned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The weights are seen."""
    weights = (q @ k.mT + bias).softmax(-1)
    return torch.cat([weights @ v, weights], -1)


def seen_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    return (scores + bias).softmax(-1) @ v + scores.sum()


def over_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT + bias).softmax(-2) @ v


def used_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    weights = (q @ k.mT + bias).softmax(-1)
    return weights @ (weights @ v)


def changed_by_a_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT) * bias).softmax(-1) @ v


def assigned_from_elsewhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores[:, :, 1:, 1:] = scores[:, :, :-1, 1:] + bias[:, 1:, 1:]
    return scores.softmax(-1) @ v


def long_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention between channels: few rows of many elements."""
    q, k, v = (x.repeat(1, 1, 10, 1).mT for x in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v + bias.sum()


@pytest.mark.parametrize(
    "function",
    [returned, seen_scores, over_queries, used_twice, changed_by_a_tensor, assigned_from_elsewhere, long_rows],
)
def test_left_as_it_is(function: Written) -> None:
    torch.manual_seed(0)
    model, x = Apply(function).double(), torch.randn(4, 16, 24, dtype=torch.float64)
    ops, results = ops_of(model, x)
    assert not ops & TAKEN
    assert worst(results, step(model, model, x)) < 1e-12


def test_dropout_of_weights_keeps_the_products_and_eagers_draw() -> None:
    model = TimmAttention(24, 3, attn_drop=0.3).double()
    model.fused_attn = False
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    torch.manual_seed(3)
    ops, results = ops_of(model, x)
    torch.manual_seed(3)
    wanted = step(model, model, x)
    assert not ops & TAKEN
    assert worst(results, wanted) < 1e-12
    # Without training there is no dropout.
    torch._dynamo.reset()
    with recorded_graphs() as graphs, torch.no_grad():
        torch.compile(model.eval(), backend=build_only)(x)
    (graph,) = graphs
    assert "torch_max_backend.attention.default" in graph.executables[0].built.ops


def test_a_batch_that_is_known_at_run_time() -> None:
    torch.manual_seed(0)
    model = ShiftedWindowAttention(24, [4, 4], [2, 2], 3).double()
    compiled = torch.compile(model, backend=build_only)
    torch._dynamo.reset()
    for batch in (2, 3):
        x = torch.randn(batch, 8, 8, 24, dtype=torch.float64)
        torch._dynamo.mark_dynamic(x, 0)
        with recorded_graphs() as graphs:
            output = compiled(x)
        torch.testing.assert_close(output, model(x))
        ops = {op for graph in graphs for each in graph.executables for op in each.built.ops}
        assert ops >= TAKEN if batch == 2 else not graphs


@pytest.mark.parametrize("amp", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_of_windows(device: str, kind: type[ShiftedWindowAttention], amp: torch.dtype | None) -> None:
    """In MAX, against float64 and beside eager PyTorch: windows, a shift's mask and a learned bias."""
    torch.manual_seed(0)
    model, x = kind(96, [7, 7], [3, 3], 3).to(device), torch.randn(2, 28, 28, 96, device=device)
    if kind is ShiftedWindowAttention:
        with torch.no_grad():
            model.relative_position_bias_table.normal_()
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        results = step(torch.compile(model, backend="max", options={"fallback": "error"}), model, x, amp)
    names = [function.symbol for function in launched_functions(graphs)]
    assert any("attention_fprop_biased" in name for name in names)
    assert any("attention_dgrad_bias_" in name for name in names)
    wide = copy.deepcopy(model).double()
    wanted = step(wide, wide, x.double())
    assert worst(results, wanted) < 1.5 * max(worst(step(model, model, x, amp), wanted), 1e-6)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_taken_on_a_gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "make_ready", lambda lists: None)
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        compile_ahead(
            ShiftedWindowAttention(96, [7, 7], [3, 3], 3), torch.randn(2, 28, 28, 96), target=target, autocast=BF16
        )
    assert not [refusal for graph in graphs for refusal in graph.refusals]
    ops = {op for graph in graphs for each in graph.executables for op in each.built.ops}
    assert ops >= TAKEN and not ops & WRITTEN
    names = [function.symbol for function in launched_functions(graphs)]
    assert any("attention_dgrad_bias_bfloat16_float32" in name for name in names)


def test_ops_in_pytorch() -> None:
    """What runs where a graph is cut around the ops, against autograd of the formula."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, rows, 8, dtype=torch.float64, requires_grad=True) for rows in (5, 7, 7))
    bias = torch.randn(2, 1, 5, 7, dtype=torch.float64)
    grad = torch.randn(4, 2, 5, 8, dtype=torch.float64)
    spread = bias.repeat(2, 2, 1, 1).requires_grad_()
    scores = 0.3 * (q @ k.mT) + spread
    wanted = [scores.softmax(-1) @ v, scores.logsumexp(-1)]
    gradients = torch.autograd.grad(wanted[0], [q, k, v, spread], grad)
    with torch.no_grad():
        output, sums = attention(q, k, v, bias, 0.3)
        found = attention_backward(grad, q, k, v, bias, output, sums, 0.3, True)
    for mine, true in zip([output, sums, *found], [*wanted, *gradients], strict=True):
        torch.testing.assert_close(mine, true)
    for op, arguments in (
        (attention, (q, k, v, bias, 0.3)),
        (attention_backward, (grad, q, k, v, bias, output, sums, 0.3, True)),
    ):
        detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
        torch.library.opcheck(op, detached, test_utils=("test_schema", "test_faketensor"))
