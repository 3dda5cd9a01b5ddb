"""Launch lists that wait until the libraries of their device are built and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from max.driver import is_virtual_device_mode

from torch_max_backend.runtime import events, libraries
from torch_max_backend.runtime.progress import progress_line


@dataclass(frozen=True, eq=False)
class Task:
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


def make_ready(tasks: Sequence[Task]) -> None:
    """Builds the libraries that the tasks' lists lack, and binds the lists.

    Raises:
        MaxBackendError: a kernel does not compile, or its library cannot be loaded.
    """
    if not tasks:
        return
    # What is compiled for another machine is all that it may need.
    whole = is_virtual_device_mode()
    names = [name for task in tasks for name in task.names]
    with contextlib.ExitStack() as told:
        told.enter_context(progress_line(events.described(names, sum(task.op_count for task in tasks))))
        for task in tasks:
            told.enter_context(events.compiling(task.names, task.op_count))(task.is_built())
        with contextlib.ExitStack() as building:
            for task in tasks:
                building.enter_context(libraries.ready(task.device, whole))
        for task in tasks:
            if not whole or task.device.type == "cpu":
                task.bind()
