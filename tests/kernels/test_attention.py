"""The attention kernels, by calls of their library functions: a table of cases, each checked against float64.

A case is a variant (scale, causal mask, memory orders, which of the two classes of head sizes a GPU takes) with
sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from benchmarks.kernels.library import Guarded, LibraryCalls
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.attention import FAMILY, STRIDED, attention_function, with_steps
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.mojo_ops.signatures import Number

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
#: Of a result, against its largest element.
TOLERANCE = {F32: 3e-6, F64: 1e-13, BF16: 1.6e-2, F16: 2e-3}
PLAIN, HEADS_INSIDE = (0, 1, 2), (0, 2, 1)


@dataclass(frozen=True)
class Variant:
    """How attention is called. ``short``: a GPU takes the kernels for short rows. ``parts``: queries, keys, values and
    their gradients lie in larger tensors."""

    id: str
    scale: float = 0.25
    causal: bool = False
    at_end: bool = False
    bias: bool = False
    bias_wanted: bool = False
    hidden_is_nan: bool = False
    orders: tuple[tuple[int, ...], ...] = (PLAIN,) * 4
    short: bool = False
    parts: bool = False

    @property
    def numbers(self) -> list[Number]:
        """Those of a call."""
        places = [order.index(dim) for order in self.orders for dim in range(3)]
        return [self.scale, self.causal, self.at_end, self.hidden_is_nan, *places]

    @property
    def entries(self) -> tuple[str, str]:
        """Of the forward and the backward pass."""
        biased = "_biased" if self.bias else ""
        return f"attention_fprop{biased}", f"attention_dgrad{'_bias' if self.bias_wanted else biased}"


VARIANTS = {
    variant.id: variant
    for variant in (
        Variant("plain"),
        Variant("short", orders=(HEADS_INSIDE,) * 4, short=True),
        Variant("parts", orders=(HEADS_INSIDE,) * 4, short=True, parts=True),
        Variant("causal", causal=True, orders=(HEADS_INSIDE, PLAIN, (1, 0, 2), HEADS_INSIDE)),
        Variant("causal_at_end", causal=True, at_end=True, short=True),
        Variant("biased", bias=True, scale=0.5, causal=True),
        Variant("bias_gradient", bias=True, bias_wanted=True, short=True),
        Variant("hidden_is_nan", bias=True, hidden_is_nan=True, short=True),
    )
}


@dataclass(frozen=True)
class Sizes:
    """One call. ``bias``: its shape, of which None stands for the whole extent."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    value_size: int
    bias: tuple[int | None, ...] = (None, None, None, None)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        whole = (self.batch, self.heads, self.queries, self.keys)
        return tuple(size or extent for size, extent in zip(self.bias, whole, strict=True))


CASES = [
    ("plain", Sizes(2, 3, 3, 5, 7, 8, 8)),
    ("plain", Sizes(1, 2, 1, 197, 197, 40, 24)),
    ("plain", Sizes(2, 4, 2, 130, 70, 96, 128)),
    ("plain", Sizes(1, 1, 1, 300, 600, 128, 128)),
    ("plain", Sizes(1, 1, 1, 33, 65, 5, 3)),
    ("plain", Sizes(1, 1, 1, 70, 50, 136, 200)),
    ("plain", Sizes(1, 1, 1, 1, 1, 1, 1)),
    ("plain", Sizes(1, 2, 2, 3, 0, 8, 8)),
    ("plain", Sizes(1, 2, 2, 0, 3, 8, 8)),
    ("short", Sizes(2, 3, 3, 197, 197, 64, 64)),
    ("short", Sizes(1, 4, 2, 256, 128, 64, 64)),
    ("short", Sizes(1, 2, 1, 65, 300, 64, 64)),
    ("parts", Sizes(2, 3, 3, 197, 197, 64, 64)),
    ("parts", Sizes(1, 4, 2, 70, 300, 40, 24)),
    ("parts", Sizes(2, 1, 1, 33, 65, 5, 3)),
    ("causal", Sizes(1, 2, 2, 70, 70, 16, 16)),
    ("causal", Sizes(2, 2, 1, 260, 130, 72, 128)),
    ("causal", Sizes(1, 1, 1, 130, 513, 64, 64)),
    ("causal_at_end", Sizes(1, 2, 2, 100, 300, 64, 64)),
    ("causal_at_end", Sizes(2, 1, 1, 300, 100, 64, 64)),
    ("causal_at_end", Sizes(1, 2, 1, 256, 256, 64, 64)),
    ("biased", Sizes(2, 2, 2, 70, 90, 32, 48)),
    ("biased", Sizes(1, 4, 2, 150, 200, 128, 128, (1, 1, 1, None))),
    ("biased", Sizes(2, 2, 1, 140, 140, 64, 80, (None, 1, None, 1))),
    ("biased", Sizes(6, 2, 2, 49, 49, 32, 32, (2, None, None, None))),
    ("bias_gradient", Sizes(2, 2, 1, 66, 130, 64, 64, (1, None, None, None))),
    ("bias_gradient", Sizes(1, 2, 2, 200, 30, 64, 64, (1, 1, None, None))),
]


def dtypes_of(variant: Variant, device: str) -> tuple[torch.dtype, ...]:
    """On a CPU every path in float32; what other dtypes change, the packing, once for each."""
    if device != "cpu":
        return (F32, BF16, F16)
    if variant.bias:
        return (F32,) if variant.bias_wanted or variant.hidden_is_nan else (F32, BF16)
    return (F32, F64)


class Attention(LibraryCalls):
    """The library functions of every variant on one device."""

    family = FAMILY

    def __init__(self, device: str) -> None:
        super().__init__(torch.device(device), dtypes_of(VARIANTS["plain"], device))

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``: of a variant those that it has."""
        for variant in VARIANTS.values():
            for dtype, entry in itertools.product(dtypes_of(variant, self.device.type), variant.entries):
                yield self._function(entry, variant, dtype)

    def _function(self, entry: str, variant: Variant, dtype: torch.dtype) -> LibraryFunction:
        own, wide = TORCH_TO_MAX[dtype], self.target == "gpu" and not variant.short
        return attention_function(entry, self.target, own, own if variant.bias else None, wide=wide)

    def _call(
        self,
        entry: str,
        variant: Variant,
        made: list[Guarded],
        operands: list[torch.Tensor],
        strided: list[torch.Tensor],
    ) -> None:
        """With ``strided``, the tensors that may lie in larger ones, where the variant has such."""
        function = self._function(entry, variant, operands[0].dtype)
        numbers = [*variant.numbers, *[0] * (3 * len(STRIDED))]
        results = [each.tensor for each in made]
        before = [each.clone() for each in results]
        if variant.parts:
            steps = {
                place: [tensor.stride(variant.orders[place % 3].index(dim)) for dim in range(3)]
                for place, tensor in enumerate(strided)
            }
            numbers = with_steps(numbers, steps)
            results = [*strided[3:], *results[len(strided[3:]) :]]
        self.bind(function, *results, *operands, numbers=numbers)()
        assert all(each.is_intact() for each in made), f"{entry} wrote outside its results"
        for old, each, result in zip(before, made, results, strict=True):
            rest = slice(result.shape[-1], None)
            torch.testing.assert_close(each.tensor[..., rest], old[..., rest], rtol=0, atol=0, equal_nan=True)

    def run(self, variant: Variant, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Output, logsumexp and gradients as logical tensors on the CPU."""
        laid = [
            tensor.permute(*order, 3).contiguous().to(self.device)
            for tensor, order in zip(tensors[:4], variant.orders, strict=True)
        ]
        query, key, value, grad = laid
        if variant.parts:
            query, key, value = map(part_of_larger, (query, key, value))
        bias = [tensor.to(self.device) for tensor in tensors[4:]]
        dtype, scores = grad.dtype, (*tensors[0].shape[:3], tensors[1].shape[2])
        output = Guarded(grad.shape, dtype, self.device)
        sums = Guarded(tensors[0].shape[:3], F64 if dtype == F64 else F32, self.device)
        forward, backward = variant.entries
        read = [query, key, value]
        self._call(forward, variant, [output, sums], [*read, *bias], read)
        sizes = [each.stride(2) if variant.parts else each.shape[3] for each in read]
        gradients = [
            Guarded((*each.shape[:3], size), dtype, self.device) for each, size in zip(read, sizes, strict=True)
        ]
        strided = [*read, *(made.tensor[..., : each.shape[3]] for made, each in zip(gradients, read, strict=True))]
        if variant.bias_wanted:
            gradients.append(Guarded(scores, dtype, self.device))
        operands = [grad, *read, output.tensor, sums.tensor, *bias]
        self._call(backward, variant, gradients, operands, strided)
        orders = [variant.orders[3], *variant.orders[:3]]
        logical = [
            made.cpu().permute(*(order.index(dim) for dim in range(3)), 3)
            for made, order in zip([output.tensor, *strided[3:]], orders, strict=True)
        ]
        return [logical[0], sums.tensor.cpu(), *logical[1:], *(each.tensor.cpu() for each in gradients[3:])]


def part_of_larger(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with NaN behind each row, which begins at a multiple of 8 elements."""
    size = tensor.shape[-1]
    whole = torch.full((*tensor.shape[:-1], -(-size // 8) * 8 + 8), math.nan, dtype=tensor.dtype, device=tensor.device)
    whole[..., :size] = tensor
    return whole[..., :size]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def attention(request: pytest.FixtureRequest) -> Attention:
    return Attention(request.param)


def _repeated(bias: torch.Tensor, batch: int) -> torch.Tensor:
    """Of fewer batches, one after the other."""
    return bias.repeat(batch // bias.shape[0], 1, 1, 1)


def scores_of(variant: Variant, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    scores = variant.scale * q @ k.repeat_interleave(repeats, 1).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if variant.causal:
        queries, keys = scores.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if variant.at_end else 0)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def reference(variant: Variant, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float64; a row that sees nothing has zeros."""
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    q, k, v, grad, *bias = leaves
    scores = scores_of(variant, q, k, _repeated(bias[0], q.shape[0]) if bias else None)
    scores.retain_grad()
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    powers = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    output = powers @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    sums = scores.masked_fill(hidden, 0).logsumexp(-1).masked_fill(hidden[..., 0], 0)
    output.backward(grad)
    results = [output, sums, q.grad, k.grad, v.grad]
    if variant.bias_wanted:
        results.append(scores.grad)
    return [result.detach() for result in results]


def drawn(variant: Variant, sizes: Sizes, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (sizes.batch, sizes.heads, sizes.queries, sizes.size),
        (sizes.batch, sizes.groups, sizes.keys, sizes.size),
        (sizes.batch, sizes.groups, sizes.keys, sizes.value_size),
        (sizes.batch, sizes.heads, sizes.queries, sizes.value_size),
    ]
    if variant.bias:
        shapes.append(sizes.bias_shape)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if variant.bias:
        hides = torch.rand(tensors[4].shape, generator=generator) < 0.3
        tensors[4] = tensors[4].masked_fill(hides, -math.inf)
        # A row that is hidden whole.
        tensors[4][:, :, -1:] = -math.inf if sizes.queries > 1 else 0
    return tensors


def check(got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype) -> None:
    names = ("output", "logsumexp", "dq", "dk", "dv", "dbias")
    for name, mine, true in zip(names, got, wanted, strict=False):
        assert mine.shape == true.shape, name
        assert torch.isfinite(mine).all(), name
        if mine.numel() == 0:
            continue
        # logsumexp is float32 of products that are exact in it.
        rounding = TOLERANCE[F32 if name == "logsumexp" and dtype != F64 else dtype]
        bound = rounding * (true.abs() + true.abs().max()) + 1e-30
        worst = ((mine.double() - true).abs() / bound).max().item()
        assert worst <= 1, f"{name}: {worst:.2f} times the bound"


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_against_float64(attention: Attention, name: str, sizes: Sizes) -> None:
    variant = VARIANTS[name]
    for dtype in dtypes_of(variant, attention.device.type):
        tensors = drawn(variant, sizes, dtype, sum(map(ord, str(sizes))))
        check(attention.run(variant, tensors), reference(variant, tensors), dtype)


def test_the_same_bits_twice(attention: Attention) -> None:
    variant = VARIANTS["short"]
    for dtype in dtypes_of(variant, attention.device.type):
        tensors = drawn(variant, Sizes(2, 4, 2, 333, 400, 64, 64), dtype, 7)
        for first, second in zip(attention.run(variant, tensors), attention.run(variant, tensors), strict=True):
            assert torch.equal(first, second)


def test_a_nan_stays_in_its_row(attention: Attention) -> None:
    variant = VARIANTS["plain"]
    for dtype in dtypes_of(variant, attention.device.type):
        tensors = drawn(variant, Sizes(1, 2, 2, 70, 80, 16, 16), dtype, 3)
        tensors[0][0, 1, 65, 3] = math.nan
        output, sums, query_grad, *_ = attention.run(variant, tensors)
        for result in (output, sums.unsqueeze(-1), query_grad):
            is_nan = result.isnan().any(-1)
            assert is_nan[0, 1, 65]
            assert is_nan.sum() == 1


def test_a_row_of_which_all_is_hidden_is_nan_where_softmax_is(attention: Attention) -> None:
    variant = VARIANTS["hidden_is_nan"]
    for dtype in dtypes_of(variant, attention.device.type):
        tensors = drawn(variant, Sizes(1, 2, 2, 70, 80, 64, 64), dtype, 3)
        output, sums, query_grad, key_grad, value_grad = attention.run(variant, tensors)
        hidden = (tensors[4] == -math.inf).all(-1)
        assert hidden.sum() == 2
        for result in (output, sums.unsqueeze(-1), query_grad):
            assert torch.equal(result.isnan().all(-1), hidden)
            assert torch.equal(result.isnan().any(-1), hidden)
        # All keys are read by a row that is NaN.
        assert key_grad.isnan().all()
        assert value_grad.isnan().all()


def test_large_scores_do_not_overflow(attention: Attention) -> None:
    variant = VARIANTS["plain"]
    tensors = [tensor * 20 for tensor in drawn(variant, Sizes(1, 1, 1, 90, 100, 32, 32), F32, 5)]
    output, sums, *_ = attention.run(variant, tensors)
    wanted = reference(variant, tensors)
    assert sums.abs().max() > 1000
    torch.testing.assert_close(output.double(), wanted[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(sums.double(), wanted[1], rtol=1e-6, atol=0)
