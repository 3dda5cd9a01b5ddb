"""Convolutions that run a generated program over their result (kernels/convolution/{cpu,sm90}/fused_entries.mojo).

Which problems Hopper's kernels run so, and with which of their compiled forms, is the kernels' to decide when they are
called (``runs_fused`` in kernels/convolution/sm90/dispatch.mojo). What is fused while a graph is built follows the
forecast of it here; tests hold both together. A forecast that fails costs time, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from max.dtype import DType

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops.convolution import Geometry

FusedPass: TypeAlias = Literal["conv_fprop", "conv_dgrad"]
"""The passes whose results programs are run over, by the names of their entries."""

NARROW: int = 64
"""The columns of the tile for narrow results, which have so many channels at most: an entry's parameter."""
_ROOMS = (1, 8, 16)
"""The numbers of phases that Hopper's kernels are compiled for: 1 without strides, then FEW_PHASES and MAX_PHASES of
kernels/convolution/sm90/gemm.mojo."""
_HALVES = (DType.bfloat16, DType.float16)
_ROW_BYTES = 16
"""Rows of channels of a multiple of this are read as they lie in memory."""


@beartype
def phases_in_store(
    which: FusedPass,
    dtype: DType,
    geometry: Geometry,
    result: Sequence[int],
    a: Sequence[int],
    w: Sequence[int],
) -> int | None:
    """How many phases Hopper's kernel with a program in its store has to have room for.

    Args:
        which: the pass.
        dtype: of the operands and the result.
        geometry: of the convolution.
        result: the shape of y or dx, of rank 5.
        a: of x or dy.
        w: of the filter.

    Returns:
        None where no such kernel takes the convolution: it has groups, three axes, 32 or 64 bits, rows of channels that
        begin at odd addresses, or larger strides.
    """
    flat = result[1] == a[1] == w[1] == 1
    aligned = all(shape[4] * dtype.size_in_bytes % _ROW_BYTES == 0 for shape in (result, a))
    if dtype not in _HALVES or geometry.groups != 1 or not flat or not aligned:
        return None
    # A forward pass has one phase; with strides that are larger still it is rare.
    room = next((room for room in _ROOMS if geometry.phases <= room), None)
    return _ROOMS[0] if which == "conv_fprop" and room is not None else room
