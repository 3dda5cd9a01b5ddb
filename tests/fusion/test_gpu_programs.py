"""How programs for a GPU read and compute: their graphs are built without one, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.launched import launched_functions
from tests.lowering.test_shape import patches_of_windows
from torch_max_backend import backend
from torch_max_backend.ahead import compile_ahead
from torch_max_backend.fusion.program import Program
from torch_max_backend.runtime.building import libraries


class Applied(nn.Module):
    """A function of an input, with parameters that it may ask for."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.names = [f"operand{number}" for number in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """The function's value."""
        return self.function(x, *[getattr(self, name) for name in self.names])


def programs(function: Callable[..., Tensor], size: tuple[int, ...], *shapes: tuple[int, ...]) -> list[Program]:
    """What the forward and the backward graph launch of generated programs."""
    torch.compiler.reset()
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(Applied(function, *shapes), torch.empty(size, device="meta"), target="sm_90a")
    return [each for each in launched_functions(graphs) if isinstance(each, Program)]


def test_a_sigmoid_takes_the_short_instructions() -> None:
    found = [each for each in programs(lambda x, w: F.silu(x * w), (16, 64), (64,)) if "exp" in each.body]
    assert found
    for program in found:
        assert "exponential[width](" in program.body and "quotient_above_one[width](" in program.body
        assert ("common.arithmetic", "exponential") in program.imports


def test_gradients_of_slices_are_stored_as_their_sum() -> None:
    """No program reads through shifted windows: the gradient of four slices that they read is stored once."""
    found = programs(lambda x, w: patches_of_windows(x * w).sin(), (8, 4, 4, 6), (6,))
    assert sum("slice_backward" in each.name for each in found) <= 2


def test_other_exponentials_and_quotients_stay() -> None:
    found = programs(lambda x, w: torch.where(x > 9, 0.0, (x * w).exp()) / (1 + x), (16, 64), (64,))
    bodies = "".join(program.body for program in found)
    assert "exponential[width](" in bodies and "quotient_above_one" not in bodies and " / " in bodies


@pytest.mark.parametrize(
    ("size", "shapes", "ways", "parts"),
    [
        # What changes with the last digit alone is one vector for all of a thread's rows.
        ((16, 64), [(64,)], {"linear", "column"}, 4),
        ((16, 64), [(16, 64), (64,)], {"linear", "column"}, 4),
        ((16, 64), [(16, 1)], {"linear", "same"}, 4),
        ((16, 64), [(16, 64)] * 3, {"linear"}, 2),
        ((16, 64), [(16, 64)] * 8, {"linear"}, 1),
        ((4, 8, 64), [(4, 1, 64)], {"linear", "row"}, 2),
        ((15, 7), [(7,)], {"linear", "each"}, 1),
    ],
)
def test_a_thread_reads_as_much_as_leaves_registers(
    size: tuple[int, ...], shapes: list[tuple[int, ...]], ways: set[str], parts: int
) -> None:
    def total(x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = torch.maximum(x, other)
        return x

    forward = programs(total, size, *shapes)[0]
    found = {line.partition('a.read["')[2].partition('"')[0] for line in forward.body.splitlines() if "a.read[" in line}
    assert found == ways and forward.parts == parts


def test_columns_of_a_reduction_are_read_once() -> None:
    found = [each for each in programs(lambda x, w: x * w, (256, 64), (64,)) if each.entry == "reduction"]
    assert found and all(each.reduction is not None and not each.reduction.rows for each in found)
    rows = programs(lambda x, w: (x * w).sum(1), (256, 64), (64,))[0]
    assert rows.reduction is not None and rows.reduction.rows and '"column"' not in rows.body


def test_a_thread_computes_one_part() -> None:
    """And threads of a warp the same one, where parts are short."""

    def parts(x: Tensor, w: Tensor) -> list[Tensor]:
        return [x * w, x + 1, x.relu()]

    def heads(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([each.transpose(1, 2) for each in parts(x, w)], 1).permute(0, 3, 1, 2, 4).contiguous()

    (near, *_) = programs(heads, (8, 5, 2, 64), (64,))
    assert "if (g0)[0]:" in near.body and near.outermost
    (along, *_) = programs(lambda x, w: torch.cat(parts(x, w), 1), (8, 64), (64,))
    assert "if (g0)[0]:" in along.body and not along.outermost
    (within, *_) = programs(lambda x, w: torch.cat(parts(x, w), 1), (8, 31), (31,))
    assert ".select(" in within.body and "if (g0)[0]:" not in within.body and not within.outermost


def test_a_convolution_stores_what_two_programs_need() -> None:
    """A product with its bias, which is saved, and its GELU: the product's own result is not written."""
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    x = torch.empty(2048, 128, device="meta")
    with mock.patch.object(libraries, "build", return_value={}), backend.recorded_graphs() as graphs:
        compile_ahead(layers, x, target="sm_90a", autocast=torch.bfloat16)
    found = [each for each in launched_functions(graphs[:1]) if isinstance(each, Program)]
    assert [each.entry for each in found if "addmm" in each.ops].count("conv_pointwise") == 2
    (gelu,) = [each for each in found if "gelu" in each.ops]
    assert gelu.entry == "pointwise" and gelu.results == 1


def shuffled(x: Tensor, w: Tensor) -> Tensor:
    """Channels of two halves in turns, as ShuffleNet has them."""
    left, right = x.chunk(2, -1)
    both = torch.cat((left, torch.relu(right * w)), -1)
    return both.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize(("channels", "vector"), [(32, 4), (44, 4), (52, 4)])
def test_channels_that_take_turns_are_read_in_lines(channels: int, vector: int) -> None:
    forward, *_ = programs(shuffled, (6, channels), (channels // 2,))
    assert "pair_lines" in forward.body and '"each"' not in forward.body
    assert forward.vector == vector


def test_rows_that_no_vector_divides_take_smaller_ones() -> None:
    for channels, vector in ((58, 2), (20, 4), (29, 4)):
        forward, *_ = programs(lambda x, w: (x * w).sin(), (6, channels), (channels,))
        assert forward.vector == vector
        assert ('"each"' in forward.body) == (channels == 29)


def test_vectors_lie_in_one_part_of_a_concatenation() -> None:
    for left, vector in ((12, 4), (14, 2), (16, 4)):
        forward, *_ = programs(lambda x, w: torch.cat((x.relu(), w.sin()), 1).cos(), (6, left), (6, 32 - left))
        assert forward.vector == vector
        assert forward.guards and 'inside["row"' not in forward.body
