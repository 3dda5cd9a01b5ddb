"""Interpolation's kernels against float64 on random problems: library functions called directly.

A GPU's kernels run here, too, lane by lane on the CPU; on a GPU tests/gpu/test_interpolation_gpu.py runs them.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from benchmarks.kernels.interpolation.calls import Calls
from benchmarks.kernels.interpolation.drawn import Drawn, draw
from benchmarks.kernels.interpolation.random_check import check
from benchmarks.kernels.library import LAYOUTS
from torch_max_backend.mojo_ops import interpolation
from torch_max_backend.problems.interpolation import Mode, interpolation_axes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: What chance rarely finds, mostly for a GPU's plans.
CHOSEN = (
    Drawn(Mode.LINEAR, 1, 3, (2, 2), (70, 256)),
    Drawn(Mode.LINEAR, 1, 1, (2, 3), (12, 10000)),
    Drawn(Mode.LINEAR, 1, 64, (2, 2), (30, 20)),
    Drawn(Mode.LINEAR, 2, 21, (4, 4), (32, 32)),
    Drawn(Mode.LINEAR, 1, 1001, (3, 2), (6, 24)),
    Drawn(Mode.LINEAR, 1, 1, (2,), (20000,)),
    Drawn(Mode.LINEAR, 1, 8, (3, 2, 4), (18, 20, 40)),
    Drawn(Mode.LINEAR, 2, 24, (1, 7), (20, 65)),
    Drawn(Mode.NEAREST, 2, 16, (7, 7), (21, 35)),
    Drawn(Mode.CUBIC_ANTIALIASED, 2, 3, (64, 48), (7, 5)),
    Drawn(Mode.LINEAR_ANTIALIASED, 1, 24, (90, 33), (4, 30)),
    Drawn(Mode.AREA, 2, 24, (60, 60), (6, 6)),
    Drawn(Mode.AREA, 1, 3, (33, 47), (1, 2)),
    Drawn(Mode.AREA, 1, 8, (14, 14, 9), (2, 3, 2)),
    Drawn(Mode.NEAREST, 0, 3, (4, 4), (8, 8)),
)


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls(CPU, DTYPES)


@pytest.fixture(scope="module")
def walked() -> Calls:
    return Calls(CPU, DTYPES[::2], walked=True)


def problems(seed: int, count: int, most: int) -> list[Drawn]:
    return [each for each, _ in zip(draw(random.Random(seed), most=most), range(count), strict=False)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small problems are not worth a second one, which busy cores would make them wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_random_problems(calls: Calls) -> None:
    assert check(calls, problems(0, 1500, 1 << 14), DTYPES) == []


@pytest.mark.usefixtures("one_thread")
def test_random_problems_of_a_gpus_kernels(walked: Calls) -> None:
    assert check(walked, problems(1, 700, 1 << 13), DTYPES[::2]) == []


@pytest.mark.parametrize("drawn", CHOSEN, ids=str)
def test_chosen_problems(calls: Calls, walked: Calls, drawn: Drawn) -> None:
    # Each of two dtypes in both layouts.
    assert check(calls, [drawn] * 4, DTYPES[::2]) == []
    assert check(walked, [drawn] * 4, DTYPES[::2]) == []


class _Guarded:
    """Tensors that end, or begin, at a page that cannot be read."""

    def __init__(self, size: int) -> None:
        self._pages = -(-size // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, (self._pages + 2) * mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for page in (address, address + (self._pages + 1) * mmap.PAGESIZE):
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def copy(self, x: torch.Tensor, *, at_end: bool) -> torch.Tensor:
        offset = mmap.PAGESIZE + (self._pages * mmap.PAGESIZE - x.nbytes if at_end else 0)
        result = torch.frombuffer(self._memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
        return result.copy_(x)


@pytest.mark.parametrize("gpu", [False, True])
def test_nothing_outside_is_read(calls: Calls, walked: Calls, gpu: bool) -> None:
    memory = _Guarded(1 << 19)
    for number, drawn in enumerate((*problems(2, 100, 1 << 13), *CHOSEN[8:-1])):
        for at_end in (False, True):
            found = check(
                walked if gpu else calls,
                [drawn],
                [DTYPES[number // 2 % 2 * 2]],
                layouts=LAYOUTS[number % 2 :][:1],
                place=lambda x, at_end=at_end: memory.copy(x, at_end=at_end),  # type: ignore[misc]
            )
            assert found == []


def test_what_the_entry_refuses(calls: Calls) -> None:
    axes = interpolation_axes(Mode.LINEAR, (4, 5), (8, 9))
    x, y = torch.zeros(2, 1, 4, 5, 3), torch.zeros(2, 1, 8, 9, 3)
    for bad_x, bad_y, message in (
        (x[:1], y, "y.N=2: x's N is 1"),
        (x, y[..., :2], "y.C=2: x's C is 3"),
        (x, y[:, :, :7], "places_H.results=8: y's H is 7"),
        (x, y[:, :, :, :8], "places_W.results=9: y's W is 8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            calls.bind(bad_x.contiguous(), bad_y.contiguous(), axes, gradient=False)()


def test_what_the_functions_refuse() -> None:
    axes = interpolation_axes(Mode.LINEAR, (4, 5), (8, 9))
    shapes = {
        "must have rank 5": TensorType(DType.float32, (2, 3, 4, 5), DeviceRef.CPU()),
        "must be one of": TensorType(DType.int32, (2, 1, 4, 5, 3), DeviceRef.CPU()),
        r"spatial extents \[.*\]: the axes have \[1, 4, 5\]": TensorType(
            DType.float32, (2, 1, 5, 5, 3), DeviceRef.CPU()
        ),
    }
    for message, kind in shapes.items():
        with Graph("refused", input_types=[kind]) as graph, pytest.raises(ValueError, match=message):
            interpolation.interpolate(graph.inputs[0].tensor, axes)
