"""Convolutions that run a generated program over their result (kernels/convolution/{cpu,sm90}/fused_entries.mojo).

Which problems Hopper's kernels run so, and with which of their compiled forms, is the kernels' to decide when they are
called (``runs_fused`` in kernels/convolution/sm90/dispatch.mojo). What is fused while a graph is built follows the
forecast of it here; tests hold both together. A forecast that fails costs time, nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from max.dtype import DType

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import NARROW_FLOATS
from torch_max_backend.mojo_ops.convolution import FAMILY, Geometry
from torch_max_backend.mojo_ops.normalization import FAMILY as NORMALIZATION
from torch_max_backend.mojo_ops.signatures import Number, Signature, addresses, ints

FusedPass: TypeAlias = Literal["conv_fprop", "conv_dgrad"]
"""The passes whose results programs are run over, by the names of their entries."""

NARROW: int = 64
"""The columns of the tile for narrow results, which have so many channels at most: an entry's parameter."""
_MAX_PHASES = (1, 8, 16)
"""The numbers of phases that Hopper's kernels are compiled for: 1 without strides, then FEW_PHASES and MAX_PHASES of
kernels/convolution/sm90/gemm.mojo."""
_SHARED_TAPS = 3
"""MOST_SHARED_TAPS of kernels/convolution/sm90/plan.mojo."""
_ROW_BYTES = 16
"""Rows of channels of a multiple of this are read as they lie in memory."""
_STAGE = 64
"""Reduction elements of a pipeline stage."""
_FEW_IN_BLOCK, _FEW_OF_THREE_AXES = 32, 32
"""As kernels/convolution/sm90/dispatch.mojo has them."""

READ_AHEAD: int = 2
"""SLOTS of kernels/convolution/sm90/beside.mojo, of which sums take one."""
_PASSES: dict[FusedPass, str] = {"conv_fprop": "FPROP", "conv_dgrad": "DGRAD"}
"""As kernels/convolution/passes.mojo names them."""
STORED_SUMS = {"batch_norm_statistics": "MOMENTS", "batch_norm_gradient_sums": "PRODUCTS"}
"""By the entry of a reduction that a convolution's store takes in, what the kernel adds up, as passes.mojo names it."""
NAMES = frozenset(("convolution.passes", name) for name in (*_PASSES.values(), *STORED_SUMS.values()))
"""What ``FusedKernel.parameters`` imports: module and name."""
_TENSORS, _AXES = ("result", "a", "w"), "ndhwc"


@dataclass(frozen=True)
class FusedKernel:
    """Which convolution a program gets the result of: parameters of the entries.

    Attributes:
        which: the pass.
        dtype: of the convolution's operands and result, and of the program's.
        plain: the symbol of the convolution's own library function, for what the kernel does not take.
        target: MAX's word for the kind of device; what follows is for Hopper alone.
        narrow: ``NARROW``, or 0 for any number of channels.
        taps: how many taps along W share what is copied.
        max_phases: of a data gradient that it computes.
        heavy: a vector of the program needs many registers.
        ahead: the numbers of the program's operands that are read before it runs, READ_AHEAD at most: they have the
            result's dtype, and lie as it does.
        sums: the entry of a reduction of what is stored, "" for none.
        plain_sums: the symbol of its library function.
        has_program: else what is stored is the convolution's result.
    """

    which: FusedPass
    dtype: DType
    plain: str
    target: Literal["cpu", "gpu"] = "gpu"
    narrow: int = 0
    taps: int = 1
    max_phases: int = 1
    heavy: bool = False
    ahead: tuple[int, ...] = ()
    sums: str = ""
    plain_sums: str = ""
    has_program: bool = True

    @property
    def entry(self) -> Literal["conv_pointwise", "conv_pointwise_sums"]:
        """The entry's name."""
        return "conv_pointwise_sums" if self.sums else "conv_pointwise"

    @property
    def parameters(self) -> str:
        """Mojo source: the entry's parameters behind the target."""
        dtype, plain = f"DType.{self.dtype.name}", f'"{self.plain}"'
        if self.target == "cpu":
            return f"{dtype}, {plain}"
        kind = f"{dtype}, {_PASSES[self.which]}, {self.narrow}, {self.taps}"
        kind += f", {self.max_phases}, {plain}, {self.heavy}"
        kind += f", {sum(1 << number for number in self.ahead)}"
        sums = f', {STORED_SUMS[self.sums]}, "{self.plain_sums}", {self.has_program}' if self.sums else ""
        return kind + sums

    def signature(self, inputs: int) -> Signature:
        """What a call takes, as `FusedCall` (kernels/convolution/fused.mojo) reads it.

        It has the numbers and shapes of the convolution, the numbers of the sums, and the program's loop nest. Results
        are those of the sums, then what is stored. Operands are the program's beside the convolution's result, what the
        sums read beside what is stored, and the convolution's.

        Args:
            inputs: how many operands the program has beside the convolution's result.
        """
        own, sums = FAMILY[self.which], NORMALIZATION[self.sums] if self.sums else None
        made, beside = (sums.results, sums.operands[1:]) if sums else ((), ())
        read = (*addresses("input", inputs), *beside, *own.operands)
        return Signature(
            self.entry,
            results=tuple(tensor.bare for tensor in (*made, *own.results)),
            operands=tuple(tensor.bare for tensor in read),
            numbers={**own.numbers, **_SHAPES, **(sums.numbers if sums else {})},
            listed="loop_nest",
            after=own.after,
        )

    def numbers(
        self, own: Sequence[int], shapes: Sequence[Sequence[int]], sums: Sequence[int], loop_nest: Sequence[int]
    ) -> list[Number]:
        """What ``signature`` has for numbers.

        Args:
            own: the words of the numbers of the convolution's own call.
            shapes: of result, a and w.
            sums: the words of the numbers of the sums' own call.
            loop_nest: extents, strides and starts of the program.
        """
        convolution = FAMILY[self.which].named(own)
        statistics = NORMALIZATION[self.sums].named(sums) if self.sums else {}
        return [*convolution.values(), *itertools.chain(*shapes), *statistics.values(), *loop_nest]


_SHAPES = ints(*(f"{tensor}_{axis}" for tensor, axis in itertools.product(_TENSORS, _AXES)))


def shapes(named: Mapping[str, Any]) -> list[list[int]]:
    """The shapes of result, a and w, of rank 5, in the numbers of a call of ``FusedKernel.signature``."""
    return [[named[f"{tensor}_{axis}"] for axis in _AXES] for tensor in _TENSORS]


@beartype
def makes_in_place(dtype: DType, geometry: Geometry, result: Sequence[int]) -> bool:
    """Whether Hopper's implicit matrix products write a result, or read a gradient, as it lies: of 16 bits, one group,
    and rows of channels that are whole numbers of 16 bytes. What else they read they may copy first.

    Args:
        dtype: of all tensors.
        geometry: of the convolution.
        result: the shape of the activation, of rank 5.
    """
    whole = result[4] * dtype.size_in_bytes % _ROW_BYTES == 0
    return dtype in NARROW_FLOATS and geometry.groups == 1 and whole


@beartype
def phases_in_store(
    which: FusedPass,
    dtype: DType,
    geometry: Geometry,
    result: Sequence[int],
    a: Sequence[int],
    w: Sequence[int],
) -> int | None:
    """The number of phases for which Hopper's kernel with a program in its store is compiled.

    Args:
        which: the pass.
        dtype: of the operands and the result.
        geometry: of the convolution.
        result: the shape of y or dx, of rank 5.
        a: of x or dy.
        w: of the filter.

    Returns:
        None where no such kernel takes the convolution: it has groups, 32 or 64 bits, a result whose rows of channels
        begin at odd addresses, or larger strides, or another kernel is much faster.
    """
    if not makes_in_place(dtype, geometry, result):
        return None
    deep = result[1] != 1 or a[1] != 1 or w[1] != 1 or geometry.padding[0] != 0
    if deep and max(result[4], a[4]) <= _FEW_OF_THREE_AXES:
        return None
    # A forward pass has one phase; with strides that are larger still it is rare.
    phases = math.prod(geometry.stride if deep else geometry.stride[1:])
    most = next((most for most in _MAX_PHASES if phases <= most), None)
    if which == "conv_fprop":
        return None if most is None else _MAX_PHASES[0]
    if not makes_in_place(dtype, geometry, a):
        return None
    return None if _is_exchanged_with_few(geometry, result, a, w) else most


def _is_exchanged_with_few(geometry: Geometry, dx: Sequence[int], dy: Sequence[int], w: Sequence[int]) -> bool:
    """As in kernels/convolution/sm90/dispatch.mojo."""
    axes = zip(geometry.padding, geometry.dilation, w[1:4], strict=True)
    can_exchange = max(geometry.stride) == 1 and all(pad <= (taps - 1) * step for pad, step, taps in axes)
    folds = _folds(w[3], dy[4])
    makes_blocks = dx[4] < _FEW_IN_BLOCK and dx[3] % 2 == 0
    return w[3] > 1 and geometry.dilation[2] == 1 and can_exchange and (folds or makes_blocks)


@beartype
def narrow_columns(
    which: FusedPass, geometry: Geometry, result: Sequence[int], a: Sequence[int], w: Sequence[int]
) -> int:
    """The entries' parameter ``narrow`` for a convolution that ``phases_in_store`` has: ``NARROW`` or 0.

    Arguments are as there. An image's few channels are taken in blocks of pixels, which fill the wide tile
    (kernels/convolution/sm90/aligned.mojo).
    """
    folds = which == "conv_fprop" and geometry.dilation[2] == 1 and w[3] > 1 and _folds(w[3], a[4])
    return NARROW if result[4] <= NARROW and not folds else 0


@beartype
def shared_taps(geometry: Geometry, a: Sequence[int], w: Sequence[int]) -> int:
    """The entries' parameter ``taps`` for a convolution with a narrow result: the taps along W that copies serve, or 1.

    Arguments are as in ``phases_in_store``. Few channels are taken in blocks of pixels.
    """
    alike = geometry.stride == (1, 1, 1) and geometry.dilation[2] == 1
    return _SHARED_TAPS if alike and w[3] == _SHARED_TAPS and a[4] > _FEW_IN_BLOCK else 1


def _folds(taps: int, channels: int) -> bool:
    """Whether a row of taps is taken as channels (kernels/convolution/sm90/aligned.mojo)."""
    stages = 2 if 4 * channels <= _STAGE else 1
    return taps * channels <= stages * _STAGE and 2 * channels <= _STAGE
