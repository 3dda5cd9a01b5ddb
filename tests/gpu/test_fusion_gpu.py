"""Generated programs on a GPU: the CPU tests' cases, into memory that held NaN, also with inputs off vector bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fusion import test_movement, test_program, test_reductions
from tests.launched import launched_functions
from torch_max_backend import backend

pytestmark = pytest.mark.gpu

EXACT = {**test_movement.CASES, **test_reductions.EXACT}
CASES = {**EXACT, **test_reductions.NEAR, **{f"program, {name}": case for name, case in test_program.CASES.items()}}
SHAPES = {
    "bias": (lambda x: x.sum(0), [(20_070, 256)]),
    "a column in slices": (lambda x: (x * x).sum(0), [(100_000, 3)]),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, [768]), [(1970, 768)]),
    "means of pixels": (lambda x: x.mean(1), [(64, 49, 2048)]),
    "a sum of all": (lambda x: x.sum(), [(3_000_001,)]),
    "softmax": (lambda x: x.softmax(-1), [(300, 197)]),
}
SHAPES_OF = {f"{name}, {dtype}" for name in SHAPES for dtype in (torch.float32, torch.bfloat16)}


def _apart(x: Tensor) -> Tensor:
    """The same values, one element behind a 16-byte boundary."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    room[1:] = x.reshape(-1).cuda()
    return room[1:].view(x.shape)


def _cases() -> dict[str, tuple[object, list[Tensor]]]:
    """Without those in float64, which the GPU's programs leave alone, and those that make tensors of their own."""
    found = {}
    for name, (function, inputs) in CASES.items():
        makes_tensors = name == "numbers alone" or "channel of NCHW" in name
        if not makes_tensors and not any(x.dtype == torch.float64 for x in inputs):
            found[name] = (function, inputs)
    for name, (function, shapes) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            values = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in shapes]
            found[f"{name}, {dtype}"] = (function, values)
    return found


@pytest.fixture(scope="module")
def compiled() -> object:
    """All cases as one graph."""
    cases = _cases()

    def every(inputs: list[list[Tensor]]) -> list[object]:
        return [function(*each) for (function, _), each in zip(cases.values(), inputs, strict=True)]

    torch.compiler.reset()
    return torch.compile(every, backend="max", options={"fallback": "error"})


@pytest.mark.parametrize("aligned", [True, False])
def test_programs(compiled: object, aligned: bool) -> None:
    cases = _cases()
    place = (lambda x: x.cuda()) if aligned else _apart
    inputs = [[place(x) for x in each] for _, each in cases.values()]
    spoiled = [[torch.full_like(x, float("nan")) if x.is_floating_point() else x for x in each] for each in inputs]
    with backend.recorded_graphs() as graphs:
        compiled(spoiled)
    if graphs:  # the second run of this test may find the graph compiled
        assert any("reduction" in function.entry for function in launched_functions(graphs))
    torch.cuda.synchronize()
    found = compiled(inputs)
    failures = {}
    for (name, (function, _)), own, each in zip(cases.items(), found, inputs, strict=True):
        wanted = function(*[x.double() if name in SHAPES_OF and x.is_floating_point() else x for x in each])
        for a, b in zip(pytree.tree_leaves(own), pytree.tree_leaves(wanted), strict=True):
            exact = name in EXACT
            try:
                tolerance = {"rtol": 0, "atol": 0} if exact else {}
                if name in SHAPES_OF:
                    # A sum may cancel: its rounding is that of the largest one.
                    rounding = torch.finfo(a.dtype).eps * b.abs().max().item()
                    b, tolerance = b.to(a.dtype), {"rtol": 0, "atol": 4 * rounding}
                torch.testing.assert_close(a, b, **tolerance, equal_nan=True)
            except AssertionError as error:
                failures[name] = " ".join(str(error).split())[:200]
    assert not failures, f"{len(failures)} of {len(cases)}: {failures}"
