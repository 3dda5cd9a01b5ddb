"""Mirrored and repeated borders on random problems against PyTorch: library functions called directly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from torch.nn import functional as F

from benchmarks.kernels.library import LAYOUTS, Guarded, LibraryCalls, excess, shown
from tests.kernels.conftest import DEVICES
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops import padding
from torch_max_backend.mojo_ops.functions import LibraryFunction, function_of

DTYPES = (torch.float32, torch.bfloat16)


class Borders(LibraryCalls):
    """The functions of one device."""

    family = padding.FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for signature in self.family.signatures:
            yield from (self.function(signature.name, dtype) for dtype in dtypes)

    def function(self, entry: str, dtype: torch.dtype) -> LibraryFunction:
        """Of a dtype."""
        return function_of(self.family, entry, self.target, (TORCH_TO_MAX[dtype],))

    def result(self, entry: str, given: torch.Tensor, like: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """What a function makes, which has the shape of ``like``."""
        made = Guarded(like.shape, given.dtype, self.device)
        self.bind(self.function(entry, given.dtype), made.tensor, given, numbers=numbers)()
        assert made.is_intact()
        return made.tensor.cpu()


@pytest.fixture(scope="module", params=DEVICES)
def borders(request: pytest.FixtureRequest) -> Borders:
    return Borders(torch.device(request.param), DTYPES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_random_problems(mode: str, dtype: torch.dtype, layout: str, borders: Borders) -> None:
    chance, mirrored = random.Random(f"{mode} {layout}"), mode == "reflect"
    for _ in range(12):
        rank = chance.randint(1, 3)
        sizes = [chance.randint(2, 9) for _ in range(rank)]
        pairs = [
            [chance.randint(0 if mirrored else -1, size - 1 if mirrored else size + 3) for _ in range(2)]
            for size in sizes
        ]
        pad = [number for pair in reversed(pairs) for number in pair]
        x = torch.randn(chance.randint(1, 3), chance.choice((1, 3, 8, 16)), *sizes).to(dtype)
        y = F.pad(x, pad, mode=mode)
        dy = torch.randn(y.shape).to(dtype)
        wide = x.double().requires_grad_()
        shows = F.pad(wide, pad, mode=mode)
        dx, most = (
            torch.autograd.grad(shows, wide, each, retain_graph=True)[0] for each in (dy.double(), dy.double().abs())
        )
        numbers = [*[0] * (6 - 2 * rank), *(number for pair in pairs for number in pair), mirrored]
        given_x, given_dy, y, dx = (shown(each, layout) for each in (x, dy, y, dx))
        forward = borders.result("border_fprop", given_x.to(borders.device), y, numbers)
        assert torch.equal(forward, y), (x.shape, pad)
        backward = borders.result("border_dgrad", given_dy.to(borders.device), dx, numbers)
        # Sums are in float32.
        allowed = 8 * torch.finfo(torch.float32).eps * shown(most, layout) + torch.finfo(dtype).eps * dx.abs()
        assert not excess(backward, dx, allowed), (x.shape, pad)


def test_what_the_functions_refuse() -> None:
    kind = TensorType(DType.float32, (2, 1, 4, 5, 3), DeviceRef.CPU())
    with Graph("refused", input_types=[kind]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(ValueError, match="do not fit an extent of 4"):
            padding.border_fprop(x, [(0, 0), (4, 0), (0, 0)], mirrored=True)
        with pytest.raises(ValueError, match="do not fit an extent of 0"):
            padding.border_dgrad(x, [(0, 0), (2, 2), (0, 0)], mirrored=False)
        with pytest.raises(ValueError, match="must be three"):
            padding.border_fprop(x, [(1, 1)], mirrored=False)
