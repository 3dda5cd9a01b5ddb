"""Pooling lowerings against PyTorch: forward with indices, and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe

aten = torch.ops.aten


def _channels_last(make: Callable[[torch.Generator], torch.Tensor]) -> Callable[[torch.Generator], torch.Tensor]:
    def made(generator: torch.Generator) -> torch.Tensor:
        x = make(generator)
        return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)

    return made


def _max_with_indices(rank: int, **window: Any) -> Callable[[torch.Tensor], Any]:
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[rank]
    return lambda x: pool(x, return_indices=True, **window)


MAX = [
    ("1d", 1, (2, 3, 17), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("stem", 2, (2, 4, 12, 13), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("vgg", 2, (2, 3, 8, 8), {"kernel_size": 2}),
    ("dilated_overlap", 2, (1, 2, 9, 9), {"kernel_size": 2, "stride": 2, "dilation": 2}),
    ("ceil", 2, (1, 2, 10, 7), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    ("3d", 3, (1, 3, 6, 7, 8), {"kernel_size": (2, 3, 3), "stride": (2, 2, 1), "padding": 1}),
]
AVG = [
    ("1d", F.avg_pool1d, (2, 3, 17), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("2d", F.avg_pool2d, (2, 4, 11, 12), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("2d_ceil", F.avg_pool2d, (1, 2, 10, 7),
     {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}),
    ("2d_divisor", F.avg_pool2d, (1, 2, 8, 8), {"kernel_size": 2, "divisor_override": -3}),
    ("3d", F.avg_pool3d, (1, 3, 6, 7, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("3d_overlap", F.avg_pool3d, (1, 2, 5, 6, 7), {"kernel_size": 3, "stride": 1, "padding": 1,
                                                    "count_include_pad": False}),
]  # fmt: skip

#: bfloat16 and float64 are posed to the kernels, by their own tests.
NARROW = (torch.float16,)

CASES = [
    *(Case(f"max_{name}", gradients(_max_with_indices(rank, **window)), recipe(integers(*shape)), exact=True)
      for name, rank, shape, window in MAX),
    *(Case(f"max_{name}_channels_last", gradients(_max_with_indices(rank, **window)),
           recipe(_channels_last(integers(*shape))), exact=True)
      for name, rank, shape, window in MAX[1::4]),
    *(Case(f"max_stem_{dtype}", gradients(_max_with_indices(2, **MAX[1][3])),
           recipe(randn(2, 4, 12, 13, dtype=dtype)))
      for dtype in NARROW),
    *(Case(f"avg_{name}", gradients(lambda x, pool=pool, window=window: pool(x, **window)),
           recipe(randn(*shape)), length=27)
      for name, pool, shape, window in AVG),
    *(Case(f"avg_{name}_channels_last", gradients(lambda x, pool=pool, window=window: pool(x, **window)),
           recipe(_channels_last(randn(*shape))), length=27)
      for name, pool, shape, window in AVG[1::4]),
    # Eager PyTorch has no 3-D average pooling of the narrow floats on a CPU to compare with.
    *(Case(f"avg_2d_{dtype}", gradients(lambda x: F.avg_pool2d(x, **AVG[1][3])),
           recipe(randn(2, 4, 11, 12, dtype=dtype)), length=9)
      for dtype in NARROW),
    Case("adaptive_avg", gradients(lambda x: F.adaptive_avg_pool2d(x, (3, 5))), recipe(randn(2, 3, 7, 11)),
         length=12),
    Case("adaptive_avg_one", gradients(lambda x: F.adaptive_avg_pool2d(x, 1)), recipe(randn(2, 3, 7, 11)),
         length=77),
    Case("adaptive_avg_1d", gradients(lambda x: F.adaptive_avg_pool1d(x, 4)), recipe(randn(2, 3, 10)), length=4),
    Case("adaptive_avg_3d", gradients(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4))),
         recipe(randn(1, 2, 5, 7, 9)), length=30),
    Case("adaptive_max", gradients(lambda x: F.adaptive_max_pool2d(x, (3, 5), return_indices=True)),
         recipe(integers(2, 3, 7, 11)), exact=True),
    Case("adaptive_max_3d", gradients(lambda x: F.adaptive_max_pool3d(x, (2, 3, 4))),
         recipe(integers(1, 2, 5, 7, 9)), exact=True),
    Case("unbatched", gradients(_max_with_indices(2, kernel_size=2)), recipe(integers(3, 8, 8)), exact=True),
    Case("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
         recipe(randn(2, 3, 8, 8)), exact=True),
    Case("lp_pool", gradients(lambda x: F.lp_pool2d(x, 2.0, 2)), recipe(randn(1, 2, 6, 6)), length=4),
    Case("empty_batch", gradients(_max_with_indices(2, kernel_size=2)), recipe(randn(0, 3, 8, 8)), exact=True),
    Case("empty_batch_adaptive_avg", gradients(lambda x: F.adaptive_avg_pool2d(x, (3, 5))), recipe(randn(0, 3, 7, 11)),
         exact=True),
]  # fmt: skip

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "max_vgg", "max_dilated_overlap", "max_3d_channels_last", "avg_1d", "avg_3d_overlap", "adaptive_avg_one",
    "adaptive_avg_1d", "adaptive_max_3d", "unbatched",
    "avg_2d_torch.float16", "adaptive_avg_3d",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="pooling")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
