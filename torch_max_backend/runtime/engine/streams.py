"""The order of MAX's queue and PyTorch's streams on one CUDA device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_max_backend.runtime.engine.session import max_device
from torch_max_backend.torch_compat import current_stream_handle


class StreamSync:
    """Orders MAX's work after what PyTorch has queued, and before what PyTorch queues later.

    The host waits for nothing. One event each way serves all tensors of a call.

    MAX's allocator reuses memory in the order of MAX's queue, as soon as the last tensor over it is deleted; work that
    reads it may still wait on the PyTorch stream that got the tensor. So MAX's queue waits for every stream
    on which it was called so far, not for the current one alone.

    Attributes:
        queue: MAX's.
        lock: held by the one caller; reentrant.
    """

    def __init__(self, device: torch.device) -> None:
        queue = max_device(device).default_queue
        self._device = device
        self._index = device.index or 0
        self.queue = torch.cuda.ExternalStream(queue.native_stream_handle, device=device)
        self._before = torch.cuda.Event()
        self._after = torch.cuda.Event()
        self._streams: dict[int, torch.cuda.Stream] = {}
        # The stream that waits for all that MAX's queue got so far, if it is one of those above.
        self._behind: int | None = None
        self.lock = threading.RLock()

    def synchronize(self) -> None:
        """Waits until the device has finished all queued work."""
        torch.cuda.synchronize(self._device)

    def give_back(self) -> None:
        """Waits as ``synchronize`` does, and returns the free memory of PyTorch's allocator to the device."""
        self.synchronize()
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """MAX's turn on the device: what is queued inside runs between what PyTorch's current stream has and gets."""
        handle = current_stream_handle(self._index)
        with self.lock:
            current = self._streams.get(handle)
            if current is None:
                current = torch.cuda.current_stream(self._device)
                # A stream that somebody else made (an even identifier, not 0) may be destroyed: it is not kept.
                if current.stream_id % 2 or not current.stream_id:
                    self._streams[handle] = current
                else:
                    self._before.record(current)
                    self.queue.wait_event(self._before)
            for stream in self._streams.values():
                self._before.record(stream)
                self.queue.wait_event(self._before)
            try:
                yield
            finally:
                # Also after an error: what was queued before it may still read the arguments.
                self._after.record(self.queue)
                current.wait_event(self._after)
                self._behind = handle if handle in self._streams else None

    @contextmanager
    def lane(self) -> Iterator[None]:
        """PyTorch's turn to queue work over memory that MAX's turns use, too.

        That needs no event while MAX was called on the current stream alone: it is behind MAX's queue already. Else the
        work goes to MAX's queue.
        """
        with self.lock:
            if len(self._streams) == 1 and self._behind == current_stream_handle(self._index):
                yield
                return
            with self.turn(), torch.cuda.stream(self.queue):
                yield


@functools.cache
def stream_sync(device: torch.device) -> StreamSync:
    """The order of ``device``, one for the process."""
    return StreamSync(device)
