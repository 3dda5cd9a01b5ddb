"""Shared by checks and timings of library functions: tensors as kernels take them, results between guards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch

from benchmarks.kernels.launcher import Launcher, Word
from torch_max_backend.dtypes import device_ref
from torch_max_backend.mojo_ops.functions import LibraryFunction, target_of
from torch_max_backend.mojo_ops.signatures import Family, Number, Signature

LAYOUTS = ("contiguous", "channels_last")
_GUARD = 64
_GUARDED = 123


def memory_format(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy in PyTorch's memory format of that name; there is none for one axis."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if layout == "channels_last" and x.dim() > 3 else x.contiguous()


def shown(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor [N, C, spatial...] as the kernels take it: [N, D, H, W, C], or [N * C, D, H, W, 1] where it is
    contiguous; copied into the layout."""
    spatial = (*[1] * (5 - x.dim()), *x.shape[2:])
    if layout == "contiguous":
        return x.contiguous().reshape(x.shape[0] * x.shape[1], *spatial, 1)
    return x.movedim(1, -1).contiguous().reshape(len(x), *spatial, x.shape[1])


def words_of(signature: Signature, *tensors: torch.Tensor, numbers: Sequence[Number] = ()) -> Sequence[Word]:
    """The words of a call, of its results and operands in their order."""
    return signature.words(numbers, [(each, each.shape) for each in tensors])


class LibraryCalls(ABC):
    """Calls of a family's library functions on one device, built and loaded.

    Args:
        device: that they compute on.
        dtypes: that they are made for.

    Attributes:
        device: as given.
        target: MAX's word for its kind.
    """

    family: ClassVar[Family]

    def __init__(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self.device, self.target = device, target_of(device_ref(device))
        self._launcher = Launcher(self.functions(dtypes), device)

    @abstractmethod
    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterable[LibraryFunction]:
        """All that are called."""

    def bind(
        self, function: LibraryFunction, *tensors: torch.Tensor, numbers: Sequence[Number] = ()
    ) -> Callable[[], None]:
        """A call on its results and operands, in their order, and numbers."""
        return self._launcher.bind(function, words_of(self.family[function.entry], *tensors, numbers=numbers))


class Guarded:
    """A result that holds NaN, or the greatest number, until a kernel writes it, between elements that nothing may
    overwrite.

    It begins where kernels' vectors do, as an allocator's tensors.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = torch.Size(shape).numel()
        self._memory = torch.full((size + 2 * _GUARD,), _GUARDED, dtype=dtype, device=device)
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        self.tensor = self._memory[_GUARD : _GUARD + size].view(shape).fill_(poison)

    def is_intact(self) -> bool:
        """Whether the elements around the result are as they were."""
        return bool((self._memory[:_GUARD] == _GUARDED).all() and (self._memory[-_GUARD:] == _GUARDED).all())


def excess(result: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """What is further from ``wanted`` than ``allowed``, in words; None if nothing is. NaN is equal to NaN."""
    off = (result.cpu().double() - wanted).abs()
    fine = (off <= allowed) | (result.cpu().isnan() & wanted.isnan())
    if fine.all():
        return None
    share = (off / allowed).nan_to_num(float("inf"))[~fine]
    return f"{int((~fine).sum())} of {off.numel()} elements, up to {share.max().item():.3g} times too far off"
