"""PyTorch's own samples of the pooling ops, forward and backward, through the whole lowering.

All of OpInfo's maxima and averages go through the kernels in tests/kernels/test_pooling_properties.py; here a few of
every op, 1-D and unbatched ones included, go through decompositions, layouts and lowerings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.harness import Batch, Case, batch_fixture, core, gradients, parametrize
from tests.operators.database import op_db

_OPS = [
    f"nn.functional.{kind}{rank}d"
    for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "max_unpool")
    for rank in (1, 2, 3)
]


def _bound(op: Any, sample: Any) -> Callable[..., Any]:
    """The op with all of a sample's arguments but its tensors."""
    plain = [argument for argument in sample.args if not isinstance(argument, torch.Tensor)]
    return lambda *tensors: op(*tensors, *plain, **sample.kwargs)


def _cases() -> Iterator[Case]:
    for info in op_db:
        if info.name not in _OPS or info.variant_test_name:
            continue
        samples = [s for s in info.sample_inputs("cpu", torch.float32, requires_grad=False) if s.input.numel()]
        name = info.name.removeprefix("nn.functional.")
        # Every sample costs seconds of compiling; the planar ones of the plain ops differ most.
        most = 2 if name in ("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d") else 1
        for place, sample in enumerate(samples[:: math.ceil(len(samples) / most)]):
            function, tensors = _bound(info.op, sample), [sample.input]
            if name.startswith("max_unpool"):
                # OpInfo repeats indices, and then it is not defined which value stays.
                shape, size = sample.args[0].shape, sample.kwargs["output_size"]
                count = math.prod(shape[2:])
                if count > math.prod(size[2:]):
                    continue
                tensors.append(torch.arange(count).flip(0).expand(*shape[:2], count).reshape(shape))
            else:
                function = gradients(function)
            yield Case(f"{name}_{place}", function, lambda _, tensors=tensors: [t.clone() for t in tensors], length=64)


CASES = list(_cases())
CASES = core(CASES, *(case.id for case in CASES[1::2]))
batch = batch_fixture(CASES, name="pooling_opinfo")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)
