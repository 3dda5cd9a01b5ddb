"""Matrix products with strided operands and results.

A lowering multiplies contiguous batches. Views between a batch and a value in memory (a transpose, one head of many, a
broadcast, a merged batch) form an index map. If its digits are those of a batch, rows and columns, the kernel takes
them as strides, and nothing is copied. A result whose only reader reorders it is stored in the reader's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from max.graph import DeviceRef

from torch_max_backend.fusion import index_map
from torch_max_backend.fusion.index_map import IndexMap
from torch_max_backend.fusion.terms import is_fusible, is_view, moved_map
from torch_max_backend.mojo_ops.functions import require_function
from torch_max_backend.mojo_ops.matmul import (
    BATCH_DIGITS,
    STRIDED,
    ContiguousBatches,
    MatmulGeometry,
    MatrixStrides,
    matmul_function,
)
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Transpose, Value, words_of

Digits = list[tuple[int, int]]
"""Extents and strides, the highest first."""
Shared = list[tuple[int, tuple[int, ...]]]
"""Extents that several tensors share, with each one's stride."""


def strided_products(graph: TypedGraph, device: DeviceRef) -> None:
    """Puts strided calls in the place of products of known sizes.

    Args:
        graph: which is changed.
        device: that it computes on.
    """
    kept = set(graph.results)
    made: dict[Value, Value] = {}
    gone: set[Call] = set()
    for call in list(graph.operations):
        if not isinstance(call, Call) or not isinstance(call.facts, ContiguousBatches):
            continue
        found = _placed(call, call.facts, kept, made)
        if found is None:
            continue
        geometry, a, b, stored = found
        function = matmul_function(device, stored.dtype)
        require_function(function)
        words = words_of(STRIDED, geometry.numbers())
        result = stored.like()
        graph.add(Call((made.get(a, a), made.get(b, b)), (result,), function, words, STRIDED.name))
        made[stored] = result
        gone.add(call)
    graph.settle(made, gone)


def _placed(
    call: Call, facts: ContiguousBatches, kept: Collection[Value], made: Collection[Value]
) -> tuple[MatmulGeometry, Value, Value, Value] | None:
    """The geometry of a product, what A and B lie in, and the value that is stored: as few copies as possible."""
    (result,), (a, b) = call.results, call.operands
    if result.shape is None or a.shape is None or b.shape is None:
        return None
    ways = [stores_of(result, kept), sources_of(a, made), sources_of(b, made)]
    # The deepest first; what does not fit is copied, as it would have been.
    for (stored, to), (a_home, a_map), (b_home, b_map) in itertools.product(*(each[::-1] for each in ways)):
        geometry = _geometry((result.shape, a.shape, b.shape), (to, a_map, b_map), facts)
        if geometry is not None:
            return geometry, a_home, b_home, stored
    raise AssertionError(f"contiguous operands fit: {call}")


def sources_of(value: Value, made: Collection[Value] = ()) -> list[tuple[Value, IndexMap]]:
    """Values that the operand may be read from, with the map from its own count; first the operand itself."""
    at = index_map.identity(value.size)
    found = [(value, at)]
    while value not in made:
        maker = value.maker
        if is_view(maker):
            assert maker is not None
            value = maker.operands[0]
            found[-1] = value, at
            continue
        own = moved_map(maker) if maker is not None and is_fusible(maker) else None
        through = at.then(own) if own is not None else None
        if maker is None or through is None:
            break
        value, at = maker.operands[0], through
        found.append((value, at))
    return found


def stores_of(value: Value, kept: Collection[Value]) -> list[tuple[Value, IndexMap]]:
    """Values that may be stored in the result's place, with the map from the result's count to them: first the result
    itself, then what views and transposes that alone read it make of it."""
    at = index_map.identity(value.size)
    found = [(value, at)]
    while value not in kept and len(value.readers) == 1:
        (reader,) = value.readers
        through: IndexMap | None = at
        if not is_view(reader):
            own = moved_map(reader) if isinstance(reader, Transpose) and is_fusible(reader) else None
            inverse = _inverse(own) if own is not None else None
            through = at.then(inverse) if inverse is not None else None
        if through is None:
            break
        value, at = reader.results[0], through
        found.append((value, at))
    return found


def _inverse(one_to_one: IndexMap) -> IndexMap | None:
    """The map back, of one that reads every element once."""
    steps: list[tuple[int, int, int]] = []
    step = 1
    for extent, stride in reversed(one_to_one.digits):
        steps.append((stride, extent, step))
        step *= extent
    digits = [(extent, step) for _, extent, step in sorted(steps, reverse=True)]
    return index_map.from_digits(digits)


def _geometry(
    shapes: tuple[Sequence[int], ...],
    maps: tuple[IndexMap, IndexMap, IndexMap],
    facts: ContiguousBatches,
) -> MatmulGeometry | None:
    """The call whose tensors lie so; None where strides cannot say it."""
    parts = [digits_by_extent(each.digits, shape) for each, shape in zip(maps, shapes, strict=True)]
    if any(part is None for part in parts):
        return None
    (c_batch, c_rows, c_columns), (a_batch, *a_inner), (b_batch, *b_inner) = [part or [] for part in parts]
    a_rows, a_depth = a_inner[::-1] if facts.a_turned else a_inner
    b_depth, b_columns = b_inner[::-1] if facts.b_turned else b_inner
    batch, rows = _together(c_batch, a_batch, b_batch), _together(c_rows, a_rows)
    columns, depth = _together(c_columns, b_columns), _together(a_depth, b_depth)
    if batch is None or rows is None or columns is None or depth is None or len(depth) > 1:
        return None
    # Rows that no one stride counts are further matrices, all times the same B; columns likewise.
    outer = [(extent, (c, a, 0)) for extent, (c, a) in rows[:-1]]
    outer += [(extent, (c, 0, b)) for extent, (c, b) in columns[:-1]]
    m, (c_row, a_row) = rows[-1] if rows else (1, (1, 1))
    n, (c_column, b_column) = columns[-1] if columns else (1, (1, 1))
    k, (a_column, b_row) = depth[0] if depth else (1, (1, 1))
    whole = [*batch, *outer]
    if len(whole) > BATCH_DIGITS:
        return None
    whole = [(1, (0, 0, 0))] * (BATCH_DIGITS - len(whole)) + whole
    extents = (whole[0][0], whole[1][0], whole[2][0])
    c_steps, a_steps, b_steps = ((whole[0][1][i], whole[1][1][i], whole[2][1][i]) for i in range(3))
    return MatmulGeometry(
        m, n, k, extents,
        c=MatrixStrides(c_steps, c_row, c_column, maps[0].start),
        a=MatrixStrides(a_steps, a_row, a_column, maps[1].start),
        b=MatrixStrides(b_steps, b_row, b_column, maps[2].start),
        allow_tf32=facts.allow_tf32,
    )  # fmt: skip


def digits_by_extent(digits: Sequence[tuple[int, ...]], shape: Sequence[int]) -> list[Digits] | None:
    """The digits of each extent; None where one digit counts across two of them, or reads what is not there."""
    if any(len(digit) > 2 for digit in digits):
        return None
    left = [(digit[0], digit[1]) for digit in digits]
    parts: list[Digits] = []
    for extent in reversed(shape):
        part: Digits = []
        missing = extent
        while missing > 1:
            own, stride = left.pop()
            if own <= missing:
                if missing % own:
                    return None
                part.append((own, stride))
                missing //= own
            else:
                if own % missing:
                    return None
                part.append((missing, stride))
                left.append((own // missing, stride * missing))
                missing = 1
        parts.append(part[::-1])
    return parts[::-1]


def _together(*each: Digits) -> Shared | None:
    """Digits that several tensors share; neighbours that count on in all of them are one."""
    left = [list(digits) for digits in each]
    found: Shared = []
    while all(left):
        tops = [digits.pop() for digits in left]
        extent = min(own for own, _ in tops)
        for digits, (own, stride) in zip(left, tops, strict=True):
            if own % extent:
                return None
            if own > extent:
                digits.append((own // extent, stride * extent))
        strides = tuple(stride for _, stride in tops)
        if found and all(high == found[0][0] * low for high, low in zip(strides, found[0][1], strict=True)):
            found[0] = (found[0][0] * extent, found[0][1])
        else:
            found.insert(0, (extent, strides))
    return found
