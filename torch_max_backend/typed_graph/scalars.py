"""The functions of pointwise operations: of which dtypes, and as Mojo writes them, over vectors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
from max.dtype import DType

_FLOATS = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
_WHOLE = frozenset({DType.int8, DType.int16, DType.int32, DType.int64, DType.uint8})
_WRITTEN_OUT = frozenset({0.0, 0.5, 1.0, 2.0})
NUMBERS = _FLOATS | _WHOLE
_BOOL = frozenset({DType.bool})
DTYPES = NUMBERS | _BOOL

#: Name, the dtypes of the operands, and the expression over them.
_EXPRESSIONS: dict[str, tuple[frozenset[DType], str]] = {
    "add": (NUMBERS, "{0} + {1}"),
    "sub": (NUMBERS, "{0} - {1}"),
    "mul": (NUMBERS, "{0} * {1}"),
    "div": (NUMBERS, "{0} / {1}"),
    "pow": (_WHOLE, "integer_power[DType.{result}, width]({0}, {1})"),
    "max": (NUMBERS, "max({0}, {1})"),
    "min": (NUMBERS, "min({0}, {1})"),
    "equal": (DTYPES, "{0}.eq({1})"),
    "not_equal": (DTYPES, "{0}.ne({1})"),
    "greater": (NUMBERS, "{0}.gt({1})"),
    "greater_equal": (NUMBERS, "{0}.ge({1})"),
    "and": (_BOOL, "{0} & {1}"),
    "or": (_BOOL, "{0} | {1}"),
    "xor": (_BOOL, "{0} ^ {1}"),
    "select": (DTYPES, "{0}.select({1}, {2})"),
    "not": (_BOOL, "~{0}"),
    "negative": (NUMBERS, "-{0}"),
    "abs": (NUMBERS, "abs({0})"),
    "floor": (_FLOATS, "floor({0})"),
    "trunc": (_FLOATS, "trunc({0})"),
    "round": (_FLOATS, "round({0})"),
    "exp": (_FLOATS, "exp({0})"),
    "log": (_FLOATS, "log({0})"),
    "log1p": (_FLOATS, "log1p({0})"),
    "tanh": (_FLOATS, "tanh({0})"),
    "erf": (_FLOATS, "erf({0})"),
    "sqrt": (_FLOATS, "sqrt({0})"),
    "rsqrt": (_FLOATS, "rsqrt({0})"),
    "sin": (_FLOATS, "sin({0})"),
    "cos": (_FLOATS, "cos({0})"),
    "is_nan": (_FLOATS, "isnan({0})"),
    "is_inf": (_FLOATS, "isinf({0})"),
}

FUNCTIONS = frozenset({*_EXPRESSIONS, "cast"})
"""Names, as MAX's graph has them without their dialect."""

_MATH = ("cos", "erf", "exp", "floor", "log", "log1p", "rsqrt", "sin", "sqrt", "tanh", "trunc")
IMPORTS = frozenset(
    {("std.math", name) for name in _MATH}
    | {("std.utils.numerics", name) for name in ("inf", "isinf", "isnan", "nan")}
    | {("common.arithmetic", "truncated_quotient")}
)
"""Imports of the expressions: modules and names."""
SELDOM = {"integer_power": "common.powers"}
"""Functions that few programs import, and their modules."""


def is_elementwise(name: str, operands: Sequence[DType], result: DType) -> bool:
    """Whether a program can compute the operation for these dtypes."""
    if not all(dtype in DTYPES for dtype in (*operands, result)):
        return False
    if name == "cast":
        return True
    return name in _EXPRESSIONS and all(
        dtype in _EXPRESSIONS[name][0] for dtype in (operands[1:] if name == "select" else operands)
    )


def expression(name: str, operands: Sequence[str], result: DType) -> str:
    """The operation over operands that are names of vectors."""
    if name == "cast":
        return f"{operands[0]}.cast[DType.{result.name}]()"
    if name == "div" and result in _WHOLE:
        return f"truncated_quotient[DType.{result.name}, width]({', '.join(operands)})"
    return _EXPRESSIONS[name][1].format(*operands, result=result.name)


def inside(masks: Sequence[str], values: Sequence[str], otherwise: str) -> str:
    """The first of the values whose mask holds; "" is a mask that always holds."""
    text = otherwise
    for mask, value in reversed(list(zip(masks, values, strict=True))):
        text = f"({mask}).select({value}, {text})" if mask else value
    return text


def is_written_out(value: np.generic, dtype: DType) -> bool:
    """Whether a program has the number in its text. Others are arguments, so that expressions that differ in a size, a
    probability or a learning rate share a program."""
    if dtype not in _FLOATS:
        return True
    number = abs(float(value))
    return number in _WRITTEN_OUT or not math.isfinite(number)


def word_of(value: np.generic, dtype: DType) -> int:
    """A number of a floating dtype as `ProgramOperands.number` in kernels/pointwise/program.mojo takes it: its bits."""
    number = float(value)
    if dtype == DType.float64:
        return int.from_bytes(struct.pack("<d", number), "little", signed=True)
    if dtype == DType.float16:
        return int(np.float16(number).view(np.uint16))
    bits = int(np.float32(number).view(np.uint32))
    return bits >> 16 if dtype == DType.bfloat16 else bits


def literal(value: np.generic, dtype: DType) -> str:
    """A vector of one number, exactly that."""
    kind = f"SIMD[DType.{dtype.name}, width]"
    if dtype in _FLOATS:
        number = float(value)
        if math.isnan(number):
            return f"{kind}(nan[DType.{dtype.name}]())"
        if math.isinf(number):
            return f"{kind}({'-' if number < 0 else ''}inf[DType.{dtype.name}]())"
        return f"{'-' if math.copysign(1, number) < 0 else ''}{kind}({abs(number)!r})"
    if dtype in _BOOL:
        return f"{kind}(fill={bool(value)})"
    return f"{kind}({int(value)})"
