"""Raises errors for indices outside their dimensions, which kernels report (kernels/common/bounds.mojo).

A GPU's kernels write into pinned memory of the host. Looking at it costs a call one load: nothing is waited for, so the
call that raises is the first one after the kernel has run. Device graphs write there, too: a record never moves.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
from dataclasses import dataclass

import numpy as np
import torch
from max.driver import is_virtual_device_mode

from torch_max_backend.errors import IndexOutsideError
from torch_max_backend.launch_list import Indexing, Launch

log = logging.getLogger("torch_max_backend")

_RECORD_WORDS = 2
"""The size of the dimension plus one, or 0 without a report, and the index."""
_BLOCK_WORDS = 1024


class _Word:
    """One word of memory that others write to."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._content = ctypes.c_int64.from_address(address)

    def __bool__(self) -> bool:
        return bool(self._content)

    def clear(self) -> None:
        """Sets it to 0."""
        self._content.value = 0


@dataclass(frozen=True)
class _Record:
    """The record that one launch reports to.

    Attributes:
        words: the record.
        launch: whose it is.
    """

    words: np.ndarray
    launch: Launch


class Reports:
    """The records of all launches of the process on one kind of device.

    Records are never given back: a kernel that is queued may still write to one whose list is gone. A list takes a few
    words.

    Args:
        pinned: whether a GPU writes to them.

    Attributes:
        found: not 0 where there is a report.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._records: list[_Record] = []
        self._block = self._fresh()
        self._used = 1
        self.found = _Word(self._block.ctypes.data)
        self._lock = threading.Lock()

    def _fresh(self) -> np.ndarray:
        return torch.zeros(_BLOCK_WORDS, dtype=torch.int64, device="cpu", pin_memory=self._pinned).numpy()

    def record(self, launch: Launch) -> int:
        """The address of a record for this launch."""
        with self._lock:
            if self._used + _RECORD_WORDS > _BLOCK_WORDS:
                self._block, self._used = self._fresh(), 0
            words = self._block[self._used : self._used + _RECORD_WORDS]
            self._used += _RECORD_WORDS
            self._records.append(_Record(words, launch))
            return words.ctypes.data

    def raise_found(self, device: torch.device) -> None:
        """Raises IndexOutsideError where a kernel on a GPU has reported; then all reports are dropped."""
        if self._pinned and self.found:
            self.wait(device)

    def wait(self, device: torch.device) -> None:
        """As ``raise_found``, after waiting for all work that is queued on the device."""
        if torch.cuda.is_current_stream_capturing():
            # Nothing may be waited for: a later call will find it.
            return
        torch.cuda.synchronize(device)
        error = self.taken()
        if error is not None:
            raise error

    def taken(self) -> IndexOutsideError | None:
        """The error of the first launch in its list that has reported; all reports are dropped."""
        if not self.found:
            return None
        with self._lock:
            self.found.clear()
            found = [_error(record) for record in self._records if record.words[0]]
            for record in self._records:
                record.words[:] = 0
            return found[0] if found else None


def _error(record: _Record) -> IndexOutsideError:
    size, index = int(record.words[0]) - 1, int(record.words[1])
    indexing = record.launch.indexing or Indexing()
    at = f"\n  at: {indexing.line}" if indexing.line else ""
    what = indexing.facts.outside(index, size)
    return IndexOutsideError(f"aten.{record.launch.ops or 'index'}: index out of range: {what}{at}")


@functools.cache
def _reports(pinned: bool) -> Reports:
    made = Reports(pinned=pinned)
    if pinned:
        atexit.register(_tell_last, made)
    return made


def _tell_last(reports: Reports) -> None:
    """Logs the error that no later call has raised."""
    error = reports.taken()
    if error is not None:
        log.error("%s", error)


def reports_of(device: torch.device) -> Reports:
    """The reports of launches on ``device``."""
    return _reports(device.type == "cuda" and not is_virtual_device_mode())
