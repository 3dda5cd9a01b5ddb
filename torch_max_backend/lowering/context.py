"""The context of a lowering: facts about the node that it builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from max.dtype import DType
from max.graph import DeviceRef, Dim, SymbolicDim, TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import LOW_PRECISION, max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.torch_compat import FloorDiv


@dataclass(frozen=True)
class LoweringContext:
    """The node that is being lowered and the device it runs on."""

    node: Node
    device: DeviceRef

    @property
    def meta(self) -> Any:
        """The fake result(s) of the node: shapes, dtypes and strides that PyTorch promised."""
        return self.node.meta["val"]

    def arg_meta(self, index: int) -> Any:
        """The fake value of positional argument ``index`` (the argument itself when it is no node)."""
        arg = self.node.args[index]
        return arg.meta["val"] if isinstance(arg, Node) else arg

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the (first) result."""
        meta = self.meta
        return (meta[0] if isinstance(meta, (tuple, list)) else meta).dtype

    @property
    def max_dtype(self) -> DType:
        """The dtype of the (first) result, in MAX's words."""
        return max_dtype(self.dtype)

    @property
    def compute_dtype(self) -> DType:
        """The dtype to compute in: float32 for the narrow floats, else that of the result."""
        return DType.float32 if self.dtype in LOW_PRECISION else self.max_dtype

    def out_shape(self, index: int = 0) -> list[Dim]:
        """The logical shape of result ``index``."""
        meta = self.meta
        return self.dims((meta[index] if isinstance(meta, (tuple, list)) else meta).shape)

    def dim(self, size: int | torch.SymInt) -> Dim:
        """A size as MAX's dimension; a SymInt becomes a symbolic or algebraic one."""
        return max_dim(size)

    def dims(self, shape: Sequence[int | torch.SymInt]) -> list[Dim]:
        """Sizes as MAX's dimensions."""
        return [max_dim(size) for size in shape]

    def scalar(self, value: float | int | bool, dtype: DType) -> TensorValue:
        """A rank-0 constant on the node's device."""
        return scalar(value, dtype, self.device)

    def cast(self, value: TensorValue, dtype: DType) -> TensorValue:
        """``value`` in ``dtype``; itself where that is its dtype."""
        return value if value.dtype == dtype else ops.cast(value, dtype)


def scalar(value: float | int | bool, dtype: DType, device: DeviceRef) -> TensorValue:
    """A rank-0 constant."""
    return ops.constant(value, dtype, device)


def max_dim(size: int | torch.SymInt) -> Dim:
    """A PyTorch size, concrete or symbolic, as MAX's dimension."""
    if isinstance(size, int):
        return Dim(size)
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return dim_of(expr)
    raise CannotLower(f"{size!r} is not a size")


def dim_of(expr: sympy.Expr) -> Dim:
    """An expression over sizes as MAX's dimension."""
    if isinstance(expr, sympy.Integer):
        return Dim(int(expr))
    if isinstance(expr, sympy.Symbol):
        return SymbolicDim(expr.name)
    if isinstance(expr, sympy.Add):
        total = dim_of(expr.args[0])
        for term in expr.args[1:]:
            total = total + dim_of(term)
        return total
    if isinstance(expr, sympy.Mul):
        product = dim_of(expr.args[0])
        for factor in expr.args[1:]:
            product = product * dim_of(factor)
        return product
    if isinstance(expr, FloorDiv):
        return dim_of(expr.args[0]) // dim_of(expr.args[1])
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
        base = dim_of(expr.base)
        power = base
        for _ in range(int(expr.exp) - 1):
            power = power * base
        return power
    raise CannotLower(f"the size {expr} has no counterpart among MAX's dimensions")
