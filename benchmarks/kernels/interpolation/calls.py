"""Calls of interpolation's library function on PyTorch's tensors, as a launch list of one call makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.kernels.launcher import Callee, Launcher
from benchmarks.kernels.library import words_of
from benchmarks.kernels.written import WrittenFunction
from torch_max_backend.dtypes import TORCH_TO_MAX, device_ref
from torch_max_backend.mojo_ops.functions import target_of
from torch_max_backend.mojo_ops.interpolation import FAMILY, interpolation_function, tables_of
from torch_max_backend.problems.interpolation import Axes

_BY_LANES = "benchmarks/kernels/interpolation/by_lanes.mojo"


class Calls:
    """The library functions of one device, built and loaded.

    ``walked`` has a CPU run the kernels of a GPU, lane by lane.
    """

    def __init__(self, device: torch.device, dtypes: Sequence[torch.dtype], *, walked: bool = False) -> None:
        target = target_of(device_ref(device))
        functions: dict[torch.dtype, Callee] = {}
        for dtype in dtypes:
            known = TORCH_TO_MAX[dtype]
            functions[dtype] = (
                WrittenFunction(_BY_LANES, "interpolate_by_lanes", target, (known,))
                if walked
                else interpolation_function(target, known)
            )
        self.device = device
        self._functions = functions
        self._launcher = Launcher(functions.values(), device)

    def bind(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, *, gradient: bool) -> Callable[[], None]:
        """A call that fills ``y`` from ``x``; both contiguous, [N, D, H, W, C].

        Raises:
            RuntimeError: from the call, for operands that do not fit.
        """
        tables, spans = tables_of(axes, TORCH_TO_MAX[x.dtype], gradient=gradient)
        given = [y, x, *(torch.from_numpy(table).to(self.device) for table in tables)]
        return self._launcher.bind(self._functions[x.dtype], words_of(FAMILY["interpolate"], *given, numbers=spans))
