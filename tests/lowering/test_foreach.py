"""What optimizers' steps consist of: multi-tensor ops and the arithmetic of SGD, Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.harness import Batch, Case, batch_fixture, core, parametrize, randn, recipe

Maker = Callable[[torch.Generator], torch.Tensor]


def positive(*shape: int) -> Maker:
    """Numbers that a root or a quotient may be taken of."""
    return lambda generator: torch.rand(*shape, generator=generator) + 0.5


#: Of one shape, so that both share a kernel; UNEQUAL ones stand where a list is taken apart.
PAIR = [randn(3, 4), randn(3, 4)]
PAIRS = [*PAIR, *PAIR]
UNEQUAL = [randn(3, 4), randn(5)]


def listed(function: Callable[..., object]) -> Callable[..., object]:
    """``function`` of lists of two tensors, as a function of tensors."""
    return lambda *flat: function(*[list(flat[i : i + 2]) for i in range(0, len(flat), 2)])


def sgd(params: list[torch.Tensor], grads: list[torch.Tensor], momenta: list[torch.Tensor]) -> list[torch.Tensor]:
    """Nesterov momentum with weight decay, as torch.optim writes it."""
    grads = torch._foreach_add(grads, params, alpha=1e-2)
    momenta = torch._foreach_mul(momenta, 0.9)
    momenta = torch._foreach_add(momenta, grads)
    grads = torch._foreach_add(grads, momenta, alpha=0.9)
    return [*torch._foreach_add(params, grads, alpha=-0.1), *momenta]


def adam(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    averages: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """AdamW, as torch.optim writes it for tensors of steps."""
    steps = torch._foreach_add(steps, 1)
    params = torch._foreach_mul(params, 1 - 1e-3 * 1e-2)
    averages = torch._foreach_lerp(averages, grads, 1 - 0.9)
    squares = torch._foreach_addcmul(torch._foreach_mul(squares, 0.999), grads, grads, 1 - 0.999)
    first = torch._foreach_sub(torch._foreach_pow(0.9, steps), 1)
    first = torch._foreach_reciprocal(torch._foreach_div(first, 1e-3))
    second = torch._foreach_sqrt(torch._foreach_neg(torch._foreach_sub(torch._foreach_pow(0.999, steps), 1)))
    roots = torch._foreach_div(torch._foreach_sqrt(squares), second)
    roots = torch._foreach_div(torch._foreach_add(roots, 1e-8), first)
    return [*torch._foreach_addcdiv(params, averages, roots), *averages, *squares, *steps]


def adam_single(
    param: torch.Tensor, grad: torch.Tensor, average: torch.Tensor, square: torch.Tensor
) -> list[torch.Tensor]:
    """Adam on one tensor with steps known while compiling."""
    average = torch.lerp(average, grad, 1 - 0.9)
    square = torch.addcmul(square * 0.999, grad, grad.conj(), value=1 - 0.999)
    return [torch.addcdiv(param, average, square.sqrt() / 0.5 + 1e-8, value=-1e-3), average, square]


CASES = [
    Case("sgd", listed(sgd), recipe(*PAIRS, *PAIR), slack=4),
    Case(
        "adamw",
        listed(adam),
        recipe(*PAIRS, *PAIR, positive(3, 4), positive(3, 4), *[lambda generator: torch.tensor(3.0)] * 2),
        slack=4,
    ),
    Case("adam_single", adam_single, recipe(randn(6, 7), randn(6, 7), randn(6, 7), positive(6, 7)), slack=4),
    Case(
        "adam_single_bf16",
        adam_single,
        recipe(*[randn(6, 7, dtype=torch.bfloat16)] * 3, lambda g: positive(6, 7)(g).bfloat16()),
        slack=4,
    ),
    Case("lerp_far", lambda a, b: torch.lerp(a, b, 0.9), recipe(randn(8), randn(8))),
    Case("maximum", listed(torch._foreach_maximum), recipe(*UNEQUAL, *UNEQUAL)),
    Case("scalars", listed(lambda x: torch._foreach_mul(x, [2.0, 3.0])), recipe(*PAIR)),
    Case(
        "scalar_tensor",
        lambda x, y, s: torch._foreach_mul([x, y], s),
        recipe(*PAIR, lambda generator: torch.tensor(0.25)),
    ),
    Case(
        "addcdiv_scalars",
        listed(lambda x, a, b: torch._foreach_addcdiv(x, a, b, [0.5, -2.0])),
        recipe(*PAIRS, positive(3, 4), positive(3, 4)),
        slack=4,
    ),
    Case(
        "addcdiv_tensor",
        lambda x, a, b, s: torch._foreach_addcdiv([x, x], [a, a], [b, b], s),
        recipe(randn(5), randn(5), positive(5), randn(2)),
        slack=4,
        cpu_only=True,
    ),
    Case(
        "lerp_lists",
        listed(lambda a, b, w: torch._foreach_lerp(a, b, w)),
        recipe(*PAIRS, positive(3, 4), positive(3, 4)),
        slack=4,
    ),
    Case("norm", listed(lambda x: torch._foreach_norm(x, 2)), recipe(*UNEQUAL), length=12),
    Case("zero", listed(torch.ops.aten._foreach_zero), recipe(*PAIR), exact=True),
]

#: Whole steps on a CPU are what test_optimizers.py compiles.
VARIANTS = ("sgd", "adamw", "adam_single_bf16")
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="foreach")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
