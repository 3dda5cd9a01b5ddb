"""Arguments that are no plain tensors in memory: computed with, or refused by name; never an address that is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torch_max_backend import backend
from torch_max_backend.runtime.executable import Executable


def scaled(x: Tensor, y: Tensor) -> Tensor:
    """Its gradients need both arguments."""
    return (x * y).tanh() * 2


@pytest.fixture(scope="module")
def run() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(scaled, backend="max", options={"fallback": "error"})


@pytest.fixture(scope="module")
def executable() -> Executable:
    """The function without its gradients, of two [6, 4]."""
    torch.compiler.reset()
    with backend.recorded_graphs() as graphs:
        torch.compile(scaled, backend="max", options={"fallback": "error"})(torch.zeros(6, 4), torch.zeros(6, 4))
    return graphs[0].executables[0]


def misaligned(x: Tensor) -> Tensor:
    """The same elements, one byte off."""
    memory = bytearray(x.numel() * x.itemsize + 1)
    found = torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape)
    assert found.data_ptr() % x.itemsize
    return found.copy_(x)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: torch._efficientzerotensor(x.shape),
        lambda x: x.to_sparse(),
        lambda x: x.to_mkldnn(),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(6, 4),
        misaligned,
    ],
    ids=["zero", "sparse", "mkldnn", "permuted", "expanded", "misaligned"],
)
def test_elements_are_made(executable: Executable, kind: Callable[[Tensor], Tensor]) -> None:
    y = torch.randn(6, 4)
    x = kind(torch.randn(6, 4))
    # Before and behind a plain call: what is remembered of one is not taken for the other.
    for each in (x, torch.randn(6, 4), x):
        wanted = scaled(each.to_dense() if each.layout is not torch.strided else each.clone(), y)
        torch.testing.assert_close(executable.run([each, y])[0], wanted, rtol=1e-6, atol=1e-6)


class Holder(Tensor):
    """A tensor that has another one in place of memory."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Holder], held: Tensor) -> Holder:
        made: Holder = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = torch.utils._pytree.tree_map_only(Holder, lambda each: each.held, args)
        return torch.utils._pytree.tree_map_only(Tensor, Holder, func(*held, **(kwargs or {})))


def freed(rows: int) -> Tensor:
    """The last of ``rows + 6`` rows, whose storage is gone."""
    x = torch.randn(rows + 6, 4)[rows:]
    x.untyped_storage().resize_(0)
    return x


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(6, 4)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: torch.empty(6, 4, device="meta"), "cpu, got torch.float32 on meta"),
        (fake, "with memory, got a FakeTensor"),
        (lambda: Holder(torch.randn(6, 4)), "with memory, got a Holder"),
        (lambda: freed(0), "got a tensor whose storage has 0 bytes of 96"),
        (lambda: freed(3), "got a tensor whose storage has 0 bytes of 144"),
        (lambda: torch.randn(6, 4).to(torch.complex64), "got torch.complex64"),
    ],
    ids=["meta", "fake", "subclass", "freed", "freed_at_an_offset", "complex"],
)
def test_what_has_no_memory_is_refused(executable: Executable, made: Callable[[], Tensor], words: str) -> None:
    y = torch.randn(6, 4)
    with pytest.raises(ValueError, match=f"argument 1: expected .*{words}"):
        executable.run([y, made()])
    x = torch.randn(6, 4)
    torch.testing.assert_close(executable.run([x, y])[0], scaled(x, y), rtol=1e-6, atol=1e-6)


def test_gradients_that_are_zero(run: Callable[..., Any]) -> None:
    x, y = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert zeros.data_ptr() == 0
    for gradient in (zeros, torch.zeros(6, 4)):
        assert not any(each.any() for each in torch.autograd.grad(run(x, y), (x, y), gradient))
    out = run(zeros, y)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), y)
    assert not gradient.any()


def test_an_argument_freed_before_the_backward_pass(run: Callable[..., Any]) -> None:
    x, y = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    out = run(x, y)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="expected a tensor with memory"):
        out.sum().backward()


@pytest.mark.parametrize("rows", [1, 24])
def test_batched_gradients(run: Callable[..., Any], rows: int) -> None:
    x, y = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    gradients = torch.randn(rows, 6, 4)
    wanted = torch.autograd.grad(scaled(x, y), (x, y), gradients, is_grads_batched=True)
    found = torch.autograd.grad(run(x, y), (x, y), gradients, is_grads_batched=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    jacobian = functools.partial(torch.autograd.functional.jacobian, inputs=(x, y), vectorize=True)
    torch.testing.assert_close(jacobian(run), jacobian(scaled), rtol=1e-4, atol=1e-5)


def curvature(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.func.hessian(lambda x, y: function(x, y).sum())


def tangent(function: Callable[..., Any]) -> Callable[..., Any]:
    def derived(x: Tensor, y: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, y), y))

    return derived


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.jacrev,
        torch.func.jacfwd,
        curvature,
        tangent,
        lambda function: torch.func.vmap(torch.func.grad(lambda x, y: function(x, y).sum())),
        lambda function: lambda x, y: torch.func.jvp(function, (x, y), (y, x)),
    ],
    ids=["vmap", "jacrev", "jacfwd", "hessian", "dual", "gradients_of_samples", "jvp"],
)
def test_transforms_around_a_compiled_call(run: Callable[..., Any], transform: Callable[..., Any]) -> None:
    """PyTorch runs these."""
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    run(x, y)
    torch.testing.assert_close(transform(run)(x, y), transform(scaled)(x, y), rtol=1e-5, atol=1e-6)


def test_a_compiled_transform() -> None:
    """Jacobians that are compiled themselves."""
    weight = torch.randn(3, 4)

    def function(x: Tensor) -> Tensor:
        return F.linear(x, weight).tanh()

    x = torch.randn(4)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        found = torch.compile(transform(function), backend="max")(x)
        torch.testing.assert_close(found, transform(function)(x), rtol=1e-5, atol=1e-6)
