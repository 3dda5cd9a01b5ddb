"""Reading and writing at places that tensors name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe

F = torch.nn.functional
aten = torch.ops.aten

Maker = Callable[[torch.Generator], torch.Tensor]


def places(*shape: int, size: int, negative: bool = False) -> Maker:
    """Places in a dimension of ``size``, with repetitions."""
    return integers(*shape, low=-size if negative else 0, high=size, dtype=torch.int64)


def distinct(rows: int, count: int, size: int) -> Maker:
    """``count`` different places in a dimension of ``size`` for each of ``rows`` rows."""
    return lambda generator: torch.rand(rows, size, generator=generator).argsort(1)[:, :count]


def last(*shape: int) -> Maker:
    """Small whole numbers, channels-last."""
    return lambda generator: integers(*shape)(generator).contiguous(memory_format=torch.channels_last)


def case(name: str, function: Callable[..., object], *makers: Maker) -> Case:
    return Case(name, function, recipe(*makers), exact=True)


def grad(name: str, function: Callable[..., object], *makers: Maker) -> Case:
    return Case(name, gradients(function), recipe(*makers), exact=True)


CASES = [
    grad("embedding", lambda w, i: F.embedding(i, w), integers(9, 5), places(3, 4, size=9)),
    grad("embedding_padding", lambda w, i: F.embedding(i, w, padding_idx=2), integers(5, 3), places(12, size=5)),
    grad("index_rows", lambda x, i: x[i], integers(5, 4), places(7, size=5, negative=True)),
    grad("index_middle", lambda x, i: x[:, i], last(2, 6, 3, 4), places(4, size=6)),
    grad(
        "index_pair",
        lambda x, i, j: x[:, :, i, j],
        last(2, 3, 5, 6),
        places(4, 1, size=5),
        places(7, size=6),
    ),
    case("index_apart", lambda x, i, j: x[i, :, j], integers(4, 3, 5), places(6, size=4), places(6, size=5)),
    case("index_bool_values", lambda x, i: (x > 0)[i], integers(5, 4), places(3, size=5)),
    grad("index_select", lambda x, i: x.index_select(2, i), last(2, 3, 5, 4), places(6, size=5)),
    grad("gather", lambda x, i: x.gather(1, i), integers(4, 5), places(4, 7, size=5)),
    grad(
        "gather_rows", lambda x, i: x.gather(1, i[:, :, None].expand(2, 4, 3)), integers(2, 5, 3), places(2, 4, size=5)
    ),
    grad("gather_one_list", lambda x, i: x.gather(0, i[:, None].expand(4, 3)), integers(5, 3), places(4, size=5)),
    grad(
        "scatter_add_one_list",
        lambda x, i, s: x.scatter_add(0, i[:, None].expand(4, 3), s),
        integers(5, 3),
        places(4, size=5),
        integers(4, 3),
    ),
    grad("gather_channels_last", lambda x, i: x.gather(1, i), last(2, 5, 3, 4), places(2, 2, 3, 4, size=5)),
    case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 0), integers(4, 5), places(2, 5, size=4)),
    case("scatter_value", lambda x, i: x.scatter(1, i, 7.0), integers(4, 5), places(4, 2, size=5)),
    case("scatter_int", lambda x, i: x.scatter(1, i, 7), integers(4, 5, dtype=torch.int64), places(4, 1, size=5)),
    case(
        "scatter",
        lambda x, i, y: x.scatter(1, i, y),
        integers(4, 3),
        distinct(4, 2, 3),
        integers(4, 2),
    ),
    case("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), integers(3, 5), places(8, 5, size=3), integers(8, 5)),
    case(
        "scatter_add_bf16",
        lambda x, i, y: x.scatter_add(0, i, y),
        integers(3, 5, dtype=torch.bfloat16),
        places(8, 5, size=3),
        integers(8, 5, dtype=torch.bfloat16),
    ),
    case("one_hot", lambda i: F.one_hot(i, 6), places(5, size=6)),
    case("masked_fill", lambda x: x.masked_fill(x > 1, -5.0), last(2, 3, 4, 5)),
    case("index_put", lambda x, i, y: x.index_put((i[0],), y), integers(5, 4), distinct(1, 2, 5), integers(2, 4)),
    case(
        "index_put_add",
        lambda x, i, j, y: x.index_put((i, j), y, accumulate=True),
        integers(4, 3),
        places(9, size=4),
        places(9, size=3, negative=True),
        integers(9),
    ),
    case("index_put_mask", lambda x, y: x.index_put((x > 1,), y), integers(4, 3), integers()),
    case(
        "index_add",
        lambda x, i, y: x.index_add(1, i, y, alpha=2),
        last(2, 4, 5, 3),
        places(6, size=4),
        integers(2, 6, 5, 3),
    ),
    case("index_copy", lambda x, i, y: x.index_copy(-1, i[0], y), integers(3, 4), distinct(1, 3, 4), integers(3, 3)),
    case(
        "index_add_bf16",
        lambda x, i, y: x.index_add(0, i, y),
        integers(3, 4, dtype=torch.bfloat16),
        places(6, size=3),
        integers(6, 4, dtype=torch.bfloat16),
    ),
    case("index_add_number", lambda x, i, y: x.index_add(0, i, y), integers(), places(1, size=1), integers()),
    case(
        "index_copy_bools",
        lambda x, i, y: (x > 0).index_copy(0, i[0], y > 1),
        integers(3, 4),
        distinct(1, 2, 3),
        integers(2, 4),
    ),
    Case(
        "grid_sample",
        gradients(lambda x, grid: F.grid_sample(x, grid, align_corners=True)),
        recipe(randn(2, 3, 5, 4), randn(2, 3, 6, 2)),
        length=16,
        slack=4,
    ),
    Case(
        "grid_sample_bicubic",
        gradients(lambda x, grid: F.grid_sample(x, grid, "bicubic", "reflection", align_corners=False)),
        recipe(randn(1, 2, 5, 4), randn(1, 2, 3, 2)),
        length=16,
        slack=4,
    ),
    Case(
        "grid_sample_3d",
        gradients(lambda x, grid: F.grid_sample(x, grid, padding_mode="border", align_corners=False)),
        recipe(randn(1, 2, 3, 5, 4), randn(1, 2, 3, 2, 3)),
        length=16,
        slack=4,
    ),
    case(
        "grid_sample_nearest",
        lambda x, grid: F.grid_sample(x, grid, "nearest", align_corners=False),
        randn(2, 2, 3, 4),
        randn(2, 3, 2, 2),
    ),
    grad("reflection_pad", lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"), last(2, 3, 4, 5)),
    grad("replication_pad", lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"), last(2, 3, 4, 5)),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "index_middle", "index_bool_values", "gather_channels_last", "take_along_dim", "scatter_int",
    "scatter_add_bf16", "index_add_bf16", "index_add_number", "index_copy_bools", "replication_pad", "masked_fill",
    "grid_sample_bicubic", "grid_sample_3d",
    "grid_sample_nearest",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="indexing")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


OUTSIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "rows": lambda x, i: x[i],
    "pairs": lambda x, i: x[i, i - i],
    "gather": lambda x, i: x.gather(1, i[:, None]),
    "select": lambda x, i: x.index_select(1, i),
    "put": lambda x, i: x.index_put((i, i - i), x[0, 0]),
    "add": lambda x, i: x.index_add(1, i, x[:, :3]),
    "copy": lambda x, i: x.index_copy(0, i, x[3:]),
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(3, 6), x),
    "unpool": lambda x, i: F.max_unpool2d(x[None, None, :1, :3], i[None, None, None], (1, 2)),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:3], i, reduction="none", ignore_index=-8),
}
OPS = {
    "embedding": "embedding", "rows": "index", "pairs": "index", "gather": "gather", "select": "index_select",
    "put": "index_put", "add": "index_add", "copy": "index_copy", "scatter": "scatter",
    "unpool": "max_unpool2d", "cross_entropy": "nll_loss_forward",
}  # fmt: skip
#: Negative ones count from the end.
FROM_END = ("rows", "pairs", "put")


@pytest.mark.parametrize("place", [-7, 6])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_place_outside_raises(name: str, place: int) -> None:
    """As in eager PyTorch, on a CPU, with the operator, the size and the line; places inside do not."""
    x, inside = torch.arange(36.0).reshape(6, 6), torch.tensor([5, 0, -1 if name in FROM_END else 1])
    run = torch.compile(OUTSIDE[name], backend="max", options={"fallback": "error"})
    assert torch.equal(run(x, inside), OUTSIDE[name](x, inside))
    for position in range(3):
        outside = inside.clone()
        outside[position] = place
        with pytest.raises((IndexError, RuntimeError)):
            OUTSIDE[name](x, outside)
        several = "an index into dimensions of 6, 6" if name in ("pairs", "put") else f"{place} in a dimension of 6"
        with pytest.raises(IndexError, match=f"aten.{OPS[name]}: index out of range: {several}\n  at: .*{name}"):
            run(x, outside)
        assert torch.equal(run(x, inside), OUTSIDE[name](x, inside))
