"""Memory that recorded launch lists work in."""

from __future__ import annotations

import torch

from torch_max_backend.runtime.device_graphs.common_memory import Arena, CommonMemory

CPU = torch.device("cpu")


class Worker:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted


def test_the_first_piece_is_large_enough_for_all() -> None:
    common = CommonMemory(CPU)
    large, recorded = Worker(5000), Worker(0)
    common.join(large)
    common.join(recorded)
    # This one is gone at once.
    common.join(Worker(9000))
    first = common.arena(100)
    assert first.memory.numel() == 5000
    assert common.arena(4000).memory is first.memory


def test_memory_that_is_too_small_stays_as_it_is() -> None:
    common = CommonMemory(CPU)
    small = common.arena(100)
    large = common.arena(200)
    assert (small.memory.numel(), large.memory.numel()) == (100, 200)
    assert common.arena(50).memory is small.memory
    del small
    assert common.arena(50).memory is large.memory


def test_memory_goes_with_the_last_recording() -> None:
    common = CommonMemory(CPU)
    del_me = common.arena(1000)
    del del_me
    assert common.arena(10).memory.numel() == 10


def test_a_piece_deals_out_tensors_apart_from_each_other() -> None:
    arena = Arena(torch.zeros(4096, dtype=torch.uint8))
    arena.skip(700)
    first = arena.tensor((3, 5), (1, 4), torch.float32)
    second = arena.tensor((2, 2), (2, 1), torch.int64)
    other = arena.tensor((1000,), (1,), torch.float32)
    for number, each in enumerate((first, second, other)):
        each.fill_(number + 1)
    assert first.eq(1).all() and second.eq(2).all() and other.eq(3).all()
    begin = arena.memory.data_ptr()
    assert [each.data_ptr() - begin for each in (first, second)] == [1024, 1536]
    assert (first.stride(), second.dtype) == ((1, 4), torch.int64)
    assert other.untyped_storage().data_ptr() != begin and not arena.memory[:1024].any()


def test_memory_is_written_to_inside_inference_mode_and_outside() -> None:
    with torch.inference_mode():
        tensor = CommonMemory(CPU).arena(64).tensor((4,), (1,), torch.float32)
        tensor.copy_(torch.ones(4))
    tensor.copy_(torch.full((4,), 2.0))
    assert tensor.eq(2).all()
