"""CUDA streams, memory and repeatability of compiled graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """A model and the same model compiled."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 8)
    ).cuda()
    return model, torch.compile(model, backend="max", options={"fallback": "error"})


def _queue_work(cycles: int = 200_000_000) -> None:
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("side", [False, True], ids=["default_stream", "side_stream"])
def test_work_queued_on_both_sides_is_ordered(pair: tuple[nn.Module, nn.Module], side: bool) -> None:
    model, run = pair
    model.eval()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    base = torch.randn(4, 8, 16, 16, device="cuda")
    with torch.no_grad():
        expected = model(base * 3)
        run(base)
        for _ in range(5):
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                x = torch.zeros_like(base)
                _queue_work()
                x.copy_(base * 3)
                got = run(x)
                x.fill_(float("nan"))
                after = got * 2
            stream.synchronize()
            # The margin is that of TF32, in which MAX multiplies float32 matrices; stale data would be far off.
            torch.testing.assert_close(after, expected * 2, rtol=2e-2, atol=2e-2)


def test_parameters_updated_on_the_stream_are_seen(pair: tuple[nn.Module, nn.Module]) -> None:
    model, run = pair
    model.eval()
    x = torch.randn(4, 8, 16, 16, device="cuda")
    with torch.no_grad():
        before = run(x).clone()
        for step in range(5):
            _queue_work()
            model[5].bias.add_(1.0)
            torch.testing.assert_close(run(x), before + step + 1, rtol=1e-4, atol=1e-3)
        model[5].bias.sub_(5.0)


def test_the_host_does_not_wait(pair: tuple[nn.Module, nn.Module]) -> None:
    model, run = pair
    model.eval()
    x = torch.randn(4, 8, 16, 16, device="cuda")
    with torch.no_grad():
        run(x)
        torch.cuda.synchronize()
        begun, ended = torch.cuda.Event(), torch.cuda.Event()
        _queue_work(2_000_000_000)
        begun.record()
        run(x)
        ended.record()
        assert not begun.query(), "the call waited for work that was queued before it"
        torch.cuda.synchronize()


def test_memory_is_flat_over_a_thousand_steps(pair: tuple[nn.Module, nn.Module]) -> None:
    model, run = pair
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            run(torch.randn(16, 8, 16, 16, device="cuda")).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()

    steps(200)
    free, _ = torch.cuda.mem_get_info()
    steps(1000)
    assert free - torch.cuda.mem_get_info()[0] < 64 * 2**20


def test_training_repeats_bit_for_bit(pair: tuple[nn.Module, nn.Module]) -> None:
    model, run = pair
    model.train()
    x = torch.randn(16, 8, 16, 16, device="cuda")
    state = copy.deepcopy(model.state_dict())
    seen = []
    for _ in range(3):
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        run(x).square().mean().backward()
        seen.append([p.grad.clone() for p in model.parameters()])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_a_number_of_the_host_is_read_in_each_call(dtype: torch.dtype, capture: bool) -> None:
    number = torch.ones((), dtype=dtype).pin_memory()
    run = torch.compile(
        lambda x: (x * number).cos() + number, backend="max", options={"fallback": "error", "capture": capture}
    )
    x = torch.randn(5, 7, device="cuda")
    for each in (2, 3, 5, 7, 11, 13, 17, 19):
        number.fill_(each)
        _queue_work()
        got = run(x)
        # The queue has not come to the call yet.
        number.fill_(-1)
        torch.testing.assert_close(got, (x * each).cos() + each)


def test_constants_beside_operators_that_stay_in_pytorch_are_on_the_gpu() -> None:
    x = torch.randn(4, 4, device="cuda", dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([3, 0, 0, 1], device="cuda")
    run = torch.compile(lambda x: (x * x).new_zeros(x.shape) + x.index_select(0, rows), backend="max")
    (gradient,) = torch.autograd.grad(run(x).sum(), x)
    assert gradient.sum(1).tolist() == [8, 4, 0, 4]
