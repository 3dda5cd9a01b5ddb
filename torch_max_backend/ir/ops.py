"""MAX's graph ops, as lowerings use them: arithmetic on numbers that are known now happens now.

What is left to MAX's own constant folding costs a compilation of its own, as long as the smallest
graph's. So the elementwise functions here compute constants with NumPy; everything else is ``max.graph.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, Dim, DimLike, Graph, StaticDim, TensorType, TensorValue
from max.graph import ops as _max

from torch_max_backend.ir.notes import key_of, notes
from torch_max_backend.max_compat import add_op, kgen, mo, owner_of, rmo

_HALVES = {DType.bfloat16: torch.bfloat16, DType.float16: torch.float16}
#: Larger constants are left to MAX, which keeps most of them as a formula.
MAX_ELEMENTS = 1 << 16


def constant(value: Any, dtype: DType | None = None, device: DeviceRef | None = None) -> TensorValue:
    """A constant of a number, an array or a tensor, whose values the functions here then know."""
    if isinstance(value, torch.Tensor):
        known = value.numpy() if value.dtype not in _HALVES.values() else value.float().numpy()
        result = _max.constant(value, device=device)
    elif dtype in _HALVES:
        # A literal would be truncated, and a cast of a constant is what this module avoids.
        return constant(torch.as_tensor(value, dtype=_HALVES[dtype]), device=device)
    else:
        known = np.asarray(value).astype(dtype.to_numpy() if dtype is not None else None)
        # A 0-d array would become a constant of shape [1].
        result = _max.constant(known if known.ndim else known.item(), dtype, device=device)
    if known.size <= MAX_ELEMENTS:
        notes().known[key_of(result)] = known
    return result


def _known(value: Any) -> np.ndarray | None:
    """The values of a constant; a half's as float32."""
    return notes().known.get(key_of(value)) if isinstance(value, TensorValue) else None


def _derive(view: TensorValue, value: np.ndarray) -> None:
    """Notes the values of a view of a constant."""
    notes().known[key_of(view)] = value
    notes().derived.add(key_of(view))


def _computed(value: Any) -> np.ndarray | None:
    """The values of a constant in a dtype that NumPy computes in."""
    return None if not isinstance(value, TensorValue) or value.dtype in _HALVES else _known(value)


def cast(x: TensorValue, dtype: DType) -> TensorValue:
    """``max.graph.ops.cast``."""
    value = _known(x)
    if value is None:
        return _max.cast(x, dtype)
    # What becomes of a float that no whole number equals is the target's matter.
    if value.dtype.kind == "f" and not dtype.is_float() and not np.isfinite(value).all():
        return _max.cast(x, dtype)
    with np.errstate(all="ignore"):
        return constant(value if dtype in _HALVES else value.astype(dtype.to_numpy()), dtype, x.device)


def reshape(x: TensorValue, shape: Sequence[DimLike]) -> TensorValue:
    """``max.graph.ops.reshape``; of a reshaped tensor with known extents it takes the first one: every op of a graph
    costs compile time, this one too."""
    origin = notes().reshaped.get(key_of(x), x)
    extents = [int(dim) for dim in shape if isinstance(dim, (int, StaticDim)) and int(dim) >= 0]
    known = len(extents) == len(shape) and all(isinstance(dim, StaticDim) for dim in origin.shape)
    if known and [int(dim) for dim in origin.shape] == extents:
        return origin
    result = _max.reshape(origin if known else x, shape)
    if known:
        notes().reshaped[key_of(result)] = origin
    value = _known(x)
    if value is not None and all(isinstance(dim, StaticDim) for dim in result.shape):
        _derive(result, value.reshape([int(dim) for dim in result.shape]))
    return result


def broadcast_to(x: TensorValue, shape: Sequence[DimLike]) -> TensorValue:
    """``max.graph.ops.broadcast_to``; an elementwise reader of a constant takes the number, see ``dense``."""
    result = _max.broadcast_to(x, shape)
    if result.rank == x.rank:
        notes().spread[key_of(result)] = x
    value = _known(x)
    if value is not None and all(isinstance(dim, StaticDim) for dim in result.shape):
        extents = [int(dim) for dim in result.shape]
        if math.prod(extents) <= MAX_ELEMENTS:
            _derive(result, np.broadcast_to(value, extents))
    return result


def before_broadcast(x: TensorValue) -> TensorValue:
    """The operand that ``broadcast_to`` spread to ``x`` without adding dimensions; else ``x``."""
    return notes().spread.get(key_of(x), x)


def slice_tensor(x: TensorValue, index: Sequence[slice]) -> TensorValue:
    """``max.graph.ops.slice_tensor`` by slices."""
    value = _known(x)
    bounds = [bound for part in index for bound in (part.start, part.stop, part.step)]
    if value is None or not all(bound is None or isinstance(bound, int) for bound in bounds):
        return _max.slice_tensor(x, list(index))
    return constant(np.ascontiguousarray(value[tuple(index)]), x.dtype, x.device)


def dense(x: TensorValue) -> TensorValue:
    """``x`` for a reader that needs it in memory: a known constant as one of its own, not as a broadcast or a view of
    another, which MAX would have to compile."""
    if key_of(x) not in notes().derived:
        return x
    value = _known(x)
    return constant(np.ascontiguousarray(value).reshape(value.shape), x.dtype, x.device)


def custom(name: str, device: DeviceRef, values: Sequence[TensorValue], *args: Any, **options: Any) -> list[Any]:
    """``max.graph.ops.custom``, whose operands lie in memory."""
    return _max.custom(name, device, [dense(value) for value in values], *args, **options)


def _now_or_later(name: str, function: Callable[..., Any]) -> Callable[..., TensorValue]:
    """MAX's op of that name, or ``function`` where every operand is known."""
    native = getattr(_max, name)

    def op(*operands: Any, **options: Any) -> TensorValue:
        values = [_computed(operand) for operand in operands]
        if options or not values or any(value is None for value in values):
            return native(*operands, **options)
        with np.errstate(all="ignore"):
            result = np.asarray(function(*values))
        return constant(result, DType.from_numpy(result.dtype), operands[0].device)

    op.__name__ = name
    op.__doc__ = f"``max.graph.ops.{name}``."
    return op


add = _now_or_later("add", np.add)
sub = _now_or_later("sub", np.subtract)
mul = _now_or_later("mul", np.multiply)
equal = _now_or_later("equal", np.equal)
greater = _now_or_later("greater", np.greater)
greater_equal = _now_or_later("greater_equal", np.greater_equal)
logical_and = _now_or_later("logical_and", np.logical_and)
logical_or = _now_or_later("logical_or", np.logical_or)
logical_xor = _now_or_later("logical_xor", np.logical_xor)
logical_not = _now_or_later("logical_not", np.logical_not)
is_nan = _now_or_later("is_nan", np.isnan)
is_inf = _now_or_later("is_inf", np.isinf)
abs = _now_or_later("abs", np.abs)
negate = _now_or_later("negate", np.negative)
floor = _now_or_later("floor", np.floor)
trunc = _now_or_later("trunc", np.trunc)
round = _now_or_later("round", np.round)
sqrt = _now_or_later("sqrt", np.sqrt)
log = _now_or_later("log", np.log)
where = _now_or_later("where", np.where)
min = _now_or_later("min", np.minimum)
max = _now_or_later("max", np.maximum)


def div(a: TensorValue, b: TensorValue) -> TensorValue:
    """``max.graph.ops.div``; of whole numbers that are known too, MAX's own."""
    x, y = _computed(a), _computed(b)
    if x is None or y is None or not a.dtype.is_float():
        return _max.div(a, b)
    with np.errstate(all="ignore"):
        return constant(np.divide(x, y), a.dtype, a.device)


def iota(size: Dim, device: DeviceRef) -> TensorValue:
    """0, 1, ... size - 1 in int64."""
    if isinstance(size, StaticDim):
        return constant(np.arange(int(size)), DType.int64, device)
    return _max.range(0, size, 1, out_dim=size, dtype=DType.int64, device=device)


def pad(x: TensorValue, paddings: Sequence[int], value: TensorValue) -> TensorValue:
    """``max.graph.ops.pad`` with a constant (a rank-0 value on the host), whose paddings are one constant, not a
    concatenation of many."""
    sizes = zip(x.shape, paddings[::2], paddings[1::2], strict=True)
    shape = [size + before + after for size, before, after in sizes]
    return add_op(
        Graph.current,
        rmo.MoPadConstantOp,
        result=TensorType(x.dtype, shape, x.device),
        input=x,
        paddings=_max.constant(np.array(paddings), DType.int64, device=DeviceRef.CPU()),
        constant=value,
        output_param_decls=kgen.ParamDeclArrayAttr([]),
    )[0].tensor


def __getattr__(name: str) -> Any:
    return getattr(_max, name)


#: Ops that hand on what they get, in another form.
_FORMS = (mo.CastOp, rmo.ReshapeOp, rmo.MoTransposeOp)


def comes_from_kernel(value: TensorValue) -> bool:
    """Whether the value, but for its form, is a result of a kernel of ours: MAX cannot know what it is.

    It does know that ``x * 0`` and ``x - x`` are zero.
    """
    maker = owner_of(value)
    while isinstance(maker, _FORMS):
        maker = next(iter(maker.operands)).value.owner
    return isinstance(maker, mo.CustomOp)
