"""Scaled dot product attention, forward and backward, in the forms of a CPU and of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe, trace
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.lowering import attention, load_all, lookup

aten = torch.ops.aten
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64


def _sdpa(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), **options)


def _hiding(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """A mask of zeros and -inf that hides the second row completely."""

    def make(generator: torch.Generator) -> torch.Tensor:
        mask = torch.where(torch.rand(shape, generator=generator) < 0.3, -math.inf, 0.0)
        mask[..., 1, :] = -math.inf
        return mask

    return make


def _heads_last(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], torch.Tensor]:
    """``[batch, heads, rows, columns]`` as a model makes it: a view of ``[batch, rows, heads, columns]``."""
    batch, heads, rows, columns = shape
    return lambda generator: torch.randn(batch, rows, heads, columns, generator=generator).to(dtype).transpose(1, 2)


def _formulas(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grad: torch.Tensor,
    causal: int | None,
) -> list[torch.Tensor]:
    """Output, logsumexp and the gradients of q, k, v and bias. A query sees ``causal`` keys beyond its own number."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, bias)]
    q, k, v, bias = leaves
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    if causal is not None:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1 + causal), -math.inf)
    output = scores.softmax(-1) @ v
    return [output, scores.logsumexp(-1), *torch.autograd.grad(output, leaves, grad)]


def _of_a_gpu(form: Callable[..., list[torch.Tensor]], results: int) -> Callable[..., list[torch.Tensor]]:
    """What PyTorch has on GPUs alone it can trace anywhere: ``form`` where it is traced, its formulas where it runs."""

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        if isinstance(inputs[0], FakeTensor):
            return form(*inputs)
        at_end = inputs[1].shape[2] - inputs[0].shape[2]
        return _formulas(*inputs, {_efficient: 0, _flash_causal: at_end}.get(form))[:results]

    return call


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    wide = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, sums, *state = aten._scaled_dot_product_efficient_attention(q, k, v, wide, True, 0.0, True)
    wanted = [True] * 4
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, wide, out, sums, *state, 0.0, wanted, True
    )
    *others, of_bias = gradients
    return [out, sums[..., : q.shape[2]], *others, of_bias.sum((0, 2), keepdim=True)]


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grad: torch.Tensor,
    is_causal: bool = False,
) -> list[torch.Tensor]:
    out, sums, *state = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    gradients = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, sums, *state[:4], 0.0, is_causal, *state[4:6]
    )
    return [out, sums, *gradients]


def _flash_causal(*inputs: torch.Tensor) -> list[torch.Tensor]:
    """Its causal mask lets the last query see the last key."""
    return _flash(*inputs, is_causal=True)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    out, sums, *state = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True)
    lengths, random = state[:4], state[4:6]
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, sums, *random, bias, *lengths, 0.0, False
    )
    return [out, sums.flatten(2), *gradients]


def _qkv(*, dtype: torch.dtype = torch.float32, batch: int = 2, heads: int = 3, queries: int = 5, keys: int = 7) -> Any:
    return (
        randn(batch, heads, queries, 8, dtype=dtype),
        randn(batch, heads, keys, 8, dtype=dtype),
        randn(batch, heads, keys, 8, dtype=dtype),
    )


SMALL = {"batch": 1, "heads": 2, "queries": 10, "keys": 5}
CASES = [
    Case(
        "mask_bf16_grouped_heads",
        gradients(lambda q, k, v, mask: _masked(q, k, v, mask, enable_gqa=True), 3),
        recipe(_heads_last(1, 4, 5, 8, dtype=BF16), *[_heads_last(1, 2, 5, 8, dtype=BF16)] * 2, _hiding(1, 1, 5, 5)),
        length=8,
    ),
    Case(
        "efficient_causal",
        _of_a_gpu(_efficient, 6),
        recipe(*_qkv(**SMALL), randn(1, 2, 1, 5), randn(1, 2, 10, 8)),
        length=8,
        slack=2,
    ),
    Case(
        "grouped_heads_causal",
        gradients(_sdpa(enable_gqa=True, is_causal=True)),
        recipe(randn(1, 4, 5, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8)),
        length=8,
        slack=2,
    ),
    Case(
        "efficient",
        _of_a_gpu(_efficient, 6),
        recipe(*_qkv(), randn(1, 3, 1, 7), randn(2, 3, 5, 8)),
        length=8,
        slack=2,
    ),
    Case(
        "flash",
        _of_a_gpu(_flash, 5),
        recipe(*_qkv(), integers(1, low=0, high=1), randn(2, 3, 5, 8)),
        length=8,
        slack=2,
    ),
    Case(
        "flash_causal",
        _of_a_gpu(_flash_causal, 5),
        recipe(*_qkv(), integers(1, low=0, high=1), randn(2, 3, 5, 8)),
        length=8,
        slack=2,
    ),
    Case("cudnn", _of_a_gpu(_cudnn, 5), recipe(*_qkv(), randn(2, 3, 5, 7), randn(2, 3, 5, 8)), length=8, slack=2),
    Case("causal", gradients(_sdpa(is_causal=True)), recipe(*_qkv(queries=9, keys=4)), length=8, slack=2),
    Case("scale", gradients(_sdpa(scale=0.25)), recipe(*_qkv(**SMALL)), length=8, slack=2),
    Case("mask_of_keys", gradients(_masked, 3), recipe(*_qkv(**SMALL), randn(1, 1, 1, 5)), length=8, slack=2),
    Case("mask_of_rank_2", gradients(_masked, 3), recipe(*_qkv(), _hiding(5, 7)), length=8, slack=2),
    Case("f16", gradients(_sdpa()), recipe(*_qkv(dtype=F16, **SMALL)), length=8),
    Case("f64", gradients(_sdpa()), recipe(*_qkv(dtype=F64, **SMALL)), length=8, slack=4),
]
#: They repeat a lowering in another dtype, shape or form.
VARIANTS = (
    "grouped_heads_causal",
    "efficient",
    "flash",
    "cudnn",
    "causal",
    "scale",
    "mask_of_keys",
    "mask_of_rank_2",
    "f16",
    "f64",
)
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="attention")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


def _reason(**options: Any) -> str:
    """Why a call of PyTorch's flash attention stays in PyTorch."""
    shape = options.pop("shape", (2, 3, 5, 8))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]

    graph = trace(call, [torch.empty(shape, device="meta")] * 3)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention.default)
    return lookup(node.target).supports(node) or ""


def test_what_stays_in_pytorch_says_why() -> None:
    assert "dropout" in _reason(dropout_p=0.1)
    assert "debug mask" in _reason(dropout_p=0.0, return_debug_mask=True)
    assert not _reason()


def test_a_mask_that_pytorch_spreads_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    load_all()
    shapes = []

    def fprop(*operands: Any, **settings: Any) -> Any:
        shapes.append([int(size) for size in operands[3].shape])
        return real(*operands, **settings)

    real = attention.kernels.attention_fprop
    monkeypatch.setattr(attention.kernels, "attention_fprop", fprop)
    sizes = [(1, 2, 10, 8), (1, 2, 5, 8), (1, 2, 5, 8), (1, 1, 1, 5), (1, 2, 10, 8)]
    CompilationUnit("mask").add(trace(_efficient, [torch.empty(size) for size in sizes]), "mask")
    assert shapes == [[1, 1, 1, 5]]


def test_sizes_that_are_known_at_run_time() -> None:
    """One compilation serves any batch and any numbers of queries and keys."""
    compiled = torch.compile(_sdpa(), backend="max", options={"fallback": "error"})
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, queries, keys in ((2, 6, 9), (3, 50, 60)):
            inputs = [torch.randn(batch, 3, rows, 8, requires_grad=True) for rows in (queries, keys, keys)]
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, [0, 2])
            output = compiled(*inputs)
            expected = _sdpa()(*inputs)
            torch.testing.assert_close(output, expected)
            grad = torch.randn_like(expected)
            for mine, theirs in zip(
                torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
