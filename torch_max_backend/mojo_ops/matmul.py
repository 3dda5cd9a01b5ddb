"""Batched matrix products: C[b] = A[b] @ B[b] with A [M, K], B [K, N], C [M, N].

The kernels take a tensor's matrices as they lie: a batch of up to three extents, each with a stride, and strides of
rows and columns (``MatmulGeometry``). A lowering calls them with contiguous operands of rank 3 that may lie transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from max.dtype import DType
from max.graph import DeviceRef, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import MAX_FLOATS
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Cost, Family, Signature, Tensor, ints

BATCH_DIGITS = 3
"""Extents of a batch."""


Batch = tuple[int, int, int]

#: What the one entry takes is told by its first number.
_COST = Cost(1.5, 9.0)
STRIDED = Signature(
    "matmul",
    results=(Tensor("c", "dtype", None),),
    operands=(Tensor("a", "dtype", None), Tensor("b", "dtype", None)),
    numbers=ints(
        *("is_strided", "allow_tf32", "m", "n", "k", "batch0", "batch1", "batch2"),
        *(f"{x}_{what}" for x in "cab" for what in ("start", "batch0", "batch1", "batch2", "row", "column")),
    ),
    cost=_COST,
)
FAMILY = Family(
    "matmul",
    Signature(
        "matmul",
        results=(Tensor("c", "dtype", 3),),
        operands=(Tensor("a", "dtype", 3), Tensor("b", "dtype", 3)),
        numbers=ints("is_strided", "allow_tf32", "a_turned", "b_turned"),
        cost=_COST,
    ),
    STRIDED,
    first=1.0,
)


@beartype
@dataclass(frozen=True)
class MatrixStrides:
    """The layout of the matrices of one tensor.

    Attributes:
        batch: elements from one matrix to the next, for each extent of the batch; 0 where the tensor is broadcast.
        row: elements from one row to the next.
        column: and from one column to the next.
        start: elements before the first.
    """

    batch: Batch
    row: int
    column: int
    start: int = 0


@beartype
@dataclass(frozen=True)
class MatmulGeometry:
    """Sizes and strides of one call.

    Attributes:
        m: rows of A and C.
        n: columns of B and C.
        k: columns of A and rows of B.
        batch: extents of the batch, the last one counts fastest.
        c: the result.
        a: the first operand.
        b: the second one.
        allow_tf32: float32 factors may be rounded to 10 mantissa bits.

    Raises:
        ValueError: a value is negative.
    """

    m: int
    n: int
    k: int
    batch: Batch
    c: MatrixStrides
    a: MatrixStrides
    b: MatrixStrides
    allow_tf32: bool = field(default=False)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0")
        if min(self.batch) < 0:
            raise ValueError(f"batch = {self.batch}: every extent must be at least 0")
        for name in ("c", "a", "b"):
            each = getattr(self, name)
            if min(*each.batch, each.row, each.column, each.start) < 0:
                raise ValueError(f"{name} = {each}: no stride may be negative")

    def numbers(self) -> list[int]:
        """The numbers that a call of ``STRIDED`` takes."""
        tensors = (self.c, self.a, self.b)
        of_tensors = (value for each in tensors for value in (each.start, *each.batch, each.row, each.column))
        return [True, self.allow_tf32, self.m, self.n, self.k, *self.batch, *of_tensors]


@dataclass(frozen=True)
class ContiguousBatches(functions.Facts):
    """How the operands of a lowering's product lie, and what it may round.

    Attributes:
        a_turned: A's rows lie last.
        b_turned: B's rows lie last.
        allow_tf32: float32 factors may be rounded to 10 mantissa bits.
    """

    a_turned: bool
    b_turned: bool
    allow_tf32: bool


def matmul_function(device: DeviceRef, dtype: DType) -> functions.LibraryFunction:
    """The library function."""
    return functions.function_of(FAMILY, "matmul", functions.target_of(device), (dtype,))


@beartype
def matmul(
    a: TensorValue, b: TensorValue, *, a_turned: bool = False, b_turned: bool = False, allow_tf32: bool = False
) -> TensorValue:
    """The products [B, M, N] of two batches of matrices.

    Args:
        a: [B, M, K], or [B, K, M] if ``a_turned``.
        b: [B, K, N], or [B, N, K] if ``b_turned``.
        a_turned: A's rows lie last.
        b_turned: B's rows lie last.
        allow_tf32: float32 factors may be rounded to 10 mantissa bits.

    Raises:
        ValueError: ranks, dtypes, devices or known extents do not fit.
    """
    for name, value in (("a", a), ("b", b)):
        if value.rank != 3:
            raise ValueError(f"matmul: {name} has rank {value.rank}: must be 3")
        if value.dtype not in MAX_FLOATS:
            raise ValueError(
                f"matmul: {name} has dtype {value.dtype.name}: must be one of {[d.name for d in MAX_FLOATS]}"
            )
    if a.dtype != b.dtype:
        raise ValueError(f"matmul: b has dtype {b.dtype.name}: must be a's, {a.dtype.name}")
    if a.device != b.device:
        raise ValueError(f"matmul: b is on {b.device}: must be on a's device, {a.device}")
    m, k = (a.shape[2], a.shape[1]) if a_turned else (a.shape[1], a.shape[2])
    n, rows = (b.shape[1], b.shape[2]) if b_turned else (b.shape[2], b.shape[1])
    for what, first, second in (("batch", a.shape[0], b.shape[0]), ("K", k, rows)):
        if isinstance(first, StaticDim) and isinstance(second, StaticDim) and first != second:
            raise ValueError(f"matmul: {what} is {second} in b: must be a's, {first}")
    result = TensorType(a.dtype, [a.shape[0], m, n], a.device)
    function = matmul_function(a.device, a.dtype)
    facts = ContiguousBatches(a_turned, b_turned, allow_tf32)
    numbers = [False, allow_tf32, a_turned, b_turned]
    return functions.call(FAMILY["matmul"], function, [a, b], [result], numbers, facts=facts)[0]
