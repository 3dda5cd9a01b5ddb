"""An index outside its dimension on a GPU: the next call raises, nothing is written outside, nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_max_backend import backend
from torch_max_backend.errors import IndexOutsideError

pytestmark = pytest.mark.gpu

SIZE, COLUMNS = 50, 8

Function = Callable[[Tensor, Tensor], Tensor]

READS: dict[str, Function] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, COLUMNS) + 0),
    "nll_loss_forward": lambda x, i: F.cross_entropy(x.sum(1).expand(len(i), SIZE), i, reduction="none"),
    "max_unpool2d": lambda x, i: F.max_unpool2d(
        i.float().expand(1, 1, 1, -1), i.expand(1, 1, 1, -1), (1, 2), output_size=(1, 2 * len(i))
    ),
}

#: In place, so that what is written to lies between other rows.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda x, i, source: x.index_put_((i,), source[0]),
    "index_put_add": lambda x, i, source: x.index_put_((i,), source, accumulate=True),
    "index_add": lambda x, i, source: x.index_add_(0, i, source),
    "scatter": lambda x, i, source: x.scatter_(0, i[:, None] + torch.zeros_like(source, dtype=torch.int64), 2.0),
    "scatter_add": lambda x, i, source: x.scatter_add_(
        0, i[:, None] + torch.zeros_like(source, dtype=torch.int64), source
    ),
}
#: By these the operator of a write is called in errors.
NAMES = {"index_put_add": "index_put"}
#: Where rows are put, a list that is searched, and one that is sorted.
LENGTHS = (20, 300)


def _inside(length: int) -> Tensor:
    return torch.arange(length, device="cuda") * 7 % min(SIZE, 2 * length)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="max", options={"fallback": "error", **options})


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", READS)
def test_the_next_call_raises(name: str, length: int) -> None:
    x, inside = torch.randn(SIZE, COLUMNS, device="cuda"), _inside(length)
    run = _compiled(READS[name])
    for place in (-(2**40), 2 * SIZE * length):
        torch.testing.assert_close(run(x, inside), READS[name](x, inside))
        outside = inside.clone()
        outside[length // 2] = place
        run(x, outside)
        torch.cuda.synchronize()
        with pytest.raises(IndexOutsideError, match=rf"aten\.{name}: index out of range: {place} in a (.|\n)*at: .*"):
            run(x, inside)
        torch.testing.assert_close(run(x, inside), READS[name](x, inside))
        torch.cuda.synchronize()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_outside(name: str, length: int, deterministic: bool) -> None:
    """The rows beside those that are written to stay, and so do the others that the list names."""
    inside, source = _inside(length), torch.randn(length, COLUMNS, device="cuda")
    torch.use_deterministic_algorithms(deterministic)
    try:
        run = _compiled(WRITES[name], check_indices="sync")
        for place in (-SIZE - 1, SIZE, SIZE + 1, 2**33):
            around = torch.randn(3 * SIZE, COLUMNS, device="cuda")
            expected = around.clone()
            outside = inside.clone()
            outside[length // 3] = place
            with pytest.raises(IndexOutsideError, match=rf"aten\.{NAMES.get(name, name)}"):
                run(around[SIZE : 2 * SIZE], outside, source)
            assert torch.equal(around[:SIZE], expected[:SIZE]) and torch.equal(around[2 * SIZE :], expected[2 * SIZE :])
            kept = torch.ones(SIZE, dtype=torch.bool, device="cuda")
            kept[inside] = False
            assert torch.equal(around[SIZE : 2 * SIZE][kept], expected[SIZE : 2 * SIZE][kept])
            around = expected.clone()
            run(around[SIZE : 2 * SIZE], inside, source)
            WRITES[name](expected[SIZE : 2 * SIZE], inside, source)
            torch.testing.assert_close(around, expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("length", (200, 3000, 20000))
@pytest.mark.parametrize("name", ("index_put", "index_add", "scatter_add"))
def test_the_same_bits_where_that_is_asked_for(name: str, length: int) -> None:
    """Sums of many numbers to each place, that would be others in another order."""
    x, i = torch.zeros(SIZE, COLUMNS, device="cuda"), torch.randint(0, SIZE, (length,), device="cuda")
    source = torch.randn(length, COLUMNS, device="cuda")

    def put(x: Tensor, i: Tensor, source: Tensor) -> Tensor:
        return x.index_put_((i,), source, accumulate=True)

    function = put if name == "index_put" else WRITES[name]
    torch.use_deterministic_algorithms(True)
    try:
        run = _compiled(lambda x, i, source: function(x.clone(), i, source))
        found = [run(x, i, source) for _ in range(8)]
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = function(x.double(), i, source.double()).float()
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_no_false_alarm() -> None:
    """Negative indices where PyTorch allows them, ignored classes, empty lists."""

    def function(x: Tensor, i: Tensor, classes: Tensor) -> Tensor:
        loss = F.cross_entropy(x, classes, ignore_index=-100)
        return x[i].sum() + x[i, i].sum() + x.index_put((i,), x[0]).sum() + loss

    run = _compiled(function, check_indices="sync")
    x = torch.randn(SIZE, SIZE, device="cuda")
    classes = torch.arange(SIZE, device="cuda")
    classes[::3] = -100
    for i in (torch.tensor([-SIZE, -1, SIZE - 1]), torch.empty(0, dtype=torch.int64)):
        i = i.cuda()
        torch.testing.assert_close(run(x, i, classes), function(x, i, classes), rtol=1e-4, atol=1e-4)


def test_a_backward_pass_names_the_forward_operator() -> None:
    model = nn.Embedding(SIZE, COLUMNS).cuda()
    run = _compiled(lambda i: model(i).square().sum())
    run(_inside(20)).backward()
    before = model.weight.grad
    assert before is not None
    expected = before.clone()
    model.weight.grad = None
    outside = _inside(20)
    outside[3] = SIZE
    with pytest.raises(IndexError, match=rf"aten.embedding: index out of range: {SIZE} in a dimension of {SIZE}"):
        # The backward pass raises already, if the forward pass has run by then.
        run(outside).backward()
        torch.cuda.synchronize()
        run(_inside(20))
    model.weight.grad = None
    run(_inside(20)).backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, expected)
    torch.cuda.synchronize()


def test_a_captured_graph_reports() -> None:
    x, i = torch.randn(SIZE, COLUMNS, device="cuda"), _inside(20)
    with backend.recorded_graphs() as graphs:
        run = _compiled(lambda x, i: x[i] * 2, capture=True)
        for _ in range(10):
            run(x, i)

        def replays() -> int:
            (executable,) = graphs[0].executables
            assert executable.capture is not None
            return executable.capture.replays

        assert replays() > 0
        kept = i.clone()
        i[4] = SIZE + 3
        before = replays()
        run(x, i)
        assert replays() == before + 1
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=rf"aten.index: index out of range: {SIZE + 3} in a dimension of {SIZE}"):
            run(x, i)
        i.copy_(kept)
        torch.testing.assert_close(run(x, i), x[i] * 2)
        assert replays() == before + 2
        torch.cuda.synchronize()
