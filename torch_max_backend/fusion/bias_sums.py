"""Bias gradients that are computed together with weight gradients.

Both are sums over the rows of dy. Hopper's weight gradient has dy in shared memory and adds it up there
(kernels/convolution/sm90/wgrad_bias.mojo), so that no other kernel reads it for that.
"""

from __future__ import annotations

from collections.abc import Iterator

from max.graph import DeviceRef

from torch_max_backend.dtypes import NARROW_FLOATS
from torch_max_backend.fusion.convolutions import takes_part
from torch_max_backend.fusion.dependencies import Dependencies
from torch_max_backend.fusion.terms import in_memory, readers_of
from torch_max_backend.mojo_ops.convolution import FAMILY, WGRAD_BIAS, Geometry, wgrad_bias_function
from torch_max_backend.mojo_ops.functions import require_function
from torch_max_backend.mojo_ops.fused_convolution import makes_in_place
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Operand, Operation, Reduction, Reshape, Result, Value


def join_bias_sums(graph: TypedGraph, device: DeviceRef) -> None:
    """Puts one call in the place of a weight gradient and a sum of its dy.

    Args:
        graph: which is changed.
        device: that it computes on.
    """
    if not takes_part(device):
        return
    made: dict[Value, Value] = {}
    gone: set[Operation] = set()
    for total in list(graph.operations):
        if not isinstance(total, Reduction) or not _is_of_rows(total):
            continue
        product = next((each for each in _weight_gradients(total) if each not in gone), None)
        if product is None:
            continue
        dw, db = _call(graph, product, made)
        flat = graph.add(Reshape((db,), (total.results[0].like(),))).results[0]
        made.update({product.results[0]: dw, total.results[0]: flat})
        gone.update((product, total))
    if made:
        graph.settle(made, gone)


def _is_of_rows(total: Reduction) -> bool:
    """Whether a matrix of 16-bit floats is added up over its rows, to floats of the same kind."""
    (source,), (result,) = total.operands, total.results
    known = source.shape is not None and len(source.shape) == 2 and source.dtype in NARROW_FLOATS
    return known and total.kind == "add" and total.axis == 0 and result.dtype == source.dtype


def _weight_gradients(total: Reduction) -> Iterator[Call]:
    """The weight gradients that read what is added up as dy, and that the kernel computes with its sums."""
    source, depends = total.operands[0], Dependencies((), {})
    assert source.shape is not None
    for reader in readers_of(in_memory(source)):
        if not isinstance(reader, Call) or reader.kernel != "conv_wgrad" or not isinstance(reader.facts, Geometry):
            continue
        x, dy = reader.operands
        if x.shape is None or dy.shape is None or in_memory(dy) is not in_memory(source):
            continue
        same = dy.shape[4] == source.shape[1] and dy.size == source.size
        if (
            same
            and x.shape[1] == dy.shape[1] == 1
            and makes_in_place(dy.dtype, reader.facts, dy.shape)
            and not depends.waits([x], total)
        ):
            yield reader


def _call(graph: TypedGraph, product: Call, made: dict[Value, Value]) -> tuple[Value, Value]:
    """The weight gradient, and the bias gradient."""
    assert isinstance(product.facts, Geometry)
    x, dy = (made.get(each, each) for each in product.operands)
    (old,) = product.results
    assert old.shape is not None and x.shape is not None and dy.shape is not None
    function = wgrad_bias_function(dy.dtype)
    require_function(function)
    results = old.like(), old.like((dy.shape[4],))
    places: list[tuple[Operand | Result, tuple[int, ...]]] = []
    places += [(Result(number), each.shape or ()) for number, each in enumerate(results)]
    places += [(Operand(number), each.shape or ()) for number, each in enumerate((x, dy))]
    words = FAMILY[WGRAD_BIAS].words(product.facts.numbers(), places)
    call = Call((x, dy), results, function, tuple(words), WGRAD_BIAS, facts=product.facts, op=product.op)
    dw, db = graph.add(call).results
    return dw, db
