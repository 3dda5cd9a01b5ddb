"""Calls of single library functions on PyTorch's tensors, as a launch list of one call makes them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from benchmarks.kernels.written import WrittenFunction
from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import device_ref
from torch_max_backend.max_compat import device_context
from torch_max_backend.mojo_ops.functions import LibraryFunction, require_entry, require_function
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine.session import max_device
from torch_max_backend.runtime.engine.streams import stream_sync
from torch_max_backend.runtime.launching.threads import team_start
from torch_max_backend.torch_compat import current_stream_handle

Word = int | torch.Tensor | np.ndarray
"""A word of a call: a number, or a tensor or an array whose address is passed."""
Callee = LibraryFunction | WrittenFunction

_SCRATCH_BYTES = 512 * 2**20
_FIRST_WORD = 3
"""Of a call, behind the function's address, that of a record of indices outside (none here) and the number of words."""


@beartype
class Launcher:
    """Builds and loads library functions for one device and calls them.

    On a GPU a call queues kernels, in order with PyTorch's current stream.
    A call raises RuntimeError with the function's message if the function refuses its operands.

    Args:
        functions: all that will be called.
        device: that they compute on.
    """

    def __init__(self, functions: Iterable[Callee], device: torch.device) -> None:
        self.device = device
        symbols = {function: require_function(function) for function in functions}
        walk = require_entry("runner", "walk", device_ref(device), ())
        libraries.load(device)
        self._addresses = {function: libraries.address(symbol, device) for function, symbol in symbols.items()}
        self._walk = libraries.callable_at(libraries.address(walk, device))
        self._context = device_context(max_device(device))
        self._message = ctypes.create_string_buffer(libraries.MESSAGE_BYTES)
        self._scratch = torch.empty(_SCRATCH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def bind(self, function: Callee, *calls: Sequence[Word]) -> Callable[[], None]:
        """One call of ``function`` after the other, each with its words, whose tensors it keeps alive."""
        launch = self._bind(self._code(function, calls))

        def run() -> None:
            assert calls
            launch()

        return run

    def bind_result(
        self, function: Callee, place: int, shape: Sequence[int], dtype: torch.dtype, words: Sequence[Word]
    ) -> Callable[[], torch.Tensor]:
        """A call that returns a new tensor, allocated each time, as an operator's result is: its address stands at a
        ``place`` among ``words``."""
        code = self._code(function, [words])
        launch = self._bind(code)

        def run() -> torch.Tensor:
            assert words
            result = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            code[_FIRST_WORD + place] = result.data_ptr()
            launch()
            return result

        return run

    def _code(self, function: Callee, calls: Iterable[Sequence[Word]]) -> np.ndarray:
        address = self._addresses[function]
        return np.array([word for words in calls for word in (address, 0, len(words), *map(_number, words))], np.int64)

    def _bind(self, code: np.ndarray) -> Callable[[], None]:
        start = team_start() if self.device.type == "cpu" else 0
        host = np.array([start, torch.get_num_threads(), libraries.loader(self.device), 0], np.int64)
        needed = np.zeros(1, np.int64)
        nothing = (0, 0)
        scratch = self._scratch.data_ptr(), self._scratch.numel()
        arrays = [(array.ctypes.data, len(array)) for array in (code, needed, host)]
        call = np.array([arrays[0], nothing, nothing, scratch, *arrays[1:]], np.int64)
        arguments = call.ctypes.data, self._context, ctypes.addressof(self._message)
        kept = code, host, needed, call
        queue = stream_sync(self.device).queue.cuda_stream if self.device.type == "cuda" else None

        def launch() -> None:
            assert kept
            apart = queue is not None and queue != current_stream_handle(self.device.index or 0)
            with stream_sync(self.device).turn() if apart else contextlib.nullcontext():
                if self._walk(*arguments):
                    raise RuntimeError(self._message.value.decode())

        return launch


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Makes MAX's stream PyTorch's current one, so that both runtimes' work is ordered and timed on one stream."""
    if device.type != "cuda":
        yield
        return
    stream = stream_sync(device).queue
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _number(word: Word) -> int:
    if isinstance(word, torch.Tensor):
        return word.data_ptr()
    return word.ctypes.data if isinstance(word, np.ndarray) else int(word)
