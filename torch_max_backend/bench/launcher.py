"""Calls of single library functions on PyTorch's tensors, as a launch list of one call makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import device_ref
from torch_max_backend.max_compat import device_context
from torch_max_backend.mojo_ops.functions import LibraryFunction, require, require_function
from torch_max_backend.runtime import libraries
from torch_max_backend.runtime.session import max_device
from torch_max_backend.runtime.streams import stream_order
from torch_max_backend.runtime.threads import team_start

Word = int | torch.Tensor | np.ndarray
"""Of a call: a number, or a tensor or an array whose address is handed over."""

_SCRATCH_BYTES = 512 * 2**20


@beartype
class Launcher:
    """Builds and loads library functions for one device and calls them.

    Args:
        functions: all that will be called.
        device: that they compute on.
    """

    def __init__(self, functions: Iterable[LibraryFunction], device: torch.device) -> None:
        self.device = device
        symbols = {function: require_function(function) for function in functions}
        walk = require("launches", "walk", device_ref(device), ())
        libraries.load(device)
        self._addresses = {function: libraries.address(symbol, device) for function, symbol in symbols.items()}
        self._walk = libraries.callable_at(libraries.address(walk, device))
        self._context = device_context(max_device(device))
        self._message = ctypes.create_string_buffer(libraries.MESSAGE_BYTES)
        self._scratch = torch.empty(_SCRATCH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def bind(self, function: LibraryFunction, *calls: Sequence[Word]) -> Callable[[], None]:
        """One call of ``function`` after the other, each with its words, whose tensors it keeps alive.

        On a GPU it queues the kernels, in order with PyTorch's current stream.
        It raises RuntimeError with the function's message if that refuses its operands.
        """
        address = self._addresses[function]
        code = np.array([word for words in calls for word in (address, len(words), *map(_number, words))], np.int64)
        threads = np.array([team_start() if self.device.type == "cpu" else 0, torch.get_num_threads(), 0], np.int64)
        needed = np.zeros(1, np.int64)
        nothing = (0, 0)
        scratch = self._scratch.data_ptr(), self._scratch.numel()
        arrays = [(array.ctypes.data, len(array)) for array in (code, needed, threads)]
        call = np.array([arrays[0], nothing, nothing, scratch, *arrays[1:]], np.int64)
        arguments = call.ctypes.data, self._context, ctypes.addressof(self._message)
        kept = calls, code, threads, needed, call

        def walk() -> None:
            assert kept
            if self._walk(*arguments):
                raise RuntimeError(self._message.value.decode())

        def launch() -> None:
            if self.device.type == "cuda":
                with stream_order(self.device).turn():
                    walk()
            else:
                walk()

        return launch


def _number(word: Word) -> int:
    if isinstance(word, torch.Tensor):
        return word.data_ptr()
    return word.ctypes.data if isinstance(word, np.ndarray) else int(word)
