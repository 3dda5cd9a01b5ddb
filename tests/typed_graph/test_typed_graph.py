"""MAX's graph as the compiler reads it, and what passes may do to it."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from torch_max_backend.ir import ops
from torch_max_backend.ir.notes import Origin, notes_of
from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.mojo_ops.convolution import Geometry, conv_fprop
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.runtime.engine import session
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import (
    Broadcast,
    Call,
    Concat,
    Constant,
    Operand,
    Operation,
    Pad,
    Pointwise,
    Reduction,
    Reshape,
    Result,
    Slice,
    Transpose,
    Unlisted,
    Value,
    constant,
)
from torch_max_backend.typed_graph.read import read

CPU = DeviceRef.CPU()


@in_mlir_context
def test_every_kind_of_operation_is_read_with_its_attributes() -> None:
    kind = TensorType(DType.float32, (4, 6), CPU)
    with Graph("kinds", input_types=[kind, TensorType(DType.float32, ("rows", 6), CPU)]) as graph:
        x, symbolic = (value.tensor for value in graph.inputs)
        notes_of(graph).begin(Origin("first", "relu"))
        part = ops.slice_tensor(x, [slice(-3, None), slice(0, 6, 2)])
        turned = ops.permute(x, [1, 0])
        notes_of(graph).begin(Origin("second"))
        padded = ops.pad(x, [0, 1, 2, 0], ops.constant(2.5, DType.float32, CPU))
        joined = ops.concat([x, x], axis=-1)
        total = ops.broadcast_to(ops.sum(x * x, axis=-1), [4, 6])
        flat = ops.reshape(ops.exp(x), [24])
        doubled = symbolic + symbolic
        others = ops.top_k(x, 2, axis=-1)
        typed = read(graph, [part, turned, padded, joined, total, flat, doubled, others[0]])
    one = {type(value.maker): value.maker for value in typed.results}
    assert isinstance(one[Slice], Slice) and (one[Slice].starts, one[Slice].steps) == ((-3, 0), (1, 2))
    assert isinstance(one[Transpose], Transpose) and one[Transpose].axes == (1, 0)
    assert isinstance(one[Pad], Pad) and (one[Pad].paddings, one[Pad].filler) == ((0, 1, 2, 0), 2.5)
    assert isinstance(one[Concat], Concat) and one[Concat].axis == 1
    (source,) = one[Broadcast].operands
    assert isinstance(source.maker, Reduction) and (source.maker.kind, source.maker.axis) == ("add", 1)
    (exponential,) = one[Reshape].operands
    assert isinstance(exponential.maker, Pointwise) and exponential.maker.function == "exp"
    assert one[Pointwise].name == "add" and one[Pointwise].results[0].shape is None
    assert isinstance(one[Unlisted], Unlisted) and "top_k" in one[Unlisted].title
    assert [one[each].node for each in (Slice, Transpose, Pad, Concat)] == ["first", "first", "second", "second"]
    assert [value.shape for value in typed.arguments] == [(4, 6), None]


@in_mlir_context
def test_a_call_has_what_its_lowering_knew() -> None:
    images, filters = (TensorType(DType.float32, shape, CPU) for shape in ((2, 1, 8, 8, 3), (4, 1, 3, 3, 3)))
    geometry = Geometry(stride=(1, 2, 2), padding=(0, 1, 1))
    library = session.library_to_build_with()
    with Graph("call", input_types=[images, filters], kernel_library=library) as graph:
        x, w = (value.tensor for value in graph.inputs)
        typed = read(graph, [conv_fprop(x, w, geometry)])
    call = typed.results[0].maker
    assert isinstance(call, Call) and isinstance(call.function, LibraryFunction)
    assert (call.kernel, call.facts, call.function.family) == ("conv_fprop", geometry, "convolution")
    numbers = tuple(geometry.numbers())
    assert call.numbers == numbers and call.words[len(numbers) :][:7] == (Result(0), 2, 1, 4, 4, 4, Operand(0))
    assert [value.shape for value in call.operands] == [(2, 1, 8, 8, 3), (4, 1, 3, 3, 3)]


def _value(*shape: int) -> Value:
    return Value(DType.float32, shape, CPU)


def _function(name: str, *operands: Value) -> Pointwise:
    return Pointwise(operands, (operands[0].like(),), name)


def test_settling_replaces_drops_and_orders() -> None:
    x = _value(3)
    exponential = _function("exp", x)
    logarithm = _function("log", exponential.results[0])
    graph = TypedGraph([x], [exponential, logarithm], [logarithm.results[0]])
    assert exponential.results[0].readers == [logarithm] and x.readers == [exponential]
    root = graph.add(_function("sqrt", x))
    graph.settle({exponential.results[0]: root.results[0]})
    assert graph.operations == [root, logarithm], "a new operation stands before its reader, an unread one is gone"
    assert logarithm.operands == root.results and x.readers == [root]
    assert [operation.position for operation in graph.operations] == [0, 1]


def test_a_replaced_result_leaves() -> None:
    x = _value(3)
    exponential = _function("exp", x)
    graph = TypedGraph([x], [exponential], [exponential.results[0]])
    number = graph.add(constant(np.ones(3, np.float32), CPU))
    graph.settle({exponential.results[0]: number.results[0]})
    assert graph.results == number.results and graph.operations == [number]
    assert isinstance(number, Constant) and number.values is not None and number.values.tolist() == [1, 1, 1]


def test_calls_stay_until_a_pass_takes_them() -> None:
    x = _value(3)
    call = Call((x,), (x.like(),), LibraryFunction("sorting", "sort_rows", "cpu", ()), (), "sort_rows")
    graph = TypedGraph([x], [call], [])
    graph.settle()
    assert graph.operations == [call]
    graph.settle(gone=[call])
    assert not graph.operations


def test_a_circle_is_refused() -> None:
    x = _value(3)
    first: Operation = _function("exp", x)
    second = _function("log", first.results[0])
    graph = TypedGraph([x], [first, second], [second.results[0]])
    with pytest.raises(ValueError, match="wait for each other"):
        graph.settle({x: second.results[0]})


def test_halves_are_read_as_float32() -> None:
    value = Value(DType.bfloat16, (2,), CPU)
    number = Constant((), (value,), b"\x80\x3f\x00\x40")
    assert number.values is not None and number.values.tolist() == [1.0, 2.0]
