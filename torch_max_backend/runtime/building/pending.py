"""Launch lists that wait until the libraries of their device are built and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from max.driver import is_virtual_device_mode

from torch_max_backend.runtime import events
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.progress import progress_line


@dataclass(frozen=True, eq=False)
class PendingLists:
    """Launch lists of one device.

    Attributes:
        device: that they compute on.
        names: of the graphs.
        op_count: how many aten ops they hold.
        bind: makes them ready; the libraries are loaded.
    """

    device: torch.device
    names: tuple[str, ...]
    op_count: int
    bind: Callable[[], None]

    def is_built(self) -> bool:
        """Whether the cache has all libraries."""
        return not libraries.unbuilt(self.device)


def make_ready(pending: Sequence[PendingLists], told: bool = True) -> None:
    """Builds the libraries that the lists lack, and binds the lists.

    Args:
        pending: the lists.
        told: the user waits, and learns how far it is.

    Raises:
        MaxBackendError: a kernel does not compile, or its library cannot be loaded.
    """
    if not pending:
        return
    # What is compiled for another machine is all that it may need.
    whole = is_virtual_device_mode()
    names = [name for each in pending for name in each.names]
    with contextlib.ExitStack() as stack:
        if told:
            ops = sum(each.op_count for each in pending)
            stack.enter_context(progress_line(events.compilation_in_words(names, ops)))
        for each in pending:
            stack.enter_context(events.compiling(each.names, each.op_count))(each.is_built())
        with contextlib.ExitStack() as building:
            for each in pending:
                building.enter_context(libraries.ready(each.device, whole))
        for each in pending:
            if not whole or each.device.type == "cpu":
                each.bind()
