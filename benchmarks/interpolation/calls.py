"""Calls of interpolation's library function on PyTorch's tensors, as a launch list of one call makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from max.graph import DeviceRef

from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.interpolation_problem import Axes
from torch_max_backend.max_compat import device_context
from torch_max_backend.mojo_ops.functions import require, require_function, target_of
from torch_max_backend.mojo_ops.interpolation import interpolation_function, table_operands
from torch_max_backend.runtime import libraries
from torch_max_backend.runtime.session import max_device
from torch_max_backend.runtime.streams import stream_order
from torch_max_backend.runtime.threads import team_start

LAYOUTS = ("contiguous", "channels_last")


def shown(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor [N, C, spatial...] as the kernels take it: [N, D, H, W, C], or [N * C, D, H, W, 1] where it is
    contiguous; copied into the layout."""
    spatial = (*[1] * (5 - x.dim()), *x.shape[2:])
    if layout == "contiguous":
        return x.contiguous().reshape(-1, *spatial, 1)
    return x.movedim(1, -1).contiguous().reshape(len(x), *spatial, x.shape[1])


def taken(y: torch.Tensor, shape: Sequence[int], layout: str) -> torch.Tensor:
    """The inverse of ``shown``, a view."""
    if layout == "contiguous":
        return y.reshape(shape)
    return y.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


class Calls:
    """The library functions of one device, built and loaded.

    ``walked`` has a CPU run the kernels of a GPU, lane by lane.

    On a GPU they queue their kernels behind each other on MAX's queue; whoever calls them orders PyTorch's streams.
    """

    def __init__(self, device: torch.device, dtypes: Sequence[torch.dtype], *, walked: bool = False) -> None:
        ref = DeviceRef.GPU(device.index or 0) if device.type == "cuda" else DeviceRef.CPU()
        functions = {dtype: interpolation_function(target_of(ref), TORCH_TO_MAX[dtype]) for dtype in dtypes}
        if walked:
            functions = {
                dtype: replace(each, entry="interpolate_by_lanes", folder="gpu", module="walk_entries")
                for dtype, each in functions.items()
            }
        symbols = {dtype: require_function(each) for dtype, each in functions.items()}
        walk = require("launches", "walk", ref, ())
        libraries.load(device)
        self.device = device
        self._functions = {dtype: libraries.address(symbol, device) for dtype, symbol in symbols.items()}
        self._walk = libraries.callable_at(libraries.address(walk, device))
        self._context = device_context(max_device(device))
        self._message = ctypes.create_string_buffer(libraries.MESSAGE_BYTES)

    def synchronize(self) -> None:
        """Waits for what the calls have queued."""
        if self.device.type == "cuda":
            stream_order(self.device).synchronize()

    def bind(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, *, gradient: bool) -> Callable[[], torch.Tensor]:
        """A call that fills ``y`` from ``x`` and returns it; both contiguous, [N, D, H, W, C].

        Raises:
            RuntimeError: from the call, for operands that do not fit.
        """
        *tables, spans = table_operands(axes, TORCH_TO_MAX[x.dtype], gradient=gradient)
        operands = [y, x, *(torch.from_numpy(table).to(self.device) for table in tables), torch.from_numpy(spans)]
        words = [word for each in operands for word in (each.data_ptr(), *each.shape)]
        code = np.array([self._functions[x.dtype], len(words), *words], np.int64)
        needed = np.zeros(1, np.int64)
        start = team_start() if self.device.type == "cpu" else 0
        host = np.array([start, torch.get_num_threads(), 0], np.int64)
        nothing = (0, 0)
        arrays = [(array.ctypes.data, len(array)) for array in (code, needed, host)]
        call = np.array([arrays[0], nothing, nothing, nothing, *arrays[1:]], np.int64)
        arguments = call.ctypes.data, self._context, ctypes.addressof(self._message)
        kept = operands, code, needed, host, call

        def run() -> torch.Tensor:
            assert kept
            if self._walk(*arguments):
                raise RuntimeError(self._message.value.decode())
            return y

        return run
