"""What a model asserts of its tensors, on a CPU. On a GPU PyTorch asserts it, beside MAX's graph
(``partition.leave_assertions``)."""

from __future__ import annotations

import torch
from max.dtype import DType

from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.checks import assert_true

aten = torch.ops.aten


@lowering(aten._assert_async.msg, layout=Layout.RAW)
def assert_async(ctx: LoweringContext, x: GraphTensor, message: str) -> None:
    """Raises RuntimeError where the one element of ``x`` is zero."""
    assert_true(numerics.cast(ops.reshape(x.value, [1]), DType.bool), message)
