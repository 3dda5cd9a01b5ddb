"""Operators that read the memory behind a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "from the storage's beginning": lambda x: x.split([1, 2], 0)[1].as_strided((4,), (1,), 0),
    "of a computed value": lambda x: x.tanh().split([1, 2], 0)[1].as_strided((4,), (1,), 0),
    "a part behind": lambda x: x.tanh()[0].as_strided((2, 3), (3, 1), 5),
    "from the view's beginning": lambda x: x.tanh()[1].as_strided((2, 4), (1, 2)),
    "the whole": lambda x: x.tanh()[1:].as_strided((4, 6), (1, 4), 0),
    "overlapping": lambda x: x.tanh()[1:].as_strided((3, 4), (2, 1), 1),
    "with gaps": lambda x: x.tanh()[:, 1].as_strided((3,), (7,)),
    "a view of a view": lambda x: x.tanh()[1:].as_strided((4, 3), (3, 1), 6)[1].as_strided((5,), (1,)),
    "of a transposed view": lambda x: x.tanh()[1:].transpose(0, 1).as_strided((2, 2), (2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_strided_of_views(name: str) -> None:
    """What lies around a view is read as eager reads it, also where the op stays in PyTorch."""
    torch.compiler.reset()
    x = torch.randn(3, 4, 2, requires_grad=True)
    found, wanted = (run(x) for run in (torch.compile(CASES[name], backend="max"), CASES[name]))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(each, x, weights)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_an_argument_with_memory_around_it() -> None:
    torch.compiler.reset()
    x = torch.randn(6, 4)
    for view in (x[2:4], x[1:3]):
        torch.compiler.reset()
        for offset in (0, view.storage_offset(), 12):

            def read(part: Tensor, offset: int = offset) -> Tensor:
                return part.as_strided((2, 4), (4, 1), offset) + 1

            torch.testing.assert_close(torch.compile(read, backend="max")(view), read(view))
