"""Assertions, and checks of indices: a typed function each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor, ints

FAMILY = Family(
    "checks",
    Signature(
        "assert_true",
        results=(Tensor("result", DType.bool, 1),),
        operands=(Tensor("condition", DType.bool, 1), Tensor("message", DType.uint8, 1)),
    ),
    Signature(
        "check_indices",
        results=(Tensor("result", DType.bool, 1),),
        operands=(Tensor("index", DType.int64, 1),),
        numbers=ints("size", "ignored"),
        reports=True,
    ),
)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    if target == "cpu":
        yield functions.function_of(FAMILY, "assert_true", target, ())
    yield functions.function_of(FAMILY, "check_indices", target, ())


@beartype
def assert_true(condition: TensorValue, message: str) -> None:
    """Makes the graph raise ``RuntimeError(message)`` when it runs and ``condition``, bool [1], does not hold.

    Raises:
        ValueError: the condition has another shape or dtype, or lies on a GPU, or the message has a zero in it.
    """
    if condition.dtype != DType.bool or list(condition.shape) != [1]:
        raise ValueError(f"condition is {condition.dtype} {list(condition.shape)}: must be one bool, [1]")
    if not condition.device.is_cpu():
        raise ValueError(f"condition is on {condition.device}: must be on a CPU")
    if "\0" in message:
        raise ValueError(f"message is {message!r}: must have no zero in it")
    text = ops.constant(np.frombuffer(message.encode() + b"\0", np.uint8), DType.uint8, device=DeviceRef.CPU())
    types = [TensorType(DType.bool, [1], condition.device)]
    function = functions.function_of(FAMILY, "assert_true", functions.target_of(condition.device), ())
    functions.call(FAMILY["assert_true"], function, [condition, text], types)


@beartype
def check_indices(index: TensorValue, size: int, ignored: int) -> None:
    """Makes the graph report (``runtime.launching.reports``) an index outside [0, ``size``) other than ``ignored``.

    Args:
        index: int64, [count].
        size: of the dimension.
        ignored: may be anything.

    Raises:
        ValueError: the indices have another rank or dtype.
    """
    types = [TensorType(DType.bool, [1], index.device)]
    function = functions.function_of(FAMILY, "check_indices", functions.target_of(index.device), ())
    functions.call(FAMILY["check_indices"], function, [index], types, [size, ignored])
